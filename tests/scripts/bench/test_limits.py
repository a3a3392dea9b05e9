"""The limit counts a step's reads and multiplications: checked against a checkpoint's tensors and by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.bench.limits import Limits, Rates
from tokenloom.scripts.bench.workload import Workload
from tokenloom.tests.support.checkpoints import FAMILIES, tiny_checkpoint


def matrix_weights(folder: Path) -> dict[str, int]:
    """Return the number of elements of each matrix in the file."""
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes_count_the_matrices_that_a_step_reads(family: str, is_tied: bool, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, tie_word_embeddings=is_tied)
    weights = matrix_weights(folder)
    if not is_tied:
        del weights["model.embed_tokens.weight"]  # a step reads only a few of its rows
    assert Limits(load_model_config(folder), "bfloat16").weight_bytes == 2 * sum(weights.values())


def test_a_step_reads_only_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "mixtral", tie_word_embeddings=True)
    model, weights = load_model_config(folder), matrix_weights(folder)
    assert model.experts is not None
    limits = Limits(model, "float32")
    of_experts = sum(size for name, size in weights.items() if ".experts." in name)
    dense, num_experts = sum(weights.values()) - of_experts, model.experts.num_experts
    chosen = of_experts * model.experts.top_k // num_experts
    assert limits.read_bytes(1) == pytest.approx(4 * (dense + chosen))
    assert limits.read_bytes(1000) == pytest.approx(limits.weight_bytes)
    head = weights["model.embed_tokens.weight"]  # tied
    assert limits.flops(num_tokens=7, num_sampled=0, num_pairs=0) == 2 * 7 * (dense - head + chosen)


def test_flops_are_two_per_weight_and_token_and_four_per_pair_and_element(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    model, weights = load_model_config(folder), matrix_weights(folder)
    head = weights.pop("model.embed_tokens.weight")  # tied
    limits = Limits(model, "float32")
    assert limits.flops(num_tokens=7, num_sampled=0, num_pairs=0) == 2 * 7 * sum(weights.values())
    assert limits.flops(num_tokens=0, num_sampled=3, num_pairs=0) == 2 * 3 * head
    assert limits.flops(0, 0, num_pairs=5) == 4 * 5 * model.num_heads * model.head_dim * model.num_layers


def test_each_step_takes_the_longer_of_reading_and_multiplying(tmp_path: Path) -> None:
    limits = Limits(load_model_config(tiny_checkpoint(tmp_path)), "float32")
    workload = Workload(num_requests=4, num_in=10, num_out=6, vocab_size=300)
    slow_memory = Rates(read_bytes_per_s=limits.weight_bytes / 2.0, flops_per_s=1e30)
    assert limits.seconds(workload, slow_memory, budget=16) == pytest.approx(2.0 * (3 + 5))  # ⌈40 / 16⌉ chunks, 5 steps
    slow_matmuls = Rates(read_bytes_per_s=1e30, flops_per_s=1.0)
    pairs = sum(range(1, 11)) + sum(range(11, 16))
    flops = limits.flops(4 * 15, 4 * 6, 4 * pairs)
    assert limits.seconds(workload, slow_matmuls, budget=1 << 20) == pytest.approx(flops)


def test_the_roofline_adds_the_cache_that_attention_reads(tmp_path: Path) -> None:
    model = load_model_config(tiny_checkpoint(tmp_path))
    limits = Limits(model, "bfloat16")
    assert limits.kv_bytes(1) == 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
    requests = [(10, 3), (20, 1), (5, 4)]
    contexts = [11 + 6, 12 + 7, 8]  # after the prompts: two steps of the first request and the third, one of the third
    slow_memory = Rates(read_bytes_per_s=1.0, flops_per_s=1e30)
    read = 4 * limits.weight_bytes + sum(map(limits.kv_bytes, contexts))
    assert limits.roofline_seconds(requests, slow_memory) == pytest.approx(read)
    slow_matmuls = Rates(read_bytes_per_s=1e30, flops_per_s=1.0)
    pairs = sum(n * (n + 1) // 2 for n in (10, 20, 5))
    flops = limits.flops(35, 3, pairs) + limits.flops(5, 5, sum(contexts))
    assert limits.roofline_seconds(requests, slow_matmuls) == pytest.approx(flops)
