"""StepCosts: the seconds of a step by its numbers of rows and drafts, learned from finished steps.

For a number of drafts between two known ones the seconds are interpolated. A number above all known ones is assumed to
cost little more than the largest of them, so that it is tried; from then on its cost is known.
"""

from __future__ import annotations

from bisect import bisect_right

from ...scheduling.prefill_throttle import blend

_TOKEN_SHARE = 0.02  # of a plain step's time that a token of an unknown step adds: less than any device takes
_FIRST_DRAFTS = 15
_WEIGHT = 0.25  # of the newest step in the averages
_SLOWER_WEIGHT = 0.1  # of a step far above its average, perhaps because of other work on the machine
_FAR = 1.3
_ALONE = 1.03  # of a plain step's time: a step that waits for the one before it, while that is unknown


class StepCosts:
    """Owner of moving averages of seconds, by the size of the batch (a power of two of rows) and number of drafts."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        self._alone_s: dict[int, float] = {}  # of steps without drafts that waited for the step before

    def on_step(self, num_rows: int, num_drafts: int, seconds: float, *, is_alone: bool = False) -> None:
        """Learn from the seconds of a step whose rows sample one token each and verify `num_drafts` drafts in all.
        is_alone: the step was sent after the result of the one before, as steps with drafts always are."""
        size = num_rows.bit_length()
        if is_alone and not num_drafts:
            self._alone_s[size] = _blended(self._alone_s.get(size), seconds)
        else:
            known = self._seconds.setdefault(size, {})
            known[_size_of(num_drafts)] = _blended(known.get(_size_of(num_drafts)), seconds)

    def plain_s(self, num_rows: int) -> float | None:
        """Return the seconds of a step without drafts; None: unknown."""
        return self._seconds.get(num_rows.bit_length(), {}).get(0)

    def alone_s(self, num_rows: int) -> float:
        """Return the seconds of a step without drafts that waits for the step before; `plain_s` is known."""
        plain_s = self._seconds[num_rows.bit_length()][0]
        return max(self._alone_s.get(num_rows.bit_length(), _ALONE * plain_s), plain_s)

    def most_drafts(self, num_rows: int) -> int:
        """Return the largest number of drafts to try: twice as many as a step had so far, at least _FIRST_DRAFTS."""
        return max(2 * max(self._seconds[num_rows.bit_length()]), _FIRST_DRAFTS)

    def seconds(self, num_rows: int, most: int) -> list[float]:
        """Return the seconds of a step with 0 … `most` drafts, never falling: [most + 1]. The seconds without
        drafts must be known."""
        known = self._seconds[num_rows.bit_length()]
        sizes = sorted(known)
        values = [known[size] for size in sizes]
        for i in range(1, len(values)):
            values[i] = max(values[i], values[i - 1])
        found = []
        for count in range(most + 1):
            i = bisect_right(sizes, count) - 1
            if i + 1 < len(sizes):
                share = (count - sizes[i]) / (sizes[i + 1] - sizes[i])
                found.append(values[i] + share * (values[i + 1] - values[i]))
            else:
                found.append(values[i] + (count - sizes[i]) * _TOKEN_SHARE * values[0])
        return found


def _blended(old: float | None, seconds: float) -> float:
    is_far = old is not None and seconds > _FAR * old
    return blend(old, seconds, _SLOWER_WEIGHT if is_far else _WEIGHT)


def _size_of(num_drafts: int) -> int:
    """Return the size under which a step with `num_drafts` drafts is learned: exact up to 16, then one of eight sizes
    for each power of two."""
    step = 1 << max(num_drafts.bit_length() - 4, 0)
    return num_drafts // step * step
