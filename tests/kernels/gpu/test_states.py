"""The operations on states in Triton: against transformers, the formulas, and their laws."""

from __future__ import annotations

import pytest

from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.tests.kernels.state_laws import (
    FORMS,
    StateForm,
    assert_cutting_changes_no_bit,
    assert_outputs_are_exact,
    assert_rows_are_alone,
)
from tokenloom.tests.kernels.state_layers import LAYERS, assert_layer_is_transformers
from tokenloom.tests.support.today import some

TRUNCATED = 2.0**-7  # error of bf16 in the interpreter, which rounds to zero


@pytest.mark.parametrize("name", some(list(LAYERS), 1))
def test_a_layer_of_the_operations_is_that_of_transformers(name: str) -> None:
    assert_layer_is_transformers(TritonOps(90), name)


@pytest.mark.parametrize("form", some(FORMS, 1), ids=range(len(FORMS)))
def test_outputs_are_those_of_the_formulas_in_float64(form: StateForm) -> None:
    assert_outputs_are_exact(TritonOps(90), form, seed=2, bf16_error=TRUNCATED)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the row with NaN
@pytest.mark.parametrize("form", some(FORMS, 1), ids=range(len(FORMS)))
def test_rows_that_share_a_snapshot_and_a_row_with_nan_change_no_other_row(form: StateForm) -> None:
    assert_rows_are_alone(TritonOps(90), form)


@pytest.mark.parametrize("seed", some(range(100), 1))
def test_cutting_rows_into_chunks_and_segments_changes_no_bit(seed: int) -> None:
    assert_cutting_changes_no_bit(TritonOps(90), FORMS[seed % len(FORMS)], seed)


@pytest.mark.parametrize(
    "form", some([StateForm(value_dim=24), StateForm(key_dim=260), StateForm(num_taps=10)], 1), ids=range(3)
)
def test_shapes_without_a_kernel_are_computed_in_plain_torch(form: StateForm) -> None:
    assert_outputs_are_exact(TritonOps(90), form, seed=3)
