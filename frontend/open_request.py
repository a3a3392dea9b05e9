"""OpenRequest: one request as the client side holds it, which is all that is needed to ask for it again.

It keeps the tokens that were delivered, drops what it is told twice and notices a gap. Touched by one thread alone.
"""

from __future__ import annotations

import time
from typing import Literal

from ..ipc.codec import num_ids
from ..ipc.messages import Accepted, Child, Delta, Submit
from .channel import Sink

Verdict = Literal["new", "old", "gap"]


class OpenRequest:
    """Invariant: `_chunks` are exactly the tokens that the sink has seen, `num_tokens` their number."""

    __slots__ = (
        "_arrival_time",
        "_chunks",
        "_is_accepted",
        "_num_sent",
        "_seed",
        "_submit",
        "is_aborted",
        "is_finished",
        "is_unanswered",
        "is_waiting",
        "num_faults",
        "num_tokens",
        "sink",
        "unanswered_bytes",
    )

    def __init__(self, submit: Submit, sink: Sink) -> None:
        self._submit = submit
        self.sink = sink
        self._chunks: list[bytes] = []
        self._seed = submit.params.seed
        self._num_sent = 0
        self._is_accepted = False  # the newest attempt
        self._arrival_time = time.time()
        self.num_tokens = 0
        self.num_faults = 0  # times that what came did not follow what is here, since something did
        self.is_aborted = False
        self.is_finished = False
        self.is_waiting = False  # this and what follows: the SubmitWindow's
        self.is_unanswered = False
        self.unanswered_bytes = 0

    @property
    def request_id(self) -> str:
        return self._submit.request_id

    @property
    def was_sent(self) -> bool:
        return self._num_sent > 0

    @property
    def num_bytes(self) -> int:
        """About what the request takes on the wire."""
        submit = self._submit
        chat = sum(len(turn.content) for turn in submit.chat or ())
        return len(submit.prompt or "") + len(submit.prompt_token_ids or b"") + chat + 4 * self.num_tokens + 200

    def next_submit(self) -> Submit:
        """The message that asks for this request, from the start or from the tokens that are here."""
        submit = self._submit
        attempt = self._num_sent
        self._num_sent += 1
        self._is_accepted = False
        if attempt == 0:
            return submit
        children: list[Child] = []
        if self.num_tokens and self._seed is not None:
            self._chunks = [b"".join(self._chunks)]
            children = [Child(index=0, seed=self._seed, output_token_ids=self._chunks[0])]
        return Submit(
            request_id=submit.request_id,
            params=submit.params,
            prompt=submit.prompt,
            prompt_token_ids=submit.prompt_token_ids,
            chat=submit.chat,
            attempt=attempt,
            children=children,
            arrival_time=self._arrival_time,
        )

    def accept(self, accepted: Accepted) -> bool:
        """Note what the core holds; False if this is of an older attempt."""
        if accepted.attempt != self._num_sent - 1:
            return False
        self._is_accepted = True
        if self._seed is None:
            self._seed = accepted.seed
        if self._submit.prompt_token_ids is None:  # the tokens are the request from here on; the text is not needed
            self._submit = Submit(
                request_id=self.request_id,
                params=self._submit.params,
                prompt_token_ids=accepted.prompt_token_ids,
            )
        return True

    def take(self, delta: Delta) -> Verdict:
        """Hold the delta's tokens if they follow those that are here."""
        num_new = num_ids(delta.token_ids)
        if not self._is_accepted:  # it belongs to an older attempt
            return "old"
        if delta.start == self.num_tokens:
            self._chunks.append(delta.token_ids)
            self.num_tokens += num_new
            if delta.metrics is not None and delta.metrics.arrival_time:
                self._arrival_time = delta.metrics.arrival_time
            self.num_faults = 0
            return "new"
        if delta.start + num_new <= self.num_tokens and delta.finish_reason is None:
            return "old"
        # Tokens are missing; or it overlaps in part, and its text cannot be cut where the tokens are. A new attempt
        # mends both.
        self.num_faults += 1
        return "gap"
