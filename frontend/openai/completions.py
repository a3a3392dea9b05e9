"""Completion: the response of /v1/completions, continuations of texts or token ids, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...ipc.codec import JsonObject, decode_ids
from ...ipc.messages.client import Delta, Logprobs
from ..intake.body_parser import ParsedBody
from ..intake.input_processor import InputProcessor
from .choices import Choice, ChoicesResponse
from .forms.logprobs import CompletionLogprobs, narrowed, prompt_logprob_dicts
from .forms.params import sampling_params
from .forms.prompts import answer_id, prompt_submits
from .forms.schema import CompletionRequest
from .local_engine import LocalEngine, Run


class Completion(ChoicesResponse):
    """Response to one request for completions."""

    kind, chunk_kind, prompt_field, streams_empty_text = "text_completion", "text_completion", "prompt", True

    def __init__(self, engine: LocalEngine, parsed: ParsedBody[CompletionRequest], model: str) -> None:
        body = parsed.body
        request_id = answer_id("cmpl", body.request_id)
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
        self._columns = CompletionLogprobs(with_ids=bool(body.return_tokens_as_token_ids))
        self._num_echoed = 0  # of the deltas with logprobs of the prompt

    def build(self) -> JsonObject:
        text = self._echoed() + "".join(self.texts)
        body, prompt_logprobs = self._body, self.prompt_logprobs
        logprobs = [delta.logprobs for delta in self.with_logprobs]
        if body.echo and body.logprobs is not None:
            logprobs = [*(narrowed(each, body.logprobs) for each in prompt_logprobs), *logprobs]
        choice: JsonObject = {"stop_reason": None, "token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
        choice |= self._chunk(text, self.last, logprobs, bytes(self.token_ids))
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprob_dicts(prompt_logprobs, body.prompt_logprobs)
        return choice

    def chunk(self, delta: Delta) -> JsonObject:
        text = delta.text if self.has_begun else self._echoed() + delta.text
        if delta.prompt_logprobs is not None:
            self.with_prompt_logprobs.append(delta)
        new = self.with_prompt_logprobs[self._num_echoed :]  # also of other answers: they precede all tokens
        self._num_echoed += len(new)
        return self._chunk(text, delta, [*(each.prompt_logprobs for each in new), delta.logprobs], delta.token_ids)

    def _chunk(self, text: str, newest: Delta, logprobs: Sequence[Logprobs | None], token_ids: bytes) -> JsonObject:
        choice = self.text_chunk(text)
        if newest.finish_reason is not None:
            choice |= {"finish_reason": newest.finish_reason, "stop_reason": newest.stop_reason}
        if self._body.logprobs is not None:
            for each in logprobs:
                self._columns.add(each)
            choice["logprobs"] = self._columns.take()
        if self._body.return_token_ids:
            choice["token_ids"] = decode_ids(token_ids).tolist()
            if not self.has_begun:
                choice["prompt_token_ids"] = decode_ids(self._run.prompt_ids(self._index)).tolist()
        return choice

    def text_chunk(self, text: str) -> JsonObject:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _echoed(self) -> str:
        """If `echo` is set, return the prompt's text and add its first token to the logprobs; otherwise return ""."""
        token_ids, text = self._run.prompt_ids(self._index), self._prompt_text
        if not token_ids or not self._body.echo:
            return ""
        self._columns.add_first(int(decode_ids(token_ids)[0]), self._inputs.detokenize(token_ids[:4]))
        return self._inputs.detokenize(token_ids) if text is None else text
