"""The tools that a body of /v1/responses offers, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from infer.contracts.params import StructuredOutputs
from infer.server.http.body import Body, Many, Text
from infer.server.messages import Kept
from infer.server.tools import MAX_TOOLS, TEXT_PARAMETERS, PlainFormat, ToolName, namespaced

CLOUD = (
    *("web_search", "file_search", "tool_search", "image_generation", "code_interpreter", "programmatic_tool_calling"),
    *("mcp", "computer", "local_shell", "shell", "apply_patch"),
)
"""The kinds of tools that OpenAI's own servers run, or that only its own models know without being shown them."""


MAX_OFFERS = 1024
"""The most tools that a body may hold, those of namespaces counted each."""


def cloud_kind(type: object) -> str | None:
    """Which kind of a cloud's tool this type is, such as ``web_search`` for ``web_search_preview``; None if it is
    none."""
    if not isinstance(type, str):
        return None
    return next((kind for kind in CLOUD if type == kind or type.startswith(f"{kind}_")), None)


def _type(value: Any) -> Any:
    type = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "web_search" if cloud_kind(type) else type


class CloudTool(Body):
    """A tool that only a cloud has. It is accepted with any fields, and the model is not shown it."""

    model_config = ConfigDict(extra="ignore")

    type: str


class _Tool(Body):
    name: ToolName
    description: str | None = None
    defer_loading: Kept = Field(None, description="Ignored: the model is shown the tool at once.")
    allowed_callers: Kept = Field(None, description="Ignored: the model calls all tools itself.")


class FunctionTool(_Tool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Ignored: a forced call's arguments always match.")
    output_schema: Kept = Field(None, description="Ignored: the chat template does not see it.")

    def shown(self) -> dict[str, Any]:
        """The function as chat templates take it."""
        return self.model_dump(exclude_none=True, include={"name", "description", "parameters", "strict"})


class Grammar(Body):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Text

    def outputs(self) -> StructuredOutputs:
        if self.syntax == "regex":
            return StructuredOutputs(regex=self.definition)
        return StructuredOutputs(grammar=self.definition)

    def told(self) -> str:
        """What the tool's description says of it."""
        kind = "regular expression" if self.syntax == "regex" else "Lark grammar"
        return f"The input must match this {kind}:\n{self.definition}"


class CustomTool(_Tool):
    """A tool that takes a text. The model is shown a function with one parameter, ``input``."""

    type: Literal["custom"]
    format: Annotated[PlainFormat | Grammar, Field(discriminator="type")] | None = Field(
        None, description="A grammar is kept to if tool_choice forces the tool; otherwise the model is only told of it."
    )

    @property
    def grammar(self) -> Grammar | None:
        return self.format if isinstance(self.format, Grammar) else None

    def shown(self) -> dict[str, Any]:
        """The function as chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        about = [self.description, self.grammar and self.grammar.told()]
        if said := "\n\n".join(text for text in about if text):
            function["description"] = said
        return function | {"parameters": TEXT_PARAMETERS}


class Namespace(Body):
    """Tools with a name in common. The model is shown each as ``namespace__name``."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = Field(None, description="The model is shown it with the first of the tools.")
    tools: Many[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]] = Field(max_length=MAX_TOOLS)


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[CloudTool, Tag("web_search")],
    Discriminator(_type),
]


Key = tuple[str, str | None, str]
"""The type, namespace and name by which a choice names a tool."""


@dataclass(frozen=True)
class Offer:
    """A tool, and the name under which the model is shown it."""

    name: str
    tool: FunctionTool | CustomTool
    namespace: Namespace | None = None

    @property
    def custom(self) -> bool:
        return isinstance(self.tool, CustomTool)

    @property
    def keys(self) -> tuple[Key, ...]:
        """All by which a choice may name it."""
        type, name = self.tool.type, self.tool.name
        alone = ((type, None, name), (type, None, self.name))
        return alone if self.namespace is None else (*alone, (type, self.namespace.name, name))


def offers(tools: Iterable[FunctionTool | CustomTool | Namespace | CloudTool]) -> Iterator[Offer]:
    """The tools that the model can be shown. Those that only a cloud has are not among them."""
    for tool in tools:
        match tool:
            case Namespace():
                yield from (Offer(namespaced(tool.name, each.name), each, tool) for each in tool.tools)
            case FunctionTool() | CustomTool():
                yield Offer(tool.name, tool)


def shown(offered: Iterable[Offer]) -> list[dict[str, Any]]:
    """The tools as chat templates take them. The first of a namespace has the namespace's description, too."""
    told: set[str] = set()
    functions = []
    for offer in offered:
        function = offer.tool.shown() | {"name": offer.name}
        space = offer.namespace
        if space is not None and space.description and space.name not in told:
            told.add(space.name)
            texts = (space.description, function.get("description"))
            function["description"] = "\n\n".join(text for text in texts if text)
        functions.append({"type": "function", "function": function})
    return functions


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: Text
    namespace: str | None = None

    @property
    def key(self) -> Key:
        return self.type, self.namespace, self.name


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[
        Annotated[
            Annotated[NamedTool, Tag("function")]
            | Annotated[NamedTool, Tag("custom")]
            | Annotated[CloudTool, Tag("web_search")],
            Discriminator(_type),
        ]
    ] = Field(min_length=1, max_length=MAX_TOOLS)

    @property
    def named(self) -> tuple[NamedTool, ...]:
        return tuple(tool for tool in self.tools if isinstance(tool, NamedTool))


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
