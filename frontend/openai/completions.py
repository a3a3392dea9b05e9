"""Serve /v1/completions: continue texts or token ids, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...ipc.codec import JsonObject, decode_ids
from ...ipc.messages.client import Accepted, Delta, Logprobs
from ..intake.body_parser import ParsedBody
from ..intake.input_processor import InputProcessor
from .answers import Answers, Choice
from .forms.logprobs import CompletionLogprobs, narrowed, prompt_logprob_dicts
from .forms.params import sampling_params
from .forms.prompts import answer_id, prompt_submits
from .forms.schema import CompletionRequest
from .local_engine import LocalEngine, Run


class Completion(Answers):
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
            yield _Choice(index, self._body, text, self._engine.inputs, run)


class _Choice(Choice):
    def __init__(
        self,
        index: int,
        body: CompletionRequest,
        prompt_text: str | None,
        inputs: InputProcessor,
        run: Run,
    ) -> None:
        super().__init__()
        self._index = index
        self._body = body
        self._prompt_text = prompt_text
        self._inputs = inputs
        self._run = run
        self._columns = CompletionLogprobs(with_ids=bool(body.return_tokens_as_token_ids))
        self.is_plain = body.logprobs is None

    @property
    def _prompt(self) -> Accepted | None:
        return self._run.prompt_of(self._index)

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
        return self._chunk(text, delta, [delta.prompt_logprobs, delta.logprobs], delta.token_ids)

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
                prompt = self._prompt
                choice["prompt_token_ids"] = None if prompt is None else decode_ids(prompt.prompt_token_ids).tolist()
        return choice

    def text_chunk(self, text: str) -> JsonObject:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _echoed(self) -> str:
        """Return the prompt's text if `echo` is set, and add its first token to the logprobs."""
        prompt = self._prompt
        if prompt is None or not self._body.echo:
            return ""
        first = prompt.prompt_token_ids[:4]
        self._columns.add_first(int(decode_ids(first)[0]), self._inputs.detokenize(first))
        text = self._prompt_text
        return self._inputs.detokenize(prompt.prompt_token_ids) if text is None else text
