"""Answers with unread calls count by reason; the log names each form of calls once, without the answer's words."""

from __future__ import annotations

import logging

import pytest

from tokenloom.frontend.forms.openai.unparsed import REASONS, UnparsedCall
from tokenloom.frontend.server.metrics.answer_metrics import AnswerMetrics
from tokenloom.ipc.params.pooling_params import PoolingParams


def test_unread_calls_count_by_reason_and_each_form_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = AnswerMetrics(has_audio=False)
    counter = metrics.metrics[0]
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
    names = [{each.name for each in AnswerMetrics(has_audio=has_audio).metrics} for has_audio in (False, True)]
    assert names[1] - names[0] == {"transcribed_audio_seconds_total"}


def test_pooled_prompts_and_their_tokens_are_counted_by_task() -> None:
    metrics = AnswerMetrics(has_audio=False)
    for task, num_tokens in (("embed", 3), ("score", 5), ("embed", 4)):
        metrics.on_pooled(PoolingParams(task=task), num_tokens)
    prompts, tokens = (each for each in metrics.metrics if each.name.startswith("pooled_"))
    assert [(each.get("embed"), each.get("score")) for each in (prompts, tokens)] == [(2, 1), (7, 5)]
