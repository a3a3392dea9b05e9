"""Beam search as rounds of requests: each round generates one token of every open beam.

Each beam is a prompt; the prefix cache has the KV blocks of the tokens that beams share. Names, meanings and the score
are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

import msgspec

from ....ipc.errors import RequestError
from ....ipc.messages.client import Info, Medium
from ....ipc.params.beam_search_params import BeamSearchParams
from ....ipc.params.sampling_params import SamplingParams
from ...forms.logprobs import TokenLogprobs
from ..outputs import RequestOutput


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One beam; `tokens` and `text` start with the prompt."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]  # one for each token after the prompt
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # stop: the last token is an EOS token; or length


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """The beams of one prompt, the best one first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The beams of several prompts. In each round run the requests of `prompts` and pass their outputs to `add`, until
    `prompts` returns none; then call `finish`."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: BeamSearchParams,
        info: Info,
        media: Sequence[list[Medium]] | None = None,
    ) -> None:
        """Start a search. `media`: the media of each prompt. RequestError if the tokens that the model allows depend on
        their position in the answer, or if a prompt and max_tokens exceed max_model_len."""
        if info.has_answer_rules:
            raise RequestError(
                f"{info.model} has rules for the begin of its answers, which beam search does not keep: use generate, "
                "or start the engine with --generation-config vllm, which leaves out all rules"
            )
        longest = max(map(len, prompts), default=0)
        if longest + params.max_tokens > info.max_model_len:
            raise RequestError(
                f"a prompt has {longest} tokens and max_tokens is {params.max_tokens}, max_model_len is "
                f"{info.max_model_len}: shorten them or raise --max-model-len"
            )
        self._params, self._num_rounds = params, 0
        self._media = [[] for _ in prompts] if media is None else media
        self._eos_token_ids = () if params.ignore_eos else info.eos_token_ids
        self._open = [[BeamSearchSequence(tokens=list(prompt), logprobs=[])] for prompt in prompts]
        self._ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
        self.outputs: list[BeamSearchOutput] = []
        width = 2 * params.beam_width
        self.sampling_params = SamplingParams(temperature=0, max_tokens=1, logprobs=width, ignore_eos=True)

    def requests(self) -> list[list[int]]:
        """Return the token ids of the next round's prompts: the tokens of every open beam. [] after max_tokens rounds,
        or if no beam is open."""
        if self._num_rounds == self._params.max_tokens:
            return []
        return [beam.tokens for beams in self._open for beam in beams]

    def prompts(self) -> list[dict[str, object]]:
        """Return `requests` as prompts with their media."""
        media = [media for beams, media in zip(self._open, self._media, strict=True) for _ in beams]
        return [
            {"prompt_token_ids": tokens, "multi_modal_data": {each[0].kind: each} if each else None}
            for tokens, each in zip(self.requests(), media, strict=False)
        ]

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend the open beams by the outputs of `requests`, in the same order, and keep the best beam_width beams of
        each prompt open. A beam that gets an EOS token is closed."""
        self._num_rounds += 1
        next_outputs = iter(outputs)
        for beams, ended in zip(self._open, self._ended, strict=True):
            longer = [each for beam in beams for each in self._extend(beam, next(next_outputs))]
            ended += [each for each in longer if each.finish_reason]
            beams[:] = self._best([each for each in longer if not each.finish_reason])

    def _extend(self, beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
        (logprobs,) = output.outputs[0].logprobs or ({},)
        return [
            BeamSearchSequence(
                tokens=[*beam.tokens, token_id],
                logprobs=[*beam.logprobs, logprobs],
                cum_logprob=beam.cum_logprob + each.logprob,
                finish_reason="stop" if token_id in self._eos_token_ids else None,
            )
            for token_id, each in logprobs.items()
        ]

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def score(beam: BeamSearchSequence) -> float:
            length = len(beam.tokens) - (beam.finish_reason == "stop")
            return float(beam.cum_logprob / length**self._params.length_penalty)

        return nlargest(self._params.beam_width, beams, key=score)

    def finish(self) -> list[tuple[BeamSearchSequence, list[int]]]:
        """Set `outputs` to the best beam_width beams of each prompt, open or closed. Return each of these beams with
        the tokens that the caller must detokenize for its `text`."""
        for beam in (beam for beams in self._open for beam in beams):
            beam.finish_reason = "length"
        found = [self._best(ended + left) for ended, left in zip(self._ended, self._open, strict=True)]
        self.outputs = [BeamSearchOutput(sequences=beams) for beams in found]
        hides_eos = not self._params.include_stop_str_in_output
        hidden = [(beam, hides_eos and beam.finish_reason == "stop") for beams in found for beam in beams]
        return [(beam, beam.tokens[: len(beam.tokens) - is_hidden]) for beam, is_hidden in hidden]
