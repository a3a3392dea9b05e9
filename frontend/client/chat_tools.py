"""ChatTools: the tools of one call of `chat`: what they ask of its requests, and how its answers are read.

It does what /v1/chat/completions does with the same fields, by the same code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from ...ipc.codec import JsonObject
from ...ipc.errors import RequestError
from ...ipc.messages.base import FinishReason
from ...ipc.messages.client import AnswerFormIs, Delta, GetAnswerForm, Submit
from ...ipc.params.structured_outputs import StructuredOutputsParams
from ..forms.answer_forms.form import AnswerForm
from ..forms.call_options import ChatOptions
from ..forms.openai.calls.constraints import forced_json, new_style, own_form_calls, strict_without_effect
from ..forms.openai.calls.message import message_of
from ..forms.openai.messages import shows_tools, tools_for_template, with_allowed_tools
from ..forms.openai.schema import ChatRequest
from ..forms.openai.text import AnswerText
from ..forms.parsers.parts import Thought

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


class ChatTools:
    """The tools of a call. `apply` is called for each of its requests, before answers are read."""

    def __init__(self, options: ChatOptions) -> None:
        """RequestError if tools or tool_choice are invalid, or contradict each other."""
        fields: Mapping[str, object] = options
        given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
        try:
            body = msgspec.convert({"messages": [], **given}, ChatRequest)
        except msgspec.ValidationError as error:
            raise RequestError(f"tools of chat(): {error}") from None
        self._body = with_allowed_tools(body)
        self._forced = forced_json(self._body)
        self._own: StructuredOutputsParams | None = None
        self._form = AnswerForm()
        self._is_continued = bool(options.get("continue_final_message"))
        self.query: Callable[..., GetAnswerForm] = partial(GetAnswerForm, template=options.get("chat_template"))

    def apply(self, submit: Submit, found: AnswerFormIs) -> Submit:
        """Return a request with its tools in the form that chat templates take, and the constraint that they ask for.
        `found`: the reply to `query`. RequestError if the request has another constraint."""
        self._form = msgspec.convert(found.form, AnswerForm)
        if self._is_continued:
            self._form = self._form.continued()
        assert submit.chat_form is not None, "it has tools"
        variables: JsonObject = dict(submit.chat_form.variables)
        del variables["tools"]
        if shows_tools(self._body):
            variables["tools"] = tools_for_template(self._body.tools or ())
        else:
            self._form = self._form.without_calls()
        params = submit.params
        if self._forced is not None:
            if params.structured_outputs is not None:
                raise RequestError("tool_choice forces a call while structured_outputs wants something else: give one")
            params = params.replace(structured_outputs=self._forced)
        self._own = own_form_calls(
            self._body, params, self._form, found.call_token, is_inside=False, may_think=not self._is_continued
        )
        if self._own is not None:
            params = params.replace(structured_outputs=self._own)
        elif why := strict_without_effect(self._body, params, self._form):
            warnings.warn(why, stacklevel=2)
        return msgspec.structs.replace(
            submit,
            params=params,
            chat_form=msgspec.structs.replace(submit.chat_form, variables=variables),
            shown_token_ids=found.marker_ids,
        )

    def message(self, text: str, *, is_whole: bool, begins_in_thought: bool) -> dict[str, Any]:
        """Return the text of an answer as a message that may come back in the next turn: role, content, tool_calls if
        there are any, and reasoning if the model thought. `is_whole`: the answer ended by itself."""
        style = new_style(self._body, self._form, self._forced, self._own, is_inside=begins_in_thought)
        reasons: tuple[FinishReason, FinishReason] = ("length", "stop")
        delta = Delta(request_id="", text=text, finish_reason=reasons[is_whole])
        parts = AnswerText(style).read(delta)
        message = message_of(parts, is_forced=style.is_forced)
        thought = "".join(part.text for part in parts if isinstance(part, Thought))
        if thought:
            message["reasoning"] = thought
        return message
