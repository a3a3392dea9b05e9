"""Hybrids as one call of the kernels a step: which of them, and the bits of their layers computed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.cpu.cpu_ops import make_cpu_ops
from tokenloom.scripts.bench.cases.hybrids import LayerOps
from tokenloom.tests.kernels.cpu.levels import FLOAT32_LEVELS
from tokenloom.tests.support.recurrent_families import HYBRIDS
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import run_schedule, schedule
from tokenloom.tests.workers.models.test_families import TOLERANCE
from tokenloom.tests.workers.models.test_hybrids import SHORT, Case, in_chunks, load
from tokenloom.tests.workers.paged_run import PagedRun
from tokenloom.workers.models.decoder import DecoderModel

pytestmark = pytest.mark.skipif(not FLOAT32_LEVELS, reason="the processor has no AVX2")
ALIKE = [
    "qwen3_5",
    "bamba",
    "nemotron_h",
    "nemotron_h_moe",
    "lfm2",
    "lfm2_moe",
]  # others add in one rounding what their layers add in two
SetThreads = Callable[[int], None]
STEPS = [[SHORT], in_chunks(SHORT, 1), schedule(SHORT, seed=3)]


@pytest.fixture
def num_threads() -> Iterator[SetThreads]:
    """Set the number of threads of the kernels; restored after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def load_pair(case: Case, level: str) -> tuple[DecoderModel, DecoderModel]:
    """Return the model as one call of the kernels, and layer by layer."""
    ops = make_cpu_ops(torch.float32, level)
    return load(case.folder, case.config, ops=ops), load(
        case.folder, case.config, ops=LayerOps(ops.library, torch.float32)
    )


def logits_of(case: Case, model: DecoderModel) -> list[dict[str, Tensor]]:
    return [run_schedule(PagedRun(model, 8), case.tokens, steps) for steps in STEPS]


@pytest.mark.parametrize("family", some(HYBRIDS, 4))
@pytest.mark.parametrize("level", some(FLOAT32_LEVELS, 1))
def test_a_hybrid_is_one_call_a_step_and_its_layers_agree(family: str, level: str, tmp_path: Path) -> None:
    case = Case(tmp_path, family, SHORT)
    fused, layered = load_pair(case, level)
    assert fused.is_fused and not layered.is_fused
    for model in (fused, layered):
        assert max(map(case.error_of, logits_of(case, model))) <= TOLERANCE


@pytest.mark.parametrize("family", some(ALIKE, 2))
@pytest.mark.parametrize("level", FLOAT32_LEVELS)
def test_the_call_has_the_bits_of_the_layers(family: str, level: str, tmp_path: Path) -> None:
    case = Case(tmp_path, family, SHORT)
    fused, layered = load_pair(case, level)
    assert fused.is_fused and not layered.is_fused
    for found, expected in zip(logits_of(case, fused), logits_of(case, layered), strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in SHORT)


@pytest.mark.parametrize("family", some(["qwen3_5", "falcon_h1_scaled", "lfm2_moe"], 1))
def test_more_threads_than_cores_do_not_change_a_bit(family: str, tmp_path: Path, num_threads: SetThreads) -> None:
    """Most of 16 threads arrive after a stage has ended, or lose their core during a piece."""
    case = Case(tmp_path, family, SHORT)
    model = load(case.folder, case.config)
    assert model.is_fused
    answers = []
    for count in (1, 2, 16):
        num_threads(count)
        answers.append(run_schedule(PagedRun(model, 8), case.tokens, schedule(SHORT, seed=3)))
    assert all(torch.equal(each[name], answers[0][name]) for each in answers[1:] for name in SHORT)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_5", {"linear_value_head_dim": 24}),
        ("qwen3_5", {"linear_key_head_dim": 272}),
        ("lfm2", {"conv_L_cache": 9}),
    ],
)
def test_shapes_without_a_kernel_are_computed_layer_by_layer(
    family: str, fields: dict[str, int], tmp_path: Path
) -> None:
    case = Case(tmp_path, family, {"a": 9}, **fields)
    model = load(case.folder, case.config)
    assert not model.is_fused
    assert case.error_of(run_schedule(PagedRun(model, 8), case.tokens, [{"a": 9}])) <= TOLERANCE
