"""/v1/completions: texts or token ids in, answers out, whole or as events."""

from __future__ import annotations

from ..ipc.codec import decode_ids
from ..ipc.messages import Accepted, Delta, Logprobs
from .input_processor import InputProcessor
from .openai_answers import Answers, Choice
from .openai_logprobs import CompletionLogprobs
from .openai_params import num_choices, sampling_params
from .openai_prompts import answer_id, prompt_submits
from .openai_run import Run
from .openai_schema import CompletionRequest
from .server_engine import LocalEngine
from .tokenizer import JsonObject


class Completion(Answers):
    """One request to the endpoint."""

    kind, chunk_kind, tells_empty = "text_completion", "text_completion", True

    def __init__(self, engine: LocalEngine, body: CompletionRequest, model: str) -> None:
        request_id = answer_id("cmpl", body.request_id)
        params = sampling_params(
            body,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        submits = prompt_submits(request_id, "prompt", body.prompt, params, engine.inputs, body.add_special_tokens)
        super().__init__(engine, body, model, request_id, submits, num_choices(body))
        self._body = body

    def _choices(self, run: Run) -> list[_Choice]:
        shared: list[list[Logprobs]] = [[] for _ in self._submits]
        return [
            _Choice(index, self._body, self._engine.inputs, run, shared[index // self._n])
            for index in range(run.num_choices)
        ]


class _Choice(Choice):
    def __init__(
        self, index: int, body: CompletionRequest, inputs: InputProcessor, run: Run, prompt_logprobs: list[Logprobs]
    ) -> None:
        """`prompt_logprobs` are of all answers to a prompt: whichever has news first brings them."""
        self._index = index
        self._body = body
        self._inputs = inputs
        self._run = run
        self._prompt_logprobs = prompt_logprobs
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._columns = CompletionLogprobs()
        self._last: Delta | None = None
        self.is_plain = body.logprobs is None

    @property
    def _prompt(self) -> Accepted | None:
        return self._run.prompt_of(self._index)

    def add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._last = delta
        if self._body.return_token_ids:
            self._token_ids += decode_ids(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.append(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.append(delta.prompt_logprobs)

    def build(self) -> JsonObject:
        assert self._last is not None, "every choice has ended"
        choice = self.text_chunk(self._echoed() + "".join(self._text))
        if self._body.logprobs is not None:
            for each in (*(self._prompt_logprobs if self._body.echo else ()), *self._logprobs):
                self._columns.add(each)
            choice["logprobs"] = self._columns.take()
        choice |= {"finish_reason": self._last.finish_reason, "stop_reason": self._last.stop_reason}
        if self._body.return_token_ids:
            choice["token_ids"] = self._token_ids
            choice["prompt_token_ids"] = self._prompt_token_ids()
        return choice

    def chunks(self, delta: Delta) -> list[JsonObject]:
        choice = self.text_chunk(delta.text if self.has_begun else self._echoed() + delta.text)
        if delta.finish_reason is not None:
            choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._body.logprobs is not None:
            self._columns.add(delta.prompt_logprobs)
            self._columns.add(delta.logprobs)
            choice["logprobs"] = self._columns.take()
        if self._body.return_token_ids:
            choice["token_ids"] = decode_ids(delta.token_ids).tolist()
            if not self.has_begun:
                choice["prompt_token_ids"] = self._prompt_token_ids()
        return [choice]

    def text_chunk(self, text: str) -> JsonObject:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _echoed(self) -> str:
        """The prompt's text, if it is asked for; its first token, which nothing came before, opens the logprobs."""
        prompt = self._prompt
        if prompt is None or not self._body.echo:
            return ""
        self._columns.add_first(self._inputs.detokenize(prompt.prompt_token_ids[:4]))
        return self._inputs.detokenize(prompt.prompt_token_ids) if prompt.prompt is None else prompt.prompt

    def _prompt_token_ids(self) -> list[int] | None:
        prompt = self._prompt
        return None if prompt is None else decode_ids(prompt.prompt_token_ids).tolist()
