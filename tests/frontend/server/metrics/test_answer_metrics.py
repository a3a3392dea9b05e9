"""Answers with unread calls count by reason; the log names each form of calls once, without the answer's words."""

from __future__ import annotations

import logging

import pytest

from tokenloom.frontend.forms.openai.unparsed import REASONS, UnparsedCall
from tokenloom.frontend.server.metrics.answer_metrics import AnswerMetrics


def test_unread_calls_count_by_reason_and_each_form_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = AnswerMetrics(has_audio=False)
    (counter,) = metrics.metrics
    assert {reason: counter.get(reason) for reason in REASONS} == {"marker": 0, "arguments": 0, "cut": 0}
    with caplog.at_level(logging.INFO, "tokenloom.frontend"):
        metrics.on_unparsed(UnparsedCall("cut", "<a>", "<a>xx"))
        assert not caplog.records, "a cut answer is no sign of another form"
        for reason in ("marker", "arguments", "marker"):
            metrics.on_unparsed(UnparsedCall(reason, "<a>", "<a>xx"))
        metrics.on_unparsed(UnparsedCall("marker", "<b>", "<b>00"))
    assert [record.args for record in caplog.records] == [("marker", "<a>xx"), ("marker", "<b>00")]
    assert {reason: counter.get(reason) for reason in REASONS} == {"marker": 3, "arguments": 1, "cut": 1}


def test_audio_is_counted_by_engines_that_hear_alone() -> None:
    _, heard = AnswerMetrics(has_audio=True).metrics
    assert heard.name == "transcribed_audio_seconds_total"
