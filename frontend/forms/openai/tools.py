"""Tools of a chat: functions and custom tools, calls of them, and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ..field import means, unused
from .generation import Body, items
from .parts import Sent

CUSTOM_INPUT = "input"  # the argument of a custom tool


class FunctionCall(Sent, frozen=True, kw_only=True):
    """Call of a function or of a custom tool, as an earlier answer made it."""

    name: Annotated[str, means("Name of the tool.")]
    arguments: Annotated[str | JsonObject | None, means("Its arguments, as JSON text or as an object.", "none")] = None
    input: Annotated[str | None, means("The text for a custom tool, which has it in place of arguments.")] = None


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """Base of structs that have a tool in the field named by `type`. RequestError if the tool in a Body has no name,
    unless the type is allowed_tools."""

    def __post_init__(self) -> None:
        if isinstance(self, Body) and (kind := getattr(self, "type", "")) != "allowed_tools" and not self.called.name:
            raise RequestError(f"{getattr(self, 'FIELD', 'tool_choice')}: type {kind} must have {kind}.name: give it")

    @property
    def called(self) -> Any:
        """The tool: the field `custom` if that is the type, otherwise `function`."""
        return getattr(self, "custom" if getattr(self, "type", "") == "custom" else "function")


class ToolCall(Called, Sent, frozen=True, kw_only=True):
    id: Annotated[str | None, means("Id of the call, to which the tool's result refers.", "none")] = None
    type: Annotated[Literal["function", "custom"] | None, means("Which of the two is called.", "function")] = None
    function: Annotated[FunctionCall, means("The call, if the type is function.")] = FunctionCall(name="")
    custom: Annotated[FunctionCall, means("The call, if the type is custom.")] = FunctionCall(name="")
    index: Annotated[int | None, unused("Place of the call in a stream.")] = None


class Function(Body, frozen=True, kw_only=True):
    """Function that the model may call."""

    name: Annotated[str, means("Name of the function, which a call repeats.")]
    description: Annotated[str | None, means("What the function does, for the model to read.", "none")] = None
    parameters: Annotated[
        JsonObject | None,
        means("JSON schema of the arguments; a forced call satisfies it.", "an object without fields"),
    ] = None
    strict: Annotated[
        bool | None, means("Calls satisfy the schema even if none is forced; forced ones always do.", False)
    ] = None

    @property
    def schema(self) -> JsonObject:
        """The JSON schema of the arguments."""
        return self.parameters or {"type": "object", "properties": {}}


class CustomFormat(Body, frozen=True, kw_only=True):
    """Form of a custom tool's text. In a chat the grammar is in `grammar`, in a response in the other fields."""

    type: Annotated[Literal["text", "grammar"], means("Any text, or one that a grammar allows.")] = "grammar"
    syntax: Annotated[Literal["lark", "regex"] | None, means("Language of the grammar.")] = None
    definition: Annotated[str, means("The grammar itself.")] = ""
    grammar: Annotated[CustomFormat | None, means("An object with syntax and definition, as chats have it.")] = None


class CustomTool(Function, frozen=True, kw_only=True):
    """Tool that takes a text. For the model it is a function with one argument."""

    format: Annotated[CustomFormat | None, means("The form of the text that the tool takes.", "any text")] = None

    @property
    def constraint(self) -> dict[str, object]:
        """The structured_outputs for the tool's input; {} if it may be any text. RequestError if a grammar has no
        syntax or no definition."""
        if self.format is None or self.format.type == "text":
            return {}
        given = self.format.grammar or self.format
        if given.syntax is None or not given.definition:
            raise RequestError(f"tools: the grammar of {self.name!r:.80} needs syntax and definition: give both")
        return {"grammar" if given.syntax == "lark" else "regex": given.definition}

    @property
    def schema(self) -> JsonObject:
        text: JsonObject = {"type": "string"}
        for kind, definition in self.constraint.items():
            text["description"] = f"Text that meets this {kind}:\n{definition}"
            text |= {"pattern": f"^(?:{definition})$"} if kind == "regex" else {}
        return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}


class Tool(Called, Body, frozen=True, kw_only=True):
    FIELD: ClassVar = "tools"
    LEFT_OUT: ClassVar = "(?!(?:function|custom)$).*"  # tools that the server would run
    type: Annotated[Literal["function", "custom"], means("Which of the two the tool is.")] = "function"
    function: Annotated[Function, means("The tool, if the type is function.")] = Function(name="")
    custom: Annotated[CustomTool, means("The tool, if the type is custom: it takes a text.")] = CustomTool(name="")


class NamedFunction(Body, frozen=True, kw_only=True):
    """Tool, by its name."""

    name: Annotated[str, means("Name of one of the tools.")]


class AllowedTool(Called, Body, frozen=True, kw_only=True):
    """Tool that may be called, by its name."""

    type: Annotated[Literal["function", "custom"], means("Which of the two the tool is.")] = "function"
    function: Annotated[NamedFunction, means("Its name, if the type is function.")] = NamedFunction(name="")
    custom: Annotated[NamedFunction, means("Its name, if the type is custom.")] = NamedFunction(name="")


class AllowedTools(Body, frozen=True, kw_only=True):
    """Tools that may be called; with mode `required`, one of them must be."""

    mode: Annotated[Literal["auto", "required"], means("Whether one of them must be called, or only may be.")]
    tools: Annotated[list[AllowedTool], items(1), means("The tools that may be called.")]


class NamedTool(Called, Body, frozen=True, kw_only=True):
    """The tool that must be called, or a list of allowed tools. Some clients of other servers leave out the type."""

    type: Annotated[Literal["function", "custom", "allowed_tools"], means("What is chosen.")] = "function"
    function: Annotated[NamedFunction, means("The function that must be called.")] = NamedFunction(name="")
    custom: Annotated[NamedFunction, means("The custom tool that must be called.")] = NamedFunction(name="")
    allowed_tools: Annotated[AllowedTools | None, means("The tools that may be called.")] = None
