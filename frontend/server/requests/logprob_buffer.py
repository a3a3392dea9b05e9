"""LogprobBuffer: logprobs of consecutive tokens, kept from their arrival in the core's columns until they are sent.

They stay as encoded by the core. `take` only adds the texts of single tokens, which TokenTexts caches by token id.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ....ipc.codec import decode_ids
from ....ipc.errors import ProtocolError
from ....ipc.messages.client import Logprobs
from ....ipc.messages.core import KeyLogprobs
from ..text.token_texts import TokenTexts


class LogprobBuffer:
    """Logprobs of the tokens at positions [start, end). Logprobs that arrive again for a position are ignored."""

    def __init__(self, start: int, *, are_named: bool = False) -> None:
        """`start`: position of the first token. `are_named`: the alternatives at each position are the request's
        logprob_token_ids, not the likeliest tokens."""
        self._are_named = are_named
        self.restart(start)

    def restart(self, start: int) -> None:
        """Empty the buffer. The next token must be the one at position `start`."""
        self.start = self.end = start
        self._num_top = 0
        self._token_ids, self._logprobs, self._ranks = bytearray(), bytearray(), bytearray()

    def append(self, run: LogprobRun) -> bool:
        """Append the run's tokens from position `end` on; return True. If none is new, or tokens before the run are
        missing, change nothing and return False."""
        num_known = self.end - run.position
        if not 0 <= num_known < run.num_tokens:
            return False
        self._num_top = run.width - 1
        self._token_ids += run.token_ids[4 * num_known * run.width :]
        self._logprobs += run.logprobs[4 * num_known * run.width :]
        self._ranks += run.ranks[4 * num_known :]
        self.end += run.num_tokens - num_known
        return True

    def trim(self, end: int) -> None:
        """Remove the logprobs of the tokens from position `end` on."""
        if end < self.end:
            num_kept = max(end - self.start, 0)
            del self._token_ids[4 * num_kept * (self._num_top + 1) :]
            del self._logprobs[4 * num_kept * (self._num_top + 1) :]
            del self._ranks[4 * num_kept :]
            self.end = self.start + num_kept

    def take(self, texts: TokenTexts | None) -> Logprobs | None:
        """Remove and return all logprobs, with the tokens' texts unless `texts` is None. None if there are none."""
        if self.start == self.end:
            return None
        token_ids = bytes(self._token_ids)
        taken = Logprobs(
            num_top=self._num_top,
            token_ids=token_ids,
            logprobs=bytes(self._logprobs),
            ranks=bytes(self._ranks),
            texts={} if texts is None else {token_id: texts[token_id] for token_id in set(decode_ids(token_ids))},
            are_named=self._are_named,
        )
        self.restart(self.end)
        return taken


class LogprobRun(NamedTuple):
    """Logprobs of consecutive tokens of one answer, as slices of the byte columns of KeyLogprobs."""

    key: int
    position: int  # position of the first token
    num_tokens: int
    width: int  # logprobs at each position, the token's own included
    ranks: bytes
    token_ids: bytes
    logprobs: bytes


def runs_of(columns: KeyLogprobs) -> Iterator[LogprobRun]:
    """Split columns into runs: consecutive tokens of one answer with the same width. ProtocolError, before the first
    run is yielded, if the sizes of the columns do not match."""
    keys, positions, widths = (decode_ids(frame) for frame in (columns.keys, columns.positions, columns.widths))
    if not len(keys) == len(positions) == len(widths) == len(columns.ranks) // 4 or min(widths, default=1) < 1:
        raise ProtocolError(f"logprobs of {len(keys)} tokens have {len(widths)} widths, {len(positions)} positions")
    if not len(columns.token_ids) == len(columns.logprobs) == 4 * sum(widths):
        raise ProtocolError(f"logprobs have {len(columns.token_ids) // 4} entries, their widths sum to {sum(widths)}")
    first = offset = 0
    while first < len(keys):
        key, position, width = keys[first], positions[first], widths[first]
        end = first + 1
        while (
            end < len(keys) and keys[end] == key and widths[end] == width and positions[end] - position == end - first
        ):
            end += 1
        stop = offset + 4 * width * (end - first)
        ranks, ids = columns.ranks[4 * first : 4 * end], columns.token_ids[offset:stop]
        yield LogprobRun(key, position, end - first, width, ranks, ids, columns.logprobs[offset:stop])
        first, offset = end, stop
