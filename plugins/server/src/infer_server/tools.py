"""The tools that a body offers, and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from infer.contracts.params import ToolGrammar
from infer_server.http.body import Body, Many, Text

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
TEXT_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of the function that the model is shown in place of a tool that takes a text."""


def namespaced(namespace: str, name: str) -> str:
    """The name under which the model is shown a tool of a namespace."""
    return f"{namespace}__{name}"


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Ignored: a forced call's arguments always match.")


class FunctionTool(Body):
    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        return self.function.name

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return self.model_dump(exclude_none=True)


class PlainFormat(Body):
    type: Literal["text"]


class Grammar(Body):
    """What the text follows that a tool takes."""

    syntax: Literal["lark", "regex"]
    definition: Text

    def of(self, name: str, param: str) -> ToolGrammar:
        """The grammar of the tool of that name. ``param`` is where the body has it."""
        return ToolGrammar(name, self.syntax, self.definition, param)

    def told(self) -> str:
        """What the tool's description says of it."""
        kind = "regular expression" if self.syntax == "regex" else "Lark grammar"
        return f"The input must match this {kind}:\n{self.definition}"


class GrammarFormat(Body):
    type: Literal["grammar"]
    grammar: Grammar


class Custom(Body):
    name: ToolName
    description: str | None = None
    format: Annotated[PlainFormat | GrammarFormat, Field(discriminator="type")] | None = None


class CustomTool(Body):
    """A tool that takes a text. The model is shown a function with one parameter, ``input``."""

    type: Literal["custom"]
    custom: Custom

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def grammar(self) -> Grammar | None:
        return self.custom.format.grammar if isinstance(self.custom.format, GrammarFormat) else None

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {"type": "function", "function": text_function(self.name, self.custom.description, self.grammar)}


def text_function(name: str, description: str | None, grammar: Grammar | None) -> dict[str, Any]:
    """The function that the model is shown in place of a tool that takes a text."""
    function: dict[str, Any] = {"name": name}
    about = [description, grammar and grammar.told()]
    if said := "\n\n".join(text for text in about if text):
        function["description"] = said
    return function | {"parameters": TEXT_PARAMETERS}


Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class Named(Body):
    name: Text


class NamedFunction(Body):
    type: Literal["function"]
    function: Named

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(Body):
    type: Literal["custom"]
    custom: Named

    @property
    def name(self) -> str:
        return self.custom.name


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Many[Annotated[NamedFunction | NamedCustom, Field(discriminator="type")]] = Field(
        min_length=1, max_length=MAX_TOOLS
    )


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed
