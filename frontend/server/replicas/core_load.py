"""CoreLoad: the work of one core as one frontend knows it, in tokens and seconds.

It is measured from outside, by the answers that this frontend gets: how many prompt tokens wait at the core, and how
fast they become first tokens. So a slow or hung core looks expensive, whatever it reports. Only for the work of other
frontends is the core's own report used.
"""

from __future__ import annotations

from typing import NamedTuple

FORGET = 0.85  # weight of all earlier measurements of a rate when a new one is added
MIN_CAPACITY = 4096  # least capacity assumed of a prefix cache, in tokens
TRUST_S = 30.0  # time for which a measured rate is used; after that, the mean of all cores


class OthersLoad(NamedTuple):
    """A core's report of the work that other frontends have sent to it."""

    waiting_tokens: int = 0
    num_open: int = 0

    def checked(self) -> OthersLoad:
        """Return the report with negative numbers replaced by 0."""
        return OthersLoad(*(max(int(number), 0) for number in self))


class Rate:
    """Prompt tokens per second, as an exponentially weighted mean of measurements. `value`: the mean."""

    def __init__(self, tokens_per_s: float = 0.0) -> None:
        self._tokens, self._seconds = tokens_per_s, 1.0 if tokens_per_s else 0.0
        self.value = tokens_per_s

    def add(self, num_tokens: float, seconds: float) -> None:
        self._tokens = FORGET * self._tokens + num_tokens
        self._seconds = FORGET * self._seconds + seconds
        self.value = max(self._tokens, 1.0) / max(self._seconds, 1e-6)


class CoreLoad:
    """Load of one core. Owns the number of tokens of each request that waits for its first output token, in the order
    of sending."""

    def __init__(self, num_inserted: int = 0, capacity_tokens: int | None = None) -> None:
        """num_inserted: tokens sent to the core so far, whose KV blocks no longer exist. capacity_tokens: the size of
        its prefix cache in tokens; None: unknown."""
        self.waiting: dict[int, int] = {}
        self.num_waiting_tokens = 0
        self.num_open = 0  # answers that have not ended
        self.others = OthersLoad()
        self.num_inserted = num_inserted  # tokens whose KV blocks were new to the core
        self.capacity_tokens = capacity_tokens
        self.rate = Rate()
        self._oldest = num_inserted
        self._progress_at = 0.0  # time of the newest first token, or of the start of a queue
        self._measured_at = -TRUST_S

    @property
    def oldest(self) -> int:
        """The least stamp (value of num_inserted) of a prefix that the core may still have cached."""
        capacity = self.capacity_tokens
        return self._oldest if capacity is None else max(self._oldest, self.num_inserted - capacity)

    def on_wrong_depth(self, age: int, *, is_missing: bool) -> None:
        """Adjust the size of the prefix cache by a prefix that was last used `age` tokens ago: if `is_missing`, the
        core no longer had it; otherwise the core still had it."""
        if is_missing and (self.capacity_tokens is None or age <= self.capacity_tokens):
            self.capacity_tokens = max(age - 1, MIN_CAPACITY)
        elif not is_missing and self.capacity_tokens is not None:
            self.capacity_tokens = max(self.capacity_tokens, age)

    def clear_cache(self) -> None:
        """Record that the core's prefix cache is empty."""
        self._oldest = self.num_inserted + 1
        self.num_inserted += 1

    def on_sent(self, request_id: int, num_tokens: int, now: float) -> None:
        if not self.waiting:
            self._progress_at = now
        self.waiting[request_id] = num_tokens
        self.num_waiting_tokens += num_tokens
        self.num_inserted += num_tokens
        self.num_open += 1

    def correct(self, request_id: int, num_tokens: int) -> None:
        """Set how many tokens of a waiting request the core has to compute."""
        if (known := self.waiting.get(request_id)) is not None:
            self.waiting[request_id] = num_tokens
            self.num_waiting_tokens += num_tokens - known
            self.num_inserted += max(num_tokens - known, 0)

    def on_first_token(self, request_id: int, now: float, fleet: Rate) -> None:
        """Remove a request from those that wait, and add a measurement to the rates of the core and of the fleet."""
        num_tokens = self._stop_waiting(request_id)
        if num_tokens is not None:
            seconds = now - self._progress_at
            for rate in (self.rate, fleet):
                rate.add(num_tokens, seconds)
            self._progress_at = self._measured_at = now

    def on_finished(self, request_id: int, num_output_tokens: int) -> None:
        self._stop_waiting(request_id)
        self.num_open -= 1
        self.num_inserted += num_output_tokens

    def _stop_waiting(self, request_id: int) -> int | None:
        num_tokens = self.waiting.pop(request_id, None)
        self.num_waiting_tokens -= num_tokens or 0
        return num_tokens

    def tokens_per_s(self, now: float, fleet: float) -> float:
        """Return the measured rate of the core; if it was measured too long ago, return `fleet`, the mean of all
        cores."""
        return self.rate.value if now - self._measured_at < TRUST_S else fleet

    def seconds(self, num_tokens: int, now: float, fleet: float) -> float:
        """Return how many seconds `num_tokens` of a new prompt would take here, including everything that waits before
        them. fleet: the mean rate of all cores, in tokens per second."""
        rate = self.tokens_per_s(now, fleet)
        ahead = self.num_waiting_tokens + self.others.waiting_tokens
        seconds = (ahead + num_tokens) / rate
        if self.waiting:  # a part of the first one has been computed
            first = next(iter(self.waiting.values()))
            seconds -= min(now - self._progress_at, first / rate)
        return seconds
