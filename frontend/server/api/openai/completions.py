"""Completion: the response of /v1/completions, continuations of texts or of lists of token ids, as a whole or as
events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .....ipc.codec import JsonObject, decode_ids
from .....ipc.messages.client import Delta, Logprobs
from ....forms.openai.logprobs import CompletionLogprobs, narrowed, prompt_logprob_dicts
from ....forms.openai.params import sampling_params
from ....forms.openai.prompts import answer_id, prompt_submits
from ....forms.openai.schema import CompletionRequest
from ...bodies.body_parser import ParsedBody
from ...prompts.input_processor import InputProcessor
from ...text.token_offsets import answer_offsets, prompt_offsets
from ..continuation import current
from .choices import Choice, ChoicesResponse
from .local_engine import LocalEngine
from .run import Run


class Completion(ChoicesResponse):
    """Response to one request for completions of one or more prompts."""

    kind, chunk_kind, prompt_field, streams_empty_text = "text_completion", "text_completion", "prompt", True

    def __init__(self, engine: LocalEngine, parsed: ParsedBody[CompletionRequest], model: str) -> None:
        body = parsed.body
        request_id = answer_id("cmpl", body.request_id, current().digits("id"))
        scores = [each for each in (body.prompt_logprobs, body.logprobs if body.echo else None) if each is not None]
        params = sampling_params(
            body,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=-1 if -1 in scores else max(scores, default=None),
        )
        submits = prompt_submits(request_id, parsed.inputs, params, body.add_special_tokens)
        super().__init__(engine, body, model, request_id, submits)
        self._body = body
        self._prompts = parsed.inputs

    def _choices(self, run: Run) -> Iterator[_Choice]:
        for index in range(run.num_choices):
            text = self._prompts[index // run.num_answers].text
            yield _Choice(index, run, self._body, text, self._engine.inputs)


class _Choice(Choice):
    def __init__(
        self, index: int, run: Run, body: CompletionRequest, prompt_text: str | None, inputs: InputProcessor
    ) -> None:
        super().__init__(index, run, is_plain=body.logprobs is None)
        self._body, self._prompt_text, self._inputs = body, prompt_text, inputs
        self._columns: CompletionLogprobs | None = None  # set with the first delta if logprobs are asked for
        self._num_characters = 0  # characters of text in all chunks so far

    def build(self) -> JsonObject:
        body, prompt_logprobs = self._body, self.prompt_logprobs
        choice: JsonObject = {"stop_reason": None, "token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
        echoed: list[Logprobs] = []
        if body.echo and body.logprobs is not None:
            echoed = [narrowed(each, body.logprobs) for each in prompt_logprobs]
        logprobs = [delta.logprobs for delta in self.with_logprobs]
        choice |= self._chunk("".join(self.texts), self.last, echoed, logprobs, bytes(self.token_ids))
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprob_dicts(prompt_logprobs, body.prompt_logprobs)
        return choice

    def chunk(self, delta: Delta) -> JsonObject:
        self.add_prompt(delta)
        echoed: list[Logprobs] = [] if self.has_begun else self.prompt_logprobs
        return self._chunk(delta.text, delta, echoed, [delta.logprobs], delta.token_ids)

    def _chunk(
        self,
        text: str,
        newest: Delta,
        echoed: Sequence[Logprobs | None],
        logprobs: Sequence[Logprobs | None],
        token_ids: bytes,
    ) -> JsonObject:
        """Return the choice's entry for its next text and tokens. If `echo` is set, the first entry starts with the
        prompt. `newest`: the last of the deltas in the entry; `echoed`, `logprobs`: the logprobs of the next prompt and
        answer tokens."""
        if not self.has_begun:
            text = self._begin() + text
        choice = self.text_chunk(text)
        self._num_characters += len(text)
        if newest.finish_reason is not None:
            choice |= {"finish_reason": newest.finish_reason, "stop_reason": newest.stop_reason}
        if self._columns is not None:
            self._columns.add_prompt(echoed)
            self._columns.add(logprobs)
            choice["logprobs"] = self._columns.take(self._num_characters, is_last=newest.finish_reason is not None)
        if self._body.return_token_ids:
            choice["token_ids"] = decode_ids(token_ids).tolist()
            if not self.has_begun:
                choice["prompt_token_ids"] = decode_ids(self._run.prompt_ids(self._index)).tolist()
        return choice

    def text_chunk(self, text: str) -> JsonObject:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _begin(self) -> str:
        """Return the text that precedes the answer: the prompt if `echo` is set, otherwise "". If logprobs are asked
        for, create `_columns`, with the first prompt token if the prompt is echoed."""
        body, token_ids = self._body, self._run.prompt_ids(self._index)
        text = self._prompt_text if body.echo and token_ids else ""
        if text is None:
            text = self._inputs.detokenize(token_ids)
        if body.logprobs is not None:
            factory = self._inputs.detokenizers
            self._columns = CompletionLogprobs(
                prompt_offsets(factory, self._prompt_text),
                answer_offsets(factory, token_ids, body, len(text)),
                with_ids=bool(body.return_tokens_as_token_ids),
            )
            if body.echo and token_ids:
                first = int(decode_ids(token_ids)[0])
                self._columns.add_first(first, "" if factory is None else factory.texts[first])
        return text
