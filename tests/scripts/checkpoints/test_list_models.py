"""docs/learn/models.md lists every native architecture, as scripts/checkpoints/list_models.py writes it."""

from __future__ import annotations

import re

import pytest

from tokenloom.scripts.checkpoints.list_models import ARCHITECTURES, MARKS, PAGE, table, tiny_families


def native_rows() -> str:
    return PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]


def test_the_page_lists_each_native_architecture() -> None:
    assert re.findall(r"^\| `(\w+)` \|", native_rows(), re.MULTILINE) == ARCHITECTURES


def test_each_native_architecture_has_a_tiny_model_in_the_tests() -> None:
    assert set(ARCHITECTURES) <= tiny_families().keys()


@pytest.mark.nightly
def test_the_table_is_what_the_script_writes() -> None:
    assert native_rows() == table()
