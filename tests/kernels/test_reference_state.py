"""The operations on states in plain torch against transformers' layers, the formulas in float64, and their laws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokenloom.kernels.batch_invariant import BatchInvariantOps
from tokenloom.kernels.reference import ReferenceOps
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

both = pytest.mark.parametrize("ops", [ReferenceOps(), BatchInvariantOps()], ids=["plain", "batch_invariant"])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@both
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_the_operations_is_that_of_transformers(ops: ReferenceOps, name: str) -> None:
    assert_layer_is_transformers(ops, name)


@both
@pytest.mark.parametrize("seed", some(range(100), 20))
def test_cutting_rows_into_chunks_and_segments_changes_no_bit(ops: ReferenceOps, seed: int) -> None:
    assert_cutting_changes_no_bit(ops, FORMS[seed % len(FORMS)], seed)


@both
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_outputs_are_those_of_the_formulas_in_float64(ops: ReferenceOps, form: StateForm) -> None:
    assert_outputs_are_exact(ops, form, seed=2)


@both
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_rows_that_share_a_snapshot_and_a_row_with_nan_change_no_other_row(ops: ReferenceOps, form: StateForm) -> None:
    assert_rows_are_alone(ops, form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_heads_are_those_of_the_formulas_and_do_not_depend_on_other_tokens(dtype: torch.dtype) -> None:
    assert_numbers_of_heads_are_exact(ReferenceOps(), dtype, seed=2)
