"""FrontendLoads: reports to each frontend on the work that the others have given this core, for its router."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...ipc.messages.core import Load
from ..request import Request

INTERVAL_S = 0.1  # time between two reports


class FrontendLoads:
    """Owner of the last report to each frontend."""

    def __init__(self) -> None:
        self._told: dict[int, Load] = {}  # by frontend
        self._told_at = -INTERVAL_S

    @property
    def next_at(self) -> float | None:
        """Time of the next reports, in monotonic seconds; None if the last ones said that there is no work of
        others."""
        return self._told_at + INTERVAL_S if any(load != Load() for load in self._told.values()) else None

    def changed(self, requests: Iterable[Request], frontends: Collection[int], now: float) -> dict[int, Load]:
        """Return the reports that differ from the last ones, by frontend; none within INTERVAL_S of the last ones. A
        single frontend only gets the report that the others' work is gone. `now`: monotonic seconds."""
        if (len(frontends) < 2 and self.next_at is None) or now < self._told_at + INTERVAL_S:
            return {}
        self._told_at = now
        waiting_tokens, num_open = dict.fromkeys(frontends, 0), dict.fromkeys(frontends, 0)
        for request in requests:
            if request.frontend_id in num_open:
                num_open[request.frontend_id] += 1
                if request.row < 0:
                    waiting_tokens[request.frontend_id] += request.num_tokens
        all_tokens, num_all = sum(waiting_tokens.values()), sum(num_open.values())
        loads = {
            each: Load(waiting_tokens=all_tokens - waiting_tokens[each], num_open=num_all - num_open[each])
            for each in frontends
        }
        changed = {each: load for each, load in loads.items() if load != self._told.get(each, Load())}
        self._told = loads
        return changed
