"""AnswerMetrics: counts of the contents of answers, and the log's lines about calls that were not read."""

from __future__ import annotations

import logging
from typing import get_args

from ....ipc.messages.base import CacheReport, DifferenceKind
from ....ipc.params.pooling_params import PoolingParams
from ...forms.openai.unparsed import REASONS, UnparsedCall
from .registry import Counter

logger = logging.getLogger("tokenloom.frontend")


class AnswerMetrics:
    """Owner of the counters. A form of calls is named in the log once."""

    def __init__(self, *, has_audio: bool) -> None:
        self._unparsed = Counter(
            "unparsed_calls_total", "Answers with a call that was not read, by reason.", ["reason"]
        )
        for reason in REASONS:
            self._unparsed.add(0, reason)
        self._heard = Counter("transcribed_audio_seconds_total", "Seconds of clips that were transcribed.")
        self._pooled = Counter("pooled_prompts_total", "Prompts that were pooled to the end, by task.", ["task"])
        self._pooled_tokens = Counter("pooled_prompt_tokens_total", "Tokens of these prompts, by task.", ["task"])
        self.changed = Counter(
            "prompt_changed_tokens_total",
            "Tokens computed again behind a difference of a prompt from an earlier one, by kind.",
            ["kind"],
        )
        for kind in get_args(DifferenceKind):
            self.changed.add(0, kind)
        self.metrics = [self._unparsed, self._pooled, self._pooled_tokens, self.changed]
        if has_audio:
            self.metrics.append(self._heard)
        self._has_seen_change = False
        self._logged = set[str]()  # markers of the forms that the log names

    def on_heard(self, duration_s: float) -> None:
        """Add the seconds of a clip that was transcribed or translated."""
        self._heard.add(duration_s)

    def on_pooled(self, pooling: PoolingParams, num_tokens: int) -> None:
        """Count a prompt that was pooled to the end."""
        task = str(pooling.task)
        self._pooled.add(1, task)
        self._pooled_tokens.add(num_tokens, task)

    def on_cache_report(self, request_id: str, report: CacheReport) -> None:
        """Count a difference of a prompt from an earlier one; log the report, and the first prompt that a template has
        changed."""
        logger.debug("prefix cache, request %s: %s", request_id, report)
        found = report.difference
        if found is None:
            return
        self.changed.add(found.num_tokens, found.kind)
        if found.field == "chat_template" and found.kind == "template" and not self._has_seen_change:
            self._has_seen_change = True
            logger.warning(
                "the chat template rendered equal messages differently, from token %d on: the prefix cache finds "
                "nothing behind that; the request's cache report and prompt_changed_tokens_total say how often",
                found.token,
            )

    def on_unparsed(self, call: UnparsedCall) -> None:
        """Count an answer with a call that was not read."""
        self._unparsed.add(1, call.reason)
        if call.reason != "cut" and call.marker not in self._logged:
            self._logged.add(call.marker)
            logger.warning(
                "an answer holds a call that was not read (%s), of the shape %r: the model may write another form than "
                "its chat template; name one with --tool-call-parser, or force calls with tool_choice",
                call.reason,
                call.shape,
            )
