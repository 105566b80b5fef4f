"""The tools that a body offers, and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from infer.server.http.body import Body, Many, Text

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


class Custom(Body):
    name: ToolName
    description: str | None = None
    format: PlainFormat | None = Field(None, description="text, as without it: grammars are not supported.")


class CustomTool(Body):
    """A tool that takes a text. The model is shown a function with one parameter, ``input``."""

    type: Literal["custom"]
    custom: Custom

    @property
    def name(self) -> str:
        return self.custom.name

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = self.custom.model_dump(exclude_none=True, exclude={"format"}) | {"parameters": TEXT_PARAMETERS}
        return {"type": "function", "function": function}


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
