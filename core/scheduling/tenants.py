"""Tenants: lets API keys share the tokens, rows and blocks of the engine by their weights.

While the requests of several keys are open, each step charges the tokens that it computes to the keys of its rows, per
unit of weight. The key with the smallest sum comes first, within a priority: of the waiting requests, and of the
running ones with prompts to compute. A key that comes back starts with the others, so that no key saves up for
later, and no key's lead over the last one counts for more than MAX_LEAD. With requests of one key all is as without
keys.

Rows and blocks are shared, too: a request of a key with less than its part may take the place of running ones of a key
with more (preemption.py). A part is that of the keys with open requests. A key may have more while others leave
it, but all prompts of such keys add at most PAUSE_S to a step, since requests of the others may come during it, and a
row that another one leaves is kept for KEPT_S: a caller that asks again at once would only preempt the newcomer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...ipc.messages.base import FinishReason
from ...ipc.messages.core import TenantRef
from ..request import Request
from ..tenant import Tenant
from .prefill_throttle import PAUSE_S, PrefillThrottle
from .step.rows import Rows
from .step_feature import StepFeature, StepPlan

MAX_LEAD = 2048.0  # tokens per unit of weight by which one key was served more than another and that it has to wait for
LEAST_TOKENS = 2  # of a prompt in a step: one token would be taken for a decoding row
UNKNOWN_TOKENS = 256  # of prompts that may add a pause, while their cost is unknown
KEPT_S = 0.25  # for which a row is kept that a tenant without more than its part has left
MAX_KEPT = 64  # keys without open requests that are kept


class Tenants(StepFeature):
    """Owner of the tenants and of the tokens that each was served. Reads the rows and the throttle."""

    def __init__(
        self, rows: Rows, throttle: PrefillThrottle, num_blocks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """num_blocks: of the KV pool. clock: seconds."""
        self._num_blocks = num_blocks
        self._clock = clock
        self._rows, self._throttle = rows, throttle
        self._by_name = {"": Tenant()}
        self._free: list[int] = []
        self._served = np.zeros(1)  # [indices] tokens per unit of weight, while several were open
        self._weights = np.ones(1)
        self._is_open = np.zeros(1, np.bool_)
        self._num_open = 0
        self._kept: list[tuple[float, Tenant]] = []  # rows: the end of the time for which each is kept, and its tenant
        self._num_beyond = 0  # tokens in the next step of prompts of tenants with more than their part

    @property
    def are_several(self) -> bool:
        """Whether requests of several tenants are open."""
        return self._num_open > 1

    def of(self, ref: TenantRef | None) -> Tenant:
        """Return the tenant of a request, with the weight that it has now."""
        if ref is None:
            return self._by_name[""]
        tenant = self._by_name.get(ref.name)
        if tenant is None:
            self._forget_some()
            tenant = self._by_name[ref.name] = Tenant(ref.name, index=self._new_index())
        self._weights[tenant.index], tenant.kv_share = ref.weight, ref.kv_share
        return tenant

    def _new_index(self) -> int:
        if self._free:
            return self._free.pop()
        self._served = np.append(self._served, 0.0)
        self._weights = np.append(self._weights, 1.0)
        self._is_open = np.append(self._is_open, False)
        return len(self._served) - 1

    def _forget_some(self) -> None:
        """Forget the tenants without requests if they are many; the next one of the same name is new."""
        idle = [each for each in self._by_name.values() if each.name and not each.num_open]
        if len(idle) >= MAX_KEPT:
            for tenant in idle:
                del self._by_name[tenant.name]
                self._free.append(tenant.index)
                self._served[tenant.index] = 0.0

    def weight(self, tenant: Tenant) -> float:
        return float(self._weights[tenant.index])

    def part(self, tenant: Tenant) -> float:
        """Return the part of the engine that a tenant may claim, in (0, 1]: that of its weight among all with open
        requests."""
        weight = self._weights[tenant.index]
        others = self._weights[self._is_open].sum() - weight * self._is_open[tenant.index]
        return float(weight / (weight + others))

    def is_full(self, tenant: Tenant) -> bool:
        """Return whether no further request of a tenant is to run for now: others have open requests, and those of the
        tenant that run hold its share of the pool. A tenant without running requests is never full."""
        if tenant.kv_share >= 1 or not self.are_several:
            return False
        held = [request.num_blocks for request in self._rows.requests() if request.tenant is tenant]
        return bool(held) and sum(held) >= tenant.kv_share * self._num_blocks

    # ── order ────────────────────────────────────────────────────────────────────────────────────────────────────

    def served(self, tenant: Tenant) -> float:
        """Return the tokens per unit of weight that a tenant was served; the one with the fewest comes first."""
        return float(self._served[tenant.index])

    def in_order(self, rows: npt.NDArray[np.integer]) -> list[int]:
        """Return rows in the order in which they get tokens of prompts: in the policy's order, but those of a priority
        in that of their tenants."""
        in_order = self._rows.in_order(rows)
        if not self.are_several or len(rows) < 2:
            return in_order
        levels: dict[tuple[bool, int], list[int]] = {}
        for row in in_order:
            levels.setdefault(self._rows.request(row).level, []).append(row)
        served, tenants = self._served, self._rows.tenant
        return [row for level in levels.values() for row in sorted(level, key=lambda row: served[tenants[row]])]

    # ── the verbs of a feature ───────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Request) -> None:
        tenant = request.tenant
        tenant.num_open += 1
        if tenant.num_open == 1:
            if self._num_open:
                least = self._served[self._is_open].min()
                self._served[tenant.index] = max(self._served[tenant.index], least - 1)  # before others that are equal
            self._is_open[tenant.index] = True
            self._num_open += 1

    def end(self, request: Request, reason: FinishReason | None) -> None:
        tenant = request.tenant
        has_run = request.num_cached_tokens >= 0
        if has_run and self.are_several and not self._has_more(tenant, num_new=1):
            self._kept.append((self._clock() + KEPT_S, tenant))
        tenant.num_open -= 1
        if not tenant.num_open:
            self._is_open[tenant.index] = False
            self._num_open -= 1
            if not self.are_several:
                self._served[:] = 0.0

    def _has_more(self, tenant: Tenant, num_new: int = 0) -> bool:
        """Return whether a tenant, with so many new rows, has more than its part of the rows."""
        if not self.are_several:
            return False
        num_rows = np.count_nonzero(self._rows.is_active & (self._rows.tenant == tenant.index)) + num_new
        return bool(num_rows > self.part(tenant) * len(self._rows.is_active))

    def _rest(self) -> int:
        """Return how many tokens the next step may still have of prompts of tenants with more than their part."""
        token_s = self._throttle.token_beside_s
        most = UNKNOWN_TOKENS if token_s is None else int(PAUSE_S / token_s)
        return max(most, LEAST_TOKENS) - self._num_beyond

    def closes(self, request: Request) -> bool:
        if not self._rows.num_active or not self._has_more(request.tenant, num_new=1):
            return False
        now = self._clock()
        self._kept = [kept for kept in self._kept if kept[0] > now]
        num_free = len(self._rows.is_active) - self._rows.num_active
        return num_free <= len(self._kept) or self._rest() < LEAST_TOKENS

    def admit(self, request: Request, num_computed: int) -> None:
        for place, (_, tenant) in enumerate(self._kept):
            if tenant is request.tenant:
                del self._kept[place]
                break

    def cut(self, request: Request, count: int, most: int) -> int:
        if count < LEAST_TOKENS or not self._has_more(request.tenant):
            return count
        given = min(count, self._rest())
        if given < LEAST_TOKENS:
            return 0
        self._num_beyond += given
        return given

    def plan(self, step: StepPlan) -> None:
        self._num_beyond = 0
        if not self.are_several:
            return
        tokens = np.bincount(self._rows.tenant, step.counts, len(self._served))
        self._served += tokens / self._weights
        most = self._served[self._is_open].min() + MAX_LEAD
        np.minimum(self._served, most, out=self._served)

    def check_invariants(self, requests: Sequence[Request]) -> None:
        for tenant in self._by_name.values():
            assert tenant.num_open == sum(each.tenant is tenant for each in requests)
            assert self._is_open[tenant.index] == (tenant.num_open > 0)
        assert self._num_open == np.count_nonzero(self._is_open)
        indices = [each.index for each in self._by_name.values()] + self._free
        assert sorted(indices) == list(range(len(self._served)))
