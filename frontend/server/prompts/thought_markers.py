"""ThoughtMarkers: the texts around the reasoning of answers, as tokens, and whether a prompt opens it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ....ipc.codec import decode_ids, encode_ids
from ....ipc.errors import RequestError
from ....ipc.messages.client import Submit, ThoughtTexts
from ....ipc.messages.core import ConstraintBegin
from ....ipc.params.calls_constraint import markers_in_text
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.params.structured_outputs import StructuredOutputsParams
from ...forms.answer_forms.form import AnswerForm
from ...forms.answer_forms.named import THOUGHTS
from ...forms.parsers.names import find_form
from ..text.tokenizer import Tokenizer
from .marker_tokens import MarkerTokens

MAX_TEXTS = 512  # characters of the texts around a request's own thoughts
MAX_OPENING_TOKENS = 16  # tokens of the marker that opens reasoning and the white space after it


class ConstraintPlace(NamedTuple):
    """Where the structured_outputs of a request apply: fields of an EngineCoreRequest."""

    begins: list[ConstraintBegin]
    triggers: bytes = b""
    repeats: bool = False


class ThoughtMarkers:
    """Texts around the thoughts of a form. Without thoughts no prompt opens reasoning."""

    def __init__(
        self,
        form: AnswerForm,
        tokenizer: Tokenizer | None,
        check_ids: Callable[[bytes, str], None],
        marker_tokens: MarkerTokens | None = None,
    ) -> None:
        """`form`: that of the model's answers. `check_ids` raises RequestError for tokens outside the vocabulary; its
        second argument is their name. marker_tokens: of the tokenizer; None: made of it."""
        self._tokenizer = tokenizer
        self._check_ids = check_ids
        if marker_tokens is None and tokenizer is not None:
            marker_tokens = MarkerTokens(tokenizer)
        self._marker_tokens = marker_tokens
        self._form = form
        self._texts = form.thought or THOUGHTS["think"]

    def of_form(self, form: AnswerForm) -> ThoughtMarkers:
        """Return the markers of another form, for the same model."""
        return ThoughtMarkers(form, self._tokenizer, self._check_ids, self._marker_tokens)

    def of_request(self, submit: Submit) -> ThoughtMarkers:
        """Return the markers for a request: its own or, if it has another template than the model, those that stand
        there. RequestError for texts that are too long."""
        texts = submit.thoughts
        if texts is not None:
            if len(texts.opening) + len(texts.closing) > MAX_TEXTS:
                raise RequestError(f"the texts of `thoughts` have more than {MAX_TEXTS} characters: shorten them")
            form = AnswerForm(begins_inside=texts.begins_inside)
            if texts.closing:
                form = msgspec.structs.replace(form, thought=(texts.opening, texts.closing))
            return self.of_form(form)
        if submit.chat_form is not None and submit.chat_form.template is not None:
            return self.of_form(find_form(submit.chat_form.template))
        return self

    def are_open(self, prompt_token_ids: bytes) -> bool:
        """Return whether the answer begins inside a thought; False without a reasoning parser."""
        return self._form.thought is not None and self._form.begins_in_thought(self._end_of(prompt_token_ids))

    def may_be_opened(self, prompt_token_ids: bytes) -> bool:
        """Return whether the answer may begin with a thought that the model opens itself."""
        return self._form.thought is not None and self._form.may_open_thought(self._end_of(prompt_token_ids))

    def _end_of(self, prompt_token_ids: bytes) -> str:
        """Return the last text of a prompt; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        tail = decode_ids(prompt_token_ids[-4 * MAX_OPENING_TOKENS :])
        return self._tokenizer.decode(tail, skip_special_tokens=False)

    def place_of(self, params: SamplingParams, prompt_token_ids: bytes) -> ConstraintPlace:
        """Return where structured_outputs apply: behind the end of the reasoning that the prompt opens, from the token
        `begin` on, from a token that may begin calls in prose; if nothing of this is named, from the first token on.
        RequestError if `begin` is no added token.

        If they repeat, a `begin` counts wherever it comes. If they do not, it may only come in place of the end of
        reasoning: without reasoning the answer starts with it."""
        structured = params.structured_outputs
        if structured is None or structured.includes_thought:
            return ConstraintPlace([])
        begins: list[ConstraintBegin] = []
        if structured.begin:
            begins.append(self._begin_of(structured.begin))
        if structured.repeats:
            return ConstraintPlace(begins, repeats=True)
        ends: list[ConstraintBegin] = []
        if self.are_open(prompt_token_ids):
            ends.append(ConstraintBegin(token_ids=self._tokens_of(self._texts[1])))
        triggers = self._triggers_of(structured)
        if triggers:
            return ConstraintPlace(ends, triggers, repeats=True)
        return ConstraintPlace([*ends, *begins] if ends else [])

    def _triggers_of(self, structured: StructuredOutputsParams) -> bytes:
        """Return the tokens with which calls may begin in prose; b"" if there is no prose, or if all of it needs
        masks."""
        if structured.calls is None or self._tokenizer is None or self._marker_tokens is None:
            return b""
        markers = markers_in_text(structured.calls, self._tokenizer.added_ids)
        return self._marker_tokens.leading_to(markers) if markers else b""

    def _begin_of(self, text: str) -> ConstraintBegin:
        token_ids: list[int] = []
        if self._tokenizer is not None and len(text) <= MAX_TEXTS:
            added = self._tokenizer.added_ids
            token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
            if text in added:
                token_ids = [added[text]]
            if not {*token_ids[:1], *token_ids[-1:]} <= {*added.values()}:  # in other text it has other tokens
                token_ids = []
        if not token_ids:
            raise RequestError(
                f"structured_outputs.begin is {text[:80]!r}, which is no added token of this model, nor begins and "
                "ends with one: let the grammar include the text before it"
            )
        frame = encode_ids(token_ids)
        self._check_ids(frame, "structured_outputs.begin")
        return ConstraintBegin(token_ids=frame, is_included=True)

    def of_budget(self, params: SamplingParams, place: ConstraintPlace) -> list[bytes]:
        """Return the markers that start and end reasoning, if thinking_token_budget needs them. Empty if
        structured_outputs apply from the first token, or from the first call in prose, and allow no thought: the answer
        then has no reasoning that could end. place: of `place_of`."""
        structured = params.structured_outputs
        if params.thinking_token_budget is None:
            return []
        if structured is not None and structured.thought is None and not place.begins:
            return []
        return list(map(self._tokens_of, self._texts))

    def _tokens_of(self, text: str) -> bytes:
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer, so that no thought is found: leave thinking_token_budget out"
            )
        marker = encode_ids(self._tokenizer.encode(text, add_special_tokens=False))
        self._check_ids(marker, "the marker of a thought")
        return marker


def thought_texts(form: AnswerForm) -> ThoughtTexts:
    """Return the texts around the thoughts of a form."""
    if form.thought is None:
        return ThoughtTexts()
    opening, closing = form.thought
    return ThoughtTexts(opening=opening, closing=closing, begins_inside=form.begins_inside)
