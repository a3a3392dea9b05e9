"""The operations on states in C, at every instruction level: against transformers, the formulas, and their laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.tests.kernels.state_laws import (
    FORMS,
    StateForm,
    assert_cutting_changes_no_bit,
    assert_numbers_of_heads_are_exact,
    assert_outputs_are_exact,
    assert_rows_are_alone,
)
from tokenloom.tests.kernels.state_layers import LAYERS, assert_layer_is_transformers
from tokenloom.tests.support.today import some


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_the_operations_is_that_of_transformers(ops: CpuOps, name: str) -> None:
    if ops.dtype == torch.float32:
        assert_layer_is_transformers(ops, name)


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_outputs_are_those_of_the_formulas_in_float64(ops: CpuOps, form: StateForm) -> None:
    assert_outputs_are_exact(ops, of_kind(form, ops), seed=2)


def test_numbers_of_heads_are_those_of_the_formulas_and_do_not_depend_on_other_tokens(ops: CpuOps) -> None:
    assert_numbers_of_heads_are_exact(ops, ops.dtype, seed=2)


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_rows_that_share_a_snapshot_and_a_row_with_nan_change_no_other_row(ops: CpuOps, form: StateForm) -> None:
    assert_rows_are_alone(ops, of_kind(form, ops))


@pytest.mark.parametrize("seed", some(range(100), 8))
def test_cutting_rows_into_chunks_and_segments_changes_no_bit_with_any_number_of_threads(
    ops: CpuOps, num_threads: Callable[[int], None], seed: int
) -> None:
    assert_cutting_changes_no_bit(ops, of_kind(FORMS[seed % len(FORMS)], ops), seed, num_threads)


@pytest.mark.parametrize(
    "form", [StateForm(value_dim=24), StateForm(key_dim=260), StateForm(num_taps=10)], ids=range(3)
)
def test_shapes_without_a_kernel_are_computed_in_plain_torch(ops: CpuOps, form: StateForm) -> None:
    assert_outputs_are_exact(ops, of_kind(form, ops), seed=3)
    assert_cutting_changes_no_bit(ops, of_kind(form, ops), seed=3)


def of_kind(form: StateForm, ops: CpuOps) -> StateForm:
    """Return a form in the kernels' type of elements."""
    return replace(form, dtype=ops.dtype)
