"""Tools of the Responses API, which are flat, unlike a chat's: functions, the choice among them, and items of calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator

from api.openai.fields import ClosedBody, StrictBody
from api.openai.tool_fields import (
    MAX_TOOLS,
    FunctionKind,
    FunctionName,
    HostedTool,
    OnlyFunctions,
    Parameters,
    check_different,
    choice_shape,
    chosen,
    tool_shape,
)
from penstock.tools import Tool, Tools


class FlatTool(StrictBody):
    """A function that the model may call."""

    PASSED = True

    type: FunctionKind = Field(description="Only functions: the client runs them.")
    name: FunctionName = Field(description="Letters, digits, `_`, `-` and `.`; at most 128 characters.")
    description: Annotated[str, Field(max_length=16_384)] | None = Field(None, description="What it does.")
    parameters: Parameters | None = Field(None, description="JSON schema of its arguments, an object; at most 512 KiB.")
    strict: bool | None = Field(None, description="Whether calls are checked against the schema.")

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters, bool(self.strict), self.further)

    @property
    def shown(self) -> dict[str, Any]:
        """As the response shows it."""
        named = {"type": "function", "name": self.name, "description": self.description}
        return {**named, "parameters": self.parameters, "strict": bool(self.strict)}


class FlatNamed(ClosedBody):
    """The function that must be called."""

    type: FunctionKind
    name: FunctionName


class FlatAllowed(ClosedBody):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamed], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True), OnlyFunctions]


FlatChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[FlatNamed, Tag("<named>")]
    | Annotated[FlatAllowed, Tag("<allowed>")],
    Discriminator(choice_shape),
]


AnyFlatTool: TypeAlias = Annotated[
    Annotated[FlatTool, Tag("<function>")] | Annotated[HostedTool, Tag("<hosted>")], Discriminator(tool_shape)
]


class FlatToolFields(StrictBody):
    """The fields of a response that offer tools."""

    tools: Annotated[list[AnyFlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None,
        description="Functions that the model may call. Refused if it knows none. Other tools are ignored.",
    )
    tool_choice: FlatChoice | None = Field(
        None,
        description="`auto` (the default with tools): the model chooses; `none`; `required`; or one function, or some.",
    )
    parallel_tool_calls: bool | None = Field(True, description="False: at most one call in an answer.")

    @field_validator("tools")
    @classmethod
    def _different(cls, tools: list[AnyFlatTool] | None) -> list[AnyFlatTool] | None:
        check_different([tool.name for tool in tools or () if isinstance(tool, FlatTool)])
        return tools

    @property
    def functions(self) -> list[FlatTool]:
        """The tools without those that do not run here."""
        return [tool for tool in self.tools or () if isinstance(tool, FlatTool)]

    @property
    def tools_asked(self) -> Tools | None:
        """The functions that the answer may call; None if it may call none. Raises ApiError (400)."""
        offered = tuple([tool.tool for tool in self.functions])
        match self.tool_choice:
            case FlatNamed(name=name):
                return chosen(offered, "required", [name], named=True, parallel=self._parallel)
            case FlatAllowed(mode=mode, tools=allowed):
                return chosen(offered, mode, [each.name for each in allowed], parallel=self._parallel)
            case word:
                return chosen(offered, word, parallel=self._parallel)

    @property
    def choice_shown(self) -> Any:
        """The choice as the response shows it."""
        choice = self.tool_choice
        return choice.model_dump() if isinstance(choice, FlatNamed | FlatAllowed) else choice or "auto"

    @property
    def _parallel(self) -> bool:
        return self.parallel_tool_calls is not False
