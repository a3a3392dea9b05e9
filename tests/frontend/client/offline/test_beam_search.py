"""Beam search chooses the beams with the best score: the sum of logprobs over a power of the length."""

from __future__ import annotations

import math
import random
from heapq import nlargest

import pytest

from tokenloom.frontend.client.offline.beam_search import BeamSearch
from tokenloom.frontend.client.outputs import CompletionOutput, RequestOutput
from tokenloom.frontend.forms.logprobs import Logprob
from tokenloom.ipc.messages.client import Info
from tokenloom.ipc.params.beam_search_params import BeamSearchParams

END, VOCAB = 0, 4
INFO = Info(
    query_id=1,
    version="",
    run_id="",
    model="",
    max_model_len=64,
    vocab_size=VOCAB,
    block_size=16,
    num_kv_blocks=8,
    tensor_parallel_size=1,
    eos_token_ids=[END],
)


def logprobs_after(tokens: tuple[int, ...], seed: int) -> list[float]:
    """Return the logprobs of all tokens after `tokens`: random, with a fixed seed."""
    rng = random.Random(f"{seed} {tokens}")
    weights = [rng.random() ** 3 for _ in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def output_of(tokens: list[int], seed: int, num_logprobs: int) -> RequestOutput:
    ranked = nlargest(num_logprobs, enumerate(logprobs_after(tuple(tokens), seed)), key=lambda pair: pair[1])
    logprobs = {token: Logprob(value, rank, "") for rank, (token, value) in enumerate(ranked, 1)}
    answer = CompletionOutput(index=0, text="", token_ids=[ranked[0][0]], logprobs=[logprobs])
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=tokens, outputs=[answer], finished=True)


def searched(prompt: list[int], params: BeamSearchParams, seed: int) -> list[tuple[list[int], float]]:
    search = BeamSearch([prompt], params, INFO)
    while requests := search.requests():
        search.add([output_of(tokens, seed, 2 * params.beam_width) for tokens in requests])
    search.finish()
    return [(beam.tokens, beam.cum_logprob) for beam in search.outputs[0].sequences]


def by_brute_force(prompt: list[int], params: BeamSearchParams, seed: int) -> list[tuple[list[int], float]]:
    """Rank all texts that end or have the maximum length by vLLM's score."""
    found: list[tuple[list[int], float]] = []

    def extend(tokens: list[int], total: float) -> None:
        has_ended = len(tokens) > len(prompt) and tokens[-1] == END
        if has_ended or len(tokens) == len(prompt) + params.max_tokens:
            found.append((tokens, total))
            return
        for token, logprob in enumerate(logprobs_after(tuple(tokens), seed)):
            extend([*tokens, token], total + logprob)

    def score(beam: tuple[list[int], float]) -> float:
        tokens, total = beam
        return float(total / (len(tokens) - (tokens[-1] == END)) ** params.length_penalty)

    extend(prompt, 0.0)
    return nlargest(params.beam_width, found, key=score)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(8))
def test_a_beam_as_wide_as_all_texts_finds_the_best(seed: int, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=VOCAB**3, max_tokens=3, length_penalty=length_penalty)
    found, best = searched([3, 1], params, seed), by_brute_force([3, 1], params, seed)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in best]
    assert [total for _, total in found] == pytest.approx([total for _, total in best])
