"""Ranks that shard a model give the logits of one rank; uneven shards are refused; a dead rank is detected."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.quantized_checkpoints import mxfp4_pair, quantized_pair
from tokenloom.tests.workers.paged_run import PagedRun, load
from tokenloom.tests.workers.tp_rank import borrowed
from tokenloom.workers.parallel import ParallelGroup

DEADLINE_S = 90.0


def run_ranks(
    folder: Path, size: int, module: str, argument: Path, deadline_s: float = DEADLINE_S
) -> list[tuple[int, str]]:
    """Start `module` of tests.workers with the argument and the rank for each rank: (exit code, stderr) of all."""
    command = [sys.executable, "-P", "-m", f"tokenloom.tests.workers.{module}", str(argument)]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=folder, stderr=subprocess.PIPE, text=True) for rank in range(size)
    ]
    deadline = time.monotonic() + deadline_s
    try:
        errors = [rank.communicate(timeout=max(0.1, deadline - time.monotonic()))[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


def run_plan(
    folder: Path,
    size: int,
    folders: list[Path],
    dies: int | None = None,
    *,
    is_borrowed: bool = False,
    device: str = "cpu",
    deadline_s: float = DEADLINE_S,
) -> list[tuple[int, str]]:
    """As ranks of tp_rank.py."""
    draw = random.Random(0)
    tokens = {"a": [draw.randrange(260) for _ in range(41)], "b": [draw.randrange(260) for _ in range(9)]}
    plan = {
        "size": size,
        "store": str(folder / "store"),
        "folders": [str(path) for path in folders],
        "is_borrowed": is_borrowed,
        "results": str(folder),
        "tokens": tokens,
        "dies": dies,
        "device": device,
    }
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(plan))
    return run_ranks(folder, size, "tp_rank", plan_file, deadline_s)


def single_rank_logits(folder: Path, plan_file: Path, *, is_borrowed: bool = False) -> dict[str, np.ndarray]:
    tokens = json.loads(plan_file.read_text())["tokens"]
    run = PagedRun(borrowed(folder) if is_borrowed else load(folder), block_size=16)
    run.step({"a": tokens["a"][:40]})
    return {name: logits.numpy() for name, logits in run.step({"a": tokens["a"][40:], "b": tokens["b"]}).items()}


def logits_of_ranks(
    folder: Path, size: int, folders: list[Path], *, is_borrowed: bool = False, **where: Any
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Run the ranks, none of which may fail; yield the name of each model's request, with its logits of the ranks and
    those of one rank. `where`: arguments of run_plan."""
    for code, error in run_plan(folder, size, folders, is_borrowed=is_borrowed, **where):
        assert code == 0, error
    for index, model in enumerate(folders):
        for name, expected in single_rank_logits(model, folder / "plan.json", is_borrowed=is_borrowed).items():
            yield f"{model.name}: {name}", np.load(folder / f"{index}-{name}.npy"), expected


def shared_models(folder: Path, size: int) -> list[Path]:
    """Checkpoints whose KV heads divide by the ranks, or are held by several of them; no vocabulary divides. Those with
    experts have each kind of router, shared experts and biases."""
    biases: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    eight_heads: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    gptq, _ = quantized_pair(folder / "gptq", "gptq, act-order", num_hidden_layers=1, **eight_heads)
    return [
        gptq,
        tiny_checkpoint(folder / "llama", "llama", **eight_heads, **biases),
        tiny_checkpoint(folder / "qwen2", "qwen2", num_key_value_heads=4, vocab_size=293),
        tiny_checkpoint(folder / "qwen3", "qwen3", num_attention_heads=4, num_key_value_heads=size // 2, head_dim=32),
        tiny_checkpoint(folder / "qwen3_moe", "qwen3_moe", mlp_only_layers=[0], intermediate_size=96),
        tiny_checkpoint(folder / "glm4_moe", "glm4_moe"),
        tiny_checkpoint(folder / "qwen2_moe", "qwen2_moe"),
        mxfp4_pair(folder / "gpt_oss", intermediate_size=96)[0],
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_logits_of_one_rank(size: int, tmp_path: Path) -> None:
    folders = shared_models(tmp_path, size)
    for name, actual, expected in logits_of_ranks(tmp_path, size, folders):
        np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=name)


FIELD_FAMILIES = (  # fused, interleaved and transposed projections, norms over all heads and per head, scales, biases
    *("cohere_plus", "falcon", "gemma2", "gemma4_moe", "glm", "gpt2", "gpt_neox", "granite", "minimax_m2", "olmo2"),
    *("phi", "phi3", "stablelm_12b", "starcoder2"),
)


def test_two_ranks_give_the_logits_of_one_rank_for_each_form_of_a_layer(tmp_path: Path) -> None:
    folders = [tiny_checkpoint(tmp_path / family, family) for family in FIELD_FAMILIES]
    for name, actual, expected in logits_of_ranks(tmp_path, 2, folders):
        np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=name)


def test_a_dead_rank_makes_the_calls_of_the_others_raise(tmp_path: Path) -> None:
    start = time.monotonic()
    results = run_plan(tmp_path, 2, [tiny_checkpoint(tmp_path / "qwen2", "qwen2")], dies=1)
    assert results[1][0] == 9
    assert results[0][0] != 0 and "RuntimeError" in results[0][1]
    assert time.monotonic() - start < 50  # long before the group's own timeout


def test_a_group_of_one_does_not_communicate() -> None:
    group, x = ParallelGroup(), torch.randn(2, 3)
    for talk in (group.all_reduce, group.gather, group.broadcast):
        assert talk(x) is x
    group.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_each_rank_holds_the_kv_heads_that_its_query_heads_read(size: int, num_kv_heads: int) -> None:
    num_heads = 16
    for rank in range(size):
        group = ParallelGroup(rank, size)
        read = {head * num_kv_heads // num_heads for head in group.shard(num_heads, "attention heads")}
        assert read == set(group.shard_kv_heads(num_kv_heads))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_vocabulary_shards_are_equal_and_cover_it(size: int) -> None:
    shards = [ParallelGroup(rank, size).shard_vocab(307) for rank in range(size)]
    assert {len(shard) for shard in shards} == {-(-307 // size)}
    assert [token_id for shard in shards for token_id in shard][:307] == list(range(307))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 3}, "3 attention heads do not divide by --tensor-parallel-size 2"),
        ({"intermediate_size": 151}, "151 elements of intermediate_size do not divide by --tensor-parallel-size 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "3 KV heads and --tensor-parallel-size 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    fields = {"hidden_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, **fields}
    with pytest.raises(ConfigError, match=message):
        load(tiny_checkpoint(tmp_path, "llama", **fields), group=ParallelGroup(0, 2))


def test_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 2 is not in \[0, 2\)"):
        ParallelGroup(2, 2)
