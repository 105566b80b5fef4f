"""The tools that a body of /v1/responses offers, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from infer.contracts.params import ToolGrammar
from infer_server.http.body import Body, Many, Text
from infer_server.messages import Kept
from infer_server.tools import MAX_TOOLS, Grammar, PlainFormat, ToolName, namespaced, text_function

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


class GrammarFormat(Grammar):
    type: Literal["grammar"]


class CustomTool(_Tool):
    """A tool that takes a text. The model is shown a function with one parameter, ``input``."""

    type: Literal["custom"]
    format: Annotated[PlainFormat | GrammarFormat, Field(discriminator="type")] | None = None

    @property
    def grammar(self) -> GrammarFormat | None:
        return self.format if isinstance(self.format, GrammarFormat) else None

    def shown(self) -> dict[str, Any]:
        """The function as chat templates take it."""
        return text_function(self.name, self.description, self.grammar)


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
    param: str = ""
    """Where the body has the tool."""

    @property
    def grammar(self) -> ToolGrammar | None:
        found = self.tool.grammar if isinstance(self.tool, CustomTool) else None
        return None if found is None else found.of(self.name, f"{self.param}.format")

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
    for i, tool in enumerate(tools):
        match tool:
            case Namespace():
                for j, each in enumerate(tool.tools):
                    yield Offer(namespaced(tool.name, each.name), each, tool, f"tools[{i}].tools[{j}]")
            case FunctionTool() | CustomTool():
                yield Offer(tool.name, tool, None, f"tools[{i}]")


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
