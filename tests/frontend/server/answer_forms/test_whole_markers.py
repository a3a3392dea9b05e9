"""Common begins and ends of texts are cut between markers and words."""

from __future__ import annotations

import pytest

from tokenloom.frontend.server.answer_forms.whole_markers import common_prefix, common_suffix


@pytest.mark.parametrize(
    ("one", "other", "prefix"),
    [
        ("<|user|>", "<|user|>b", "<|user|>"),
        ("x<|tool_calls|>", "x<|tool_call|>", "x"),
        ("x[TOOL_CALLS]", "x[TOOL_RESULTS]", "x"),
        ("<|start|>assistant to=user", "<|start|>assistant to=f", "<|start|>assistant "),
        ("a<|open|>think", "a<|open|>response", "a"),
        ("a < b", "a < c", "a < "),
        ("", "a", ""),
    ],
)
def test_common_prefix_ends_between_markers_and_words(one: str, other: str, prefix: str) -> None:
    assert common_prefix(one, other) == prefix


@pytest.mark.parametrize(
    ("one", "other", "suffix"),
    [
        ("a</call><|end|>", "<|end|>", "<|end|>"),
        ("<|calls|>", "<|end|>", ""),
        ("<|close|>tools<|sep|>", "<|close|>message<|sep|>", ""),
        ("a", "", ""),
    ],
)
def test_common_suffix_begins_between_markers_and_words(one: str, other: str, suffix: str) -> None:
    assert common_suffix(one, other) == suffix
