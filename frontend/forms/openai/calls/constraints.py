"""Constraints on the calls of a chat's answers: in the model's own form or, where that has no grammar, as a JSON list.

And how its answers are read. Knows no prompt and no answer.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .....ipc.errors import RequestError
from .....ipc.params.sampling_params import SamplingParams
from .....ipc.params.structured_outputs import StructuredOutputsParams
from ...answer_forms.form import AnswerForm
from ...answer_forms.grammar import begin_of_calls, forced_calls, form_behind_thought, other_calls, strict_calls
from ...parsers.forced import forcing_schema
from ..params import errors_about
from ..schema import ChatRequest
from ..text import AnswerStyle
from ..tools import CustomTool, NamedTool


def own_form_calls(
    body: ChatRequest, params: SamplingParams, form: AnswerForm, call_token: str, *, is_inside: bool, may_think: bool
) -> StructuredOutputsParams | None:
    """Return the constraint on calls in the model's own form, where they are forced or a tool is strict. None if there
    is none, the form is unknown, or the request has another constraint. `call_token`: see there; `is_inside`: the
    answer begins inside a thought; `may_think`: the model may open one at its begin."""
    tools = {tool.called.name: tool.called for tool in body.tools or ()}
    given, choice = params.structured_outputs, body.tool_choice
    if not form.calls or not tools:
        return None
    has_one_call = body.parallel_tool_calls is False
    if choice not in (None, "none", "auto"):
        if given is None or not given.json:  # a text that a custom tool takes
            return None
        name = choice.called.name if isinstance(choice, NamedTool) else None
        schemas = {each: tool.schema for each, tool in tools.items() if name in (None, each)}
        begin = call_token if form.calls_end_thought else ""
        own = forced_calls(
            form,
            schemas,
            has_one_call=has_one_call or name is not None,
            may_think=may_think and params.thinking_token_budget is None,
            may_begin_with_space=is_inside or bool(body.continue_final_message),
        )
        return msgspec.structs.replace(own, begin=begin)
    strict = _strict_names(body)
    if choice == "none" or given is not None or not strict:
        return None
    schemas = {each: tool.schema for each, tool in tools.items()}
    begin = "" if other_calls(form) else call_token  # "": text may begin calls in each form
    own = strict_calls(form, schemas, strict, has_one_call=has_one_call, has_text=not begin)
    return msgspec.structs.replace(own, begin=begin, repeats=bool(begin))


def behind_own_thought(params: SamplingParams, form: AnswerForm) -> SamplingParams:
    """Return the parameters of an answer whose constraint, if it has one, holds behind a thought that the model may
    open at the begin, or from the first token. One on calls, or one that includes the thought, stays as it is: it has
    the thought in it."""
    structured = params.structured_outputs
    if structured is None or structured.calls or structured.includes_thought:
        return params
    return params.replace(structured_outputs=msgspec.structs.replace(structured, thought=form.thought))


def strict_without_effect(body: ChatRequest, params: SamplingParams, form: AnswerForm) -> str:
    """Return why `strict` of a tool has no effect on an answer that no `own_form_calls` constrain; "" if there is no
    such tool, or if the calls are forced, which all conform. `params`: of the request."""
    if body.tool_choice not in (None, "auto") or not _strict_names(body):
        return ""
    if params.structured_outputs is not None:
        return "strict of tools has no effect beside response_format or structured_outputs"
    return "strict of tools has no effect: the form of this model's calls has no grammar; force calls with tool_choice"


def _strict_names(body: ChatRequest) -> set[str]:
    tools = [tool.called for tool in body.tools or ()]
    return {tool.name for tool in tools if tool.strict and not isinstance(tool, CustomTool)}


def call_token(form: AnswerForm, is_added_token: Callable[[str], bool]) -> str:
    """Return the token with which calls of a form begin, or the text from there to another token; "" if they begin with
    text. `is_added_token` says whether a text is one token wherever it stands."""
    if not form.calls:
        return ""
    return begin_of_calls(form, is_added_token)


def new_style(
    body: ChatRequest,
    form: AnswerForm,
    forced: StructuredOutputsParams | None,
    own: StructuredOutputsParams | None,
    *,
    is_inside: bool,
    may_think: bool = False,
) -> AnswerStyle:
    """Return how answers to a chat are read. `forced`, `own`: of `forced_json` and `own_form_calls`; `is_inside`: they
    begin inside a thought; `may_think`: they may begin with one."""
    if own is not None and is_inside:
        form = form_behind_thought(form, own.begin)
    return AnswerStyle(
        form=form,
        schemas={tool.called.name: tool.called.schema for tool in body.tools or ()},
        custom_names=frozenset(tool.called.name for tool in body.tools or () if tool.type == "custom"),
        is_forced=forced is not None,
        is_in_form=own is not None,
        is_text=forced is not None and not forced.json,
        forced_name=body.tool_choice.called.name if isinstance(body.tool_choice, NamedTool) else None,
        is_inside_thought=is_inside,
        may_think=may_think,
        max_calls=1 if body.parallel_tool_calls is False else None,
    )


def tools_field(body: ChatRequest) -> str:
    """Return the name of the request field that holds the tools."""
    return "functions" if body.functions else "tools"


def forced_json(body: ChatRequest) -> StructuredOutputsParams | None:
    """Return the constraint that forces tool calls; None if tool_choice is null, none or auto.

    The call of a named custom tool with a grammar is text of that grammar; other calls are JSON. RequestError if there
    are no tools, the named tool is missing, or no tool is named and one has a lark grammar."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    tool_by_name = {tool.called.name: tool.called for tool in body.tools or ()}
    name = choice.called.name if isinstance(choice, NamedTool) else None
    if not tool_by_name:
        raise RequestError("tool_choice forces a call, but tools is empty: give the tools")
    if name is not None and name not in tool_by_name:
        raise RequestError(f"tool_choice names {name!r:.80}, tools has {', '.join(tool_by_name)}")
    constraints = {each: tool.constraint for each, tool in tool_by_name.items() if isinstance(tool, CustomTool)}
    with errors_about(tools_field(body)):
        if name is not None and constraints.get(name):
            return StructuredOutputsParams.of(constraints[name])
        if lark := [each for each, found in constraints.items() if name is None and "grammar" in found]:
            raise RequestError(
                f"tools: {lark[0]!r:.80} has a lark grammar, which a list cannot hold: name it in tool_choice"
            )
        schemas = {each: tool.schema for each, tool in tool_by_name.items()}
        is_parallel = body.parallel_tool_calls is not False
        schema = forcing_schema(schemas, name, is_parallel=is_parallel)
        return StructuredOutputsParams(json=schema, disable_any_whitespace=True)
