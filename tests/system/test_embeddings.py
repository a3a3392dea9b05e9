"""Embeddings equal transformers' pooled hidden states, in fp32, under every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from tokenloom import LLM, EmbeddingRequestOutput, PoolingParams, SamplingParams
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some_pairs
from tokenloom.tests.system.test_parity import VOCAB_SIZE, make_prompts

TOLERANCE = 1e-4
SHAPES: dict[str, dict[str, object]] = {
    "llama": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 192},
    "mistral": {"hidden_size": 160, "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 48},
    "qwen3": {"hidden_size": 128, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128},
}
SCHEDULES: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preempted": {"num_kv_blocks": 13, "max_num_seqs": 24, "max_num_batched_tokens": 96},
    "one step in flight": {"steps_in_flight": 1, "enable_prefix_caching": False},
}


class PoolingOracle:
    """Checks vectors; the hidden states of a prompt are computed once."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def _hidden(self, prompt: list[int]) -> torch.Tensor:
        """Return [len(prompt), hidden_size]."""
        if (key := tuple(prompt)) not in self._known:
            self._known[key] = self._model(torch.tensor([prompt])).last_hidden_state[0]
        return self._known[key]

    def check(self, prompts: list[list[int]], outputs: Sequence[EmbeddingRequestOutput], params: PoolingParams) -> None:
        assert [output.prompt_token_ids for output in outputs] == prompts
        for prompt, output in zip(prompts, outputs, strict=True):
            hidden = self._hidden(prompt)
            expected = (hidden[-1] if params.method == "last" else hidden.mean(0))[: params.dimensions]
            if params.use_activation is not False:
                expected = expected / expected.norm()
            found = torch.tensor(output.outputs.embedding)
            assert found.shape == expected.shape
            worst = (found - expected).abs().max()
            assert worst <= TOLERANCE, f"a prompt of {len(prompt)} tokens is off by {worst:.2e} ({params})"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: tiny_checkpoint(root / family, family, vocab_size=VOCAB_SIZE, num_hidden_layers=2, **shape)
        for family, shape in SHAPES.items()
    }


@pytest.mark.parametrize(("family", "schedule"), some_pairs(list(SHAPES), list(SCHEDULES), every=3))
def test_vectors_equal_transformers_under_every_schedule_beside_generation(
    family: str, schedule: str, folders: dict[str, Path]
) -> None:
    prompts, oracle = make_prompts(16, 120, seed=len(family)), PoolingOracle(folders[family])
    options = {"max_model_len": 160, **SCHEDULES[schedule]}
    greedy = SamplingParams(temperature=0, max_tokens=20)
    with LLM(folders[family], in_process=True, num_threads=1, **options) as llm:
        alone = llm.generate(prompts[:6], greedy, use_tqdm=False)
        for params in (
            PoolingParams(method="mean", normalize=False),
            PoolingParams(method="last", normalize=False),
            PoolingParams(method="mean", dimensions=50),
            PoolingParams(method="last"),
        ):
            answers = [llm.submit(prompt, greedy) for prompt in prompts[:6]]
            outputs = llm.embed(prompts, params, use_tqdm=False)
            oracle.check(prompts, outputs, params)
            if params.method == "mean" or schedule == "one step in flight":
                assert not any(output.num_cached_tokens for output in outputs)
            elif schedule == "plain":
                assert sum(output.num_cached_tokens > 0 for output in outputs) >= 5
            for answer, known in zip(answers, alone, strict=True):
                assert answer.result(60).outputs[0].token_ids == known.outputs[0].token_ids
        assert (llm.health().num_recomputed_tokens > 0) == (schedule == "preempted")


def test_half_precision_vectors_are_close(folders: dict[str, Path]) -> None:
    prompts, found = make_prompts(8, 120, seed=5), []
    for dtype in ("float32", "bfloat16"):
        with LLM(folders["qwen3"], in_process=True, num_threads=1, max_model_len=160, dtype=dtype) as llm:
            outputs = llm.embed(prompts, PoolingParams(method="mean"), use_tqdm=False)
        found.append(torch.tensor([output.outputs.embedding for output in outputs]))
    assert (found[0] * found[1]).sum(-1).min() > 0.999  # cosines


def test_a_model_without_a_head_scores_pairs_by_cosines_and_reads_each_text_once() -> None:
    query, documents = "Which city lies at a fjord?", ["A brick is red.", "Oslo lies at a fjord.", "A brick is red."]
    with LLM(in_process=True, num_threads=1, max_model_len=256) as llm:
        vectors = [torch.tensor(each.outputs.embedding) for each in llm.embed([query, *documents], use_tqdm=False)]
        scores = llm.score(query, documents, use_tqdm=False)
        best, *_ = llm.rerank(query, documents, top_n=1, use_tqdm=False)
    expected = [float(vectors[0] @ vector) for vector in vectors[1:]]
    assert [each.outputs.score for each in scores] == pytest.approx(expected, abs=1e-5)
    assert scores[0].request_id == scores[2].request_id != scores[1].request_id
    assert best.document == documents[max(range(2), key=expected.__getitem__)]
