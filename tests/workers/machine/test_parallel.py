"""Ranks that shard a model give the logits of one rank; uneven shards are refused; a dead rank is detected."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.quantized_checkpoints import mxfp4_pair, quantized_pair
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import load
from tokenloom.tests.workers.threaded_group import run_ranks
from tokenloom.tests.workers.tp_rank import second_step
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.step.model_step import Model

HANG_S = 600.0  # of ranks, which would wait for each other for 120 s
TOKENS = {
    name: np.random.default_rng(seed).integers(0, 260, count).tolist()
    for seed, (name, count) in enumerate({"a": 41, "b": 9}.items())
}


def run_plan(
    folder: Path, size: int, folders: list[Path], dies: int | None = None, *, device: str = "cpu"
) -> list[tuple[int, str]]:
    """Run the ranks of tp_rank.py as processes: (exit code, stderr) of all."""
    plan_file = folder / "plan.json"
    models = [str(path) for path in folders]
    plan = {"size": size, "store": str(folder / "store"), "folders": models, "results": str(folder)}
    plan_file.write_text(json.dumps({**plan, "tokens": TOKENS, "dies": dies, "device": device}))
    command = [sys.executable, "-P", "-m", "tokenloom.tests.workers.tp_rank", str(plan_file)]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=folder, stderr=subprocess.PIPE, text=True) for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=HANG_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


def logits_of_ranks(
    folder: Path, size: int, folders: list[Path], **where: Any
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Run the ranks as processes, none of which may fail; yield the name of each model's request, with its logits of
    the ranks and those of one rank. `where`: arguments of run_plan."""
    for code, error in run_plan(folder, size, folders, **where):
        assert code == 0, error
    for index, model in enumerate(folders):
        for name, expected in second_step(load(model), TOKENS).items():
            yield f"{model.name}: {name}", np.load(folder / f"{index}-{name}.npy"), expected.numpy()


def check_ranks(size: int, load_rank: Callable[[ParallelGroup], Model], name: str) -> None:
    """Check that ranks in threads give the logits of one rank."""
    actual = run_ranks(size, lambda group: second_step(load_rank(group), TOKENS))[0]
    for request, expected in second_step(load_rank(ParallelGroup()), TOKENS).items():
        torch.testing.assert_close(actual[request], expected, atol=1e-4, rtol=1e-7, msg=f"{name}: {request}")


BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
EIGHT_HEADS: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}


def gptq(folder: Path) -> Path:
    return quantized_pair(folder, "gptq, act-order", num_hidden_layers=1, **EIGHT_HEADS)[0]


def mxfp4(folder: Path) -> Path:
    return mxfp4_pair(folder, intermediate_size=96)[0]


# KV heads divide by the ranks, or several ranks hold one; no vocabulary divides. Those with experts have each kind of
# router, shared experts and biases.
SHARED: dict[str, Callable[[Path], Path]] = {
    "gptq": gptq,
    "llama": partial(tiny_checkpoint, family="llama", **EIGHT_HEADS, **BIASES),
    "qwen2": partial(tiny_checkpoint, family="qwen2", num_key_value_heads=4, vocab_size=293),
    "qwen3, a KV head": partial(
        tiny_checkpoint, family="qwen3", num_attention_heads=4, num_key_value_heads=1, head_dim=32
    ),
    "qwen3, two": partial(tiny_checkpoint, family="qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "qwen3_moe": partial(tiny_checkpoint, family="qwen3_moe", mlp_only_layers=[0], intermediate_size=96),
    "glm4_moe": partial(tiny_checkpoint, family="glm4_moe"),
    "qwen2_moe": partial(tiny_checkpoint, family="qwen2_moe"),
    "gpt_oss": mxfp4,
}
FIELD_FAMILIES = (  # fused, interleaved and transposed projections, norms over all heads and per head, scales, biases
    *("cohere_plus", "falcon", "gemma2", "gemma4_moe", "glm", "gpt2", "gpt_neox", "granite", "minimax_m2", "olmo2"),
    *("phi", "phi3", "stablelm_12b", "starcoder2"),
)


SHARES = [(name, size) for name in SHARED for size in (2, 4)] + [(family, 2) for family in FIELD_FAMILIES]


@pytest.mark.parametrize(("name", "size"), some(SHARES, 9))
def test_ranks_give_the_logits_of_one_rank(name: str, size: int, tmp_path: Path) -> None:
    folder = SHARED[name](tmp_path) if name in SHARED else tiny_checkpoint(tmp_path, name)
    check_ranks(size, lambda group: load(folder, group=group), name)


def test_processes_share_a_model_and_a_dead_rank_makes_the_calls_of_the_others_raise(tmp_path: Path) -> None:
    folders = [tiny_checkpoint(tmp_path / "qwen2", "qwen2")]
    results = run_plan(tmp_path, 2, folders, dies=1)
    for name, expected in second_step(load(folders[0]), TOKENS).items():
        np.testing.assert_allclose(np.load(tmp_path / f"0-{name}.npy"), expected.numpy(), atol=1e-4, err_msg=name)
    assert results[1][0] == 9
    assert results[0][0] != 0 and "RuntimeError" in results[0][1]
    assert "Timed out" not in results[0][1], "at once, not when the time of the group is over"


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
