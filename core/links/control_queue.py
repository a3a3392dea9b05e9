"""ControlQueue: runs pause, resume, reload, sleep, wake_up, reset_prefix_cache and profiles, one after the other.

A pause is complete when the engine is quiet. A reload pauses, lets every rank load the weights in place of a step,
and voids everything computed or cached. Sleep and wake_up are reloads of nothing and of the former weights. Requests
stay and continue from their tokens. The supervisor confirms each reload, since it starts new workers with the same
weights. A profile begins and ends between two steps; it is lost if a worker or the core is replaced.
clear_kv_cache and prefetch_kv need no quiet engine and run beside all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...ipc.errors import InternalError, RequestError, TokenloomError, error_info
from ...ipc.messages.base import Holding, MemoryTag
from ...ipc.messages.core import ControlDone, EngineControl
from ..engine import EngineCore

_ALL: list[MemoryTag] = ["weights", "kv_cache"]


class ControlQueue:
    """Runs at most one control at a time. `tick` is called once a turn. reload: loads a holding on all ranks. profile:
    starts (True) or writes (False) a profile on all ranks. check: raises an error for a folder that cannot be reloaded,
    since gateways do not see it; use_weights is called with one that was."""

    def __init__(
        self,
        engine: EngineCore,
        reply: Callable[[int, ControlDone], None],
        reload: Callable[[Holding], None],
        profile: Callable[[bool], None],
        check: Callable[[str], None] = lambda folder: None,
        use_weights: Callable[[str], None] = lambda folder: None,
    ) -> None:
        self._engine, self._reply, self._reload, self._profile = engine, reply, reload, profile
        self._check, self._use_weights = check, use_weights
        self.orders: deque[tuple[int, EngineControl]] = deque()
        self._is_at_work = False  # the workers carry out a control
        self._is_recording = False  # the workers record a profile
        self._num_losses = 0  # of workers during the current control
        self._was_paused = False

    def add(self, frontend_id: int, order: EngineControl) -> None:
        if order.action in ("clear_kv_cache", "prefetch_kv"):
            self._run_now(frontend_id, order)
            return
        try:
            if order.action == "reload":
                self._check(order.model_folder)
        except TokenloomError as error:
            self._reply(frontend_id, ControlDone(control_id=order.control_id, error=error_info(error)))
            return
        self.orders.append((frontend_id, order))
        if len(self.orders) == 1:
            self._begin()

    def _run_now(self, frontend_id: int, order: EngineControl) -> None:
        """Run a control that needs no quiet engine, beside all others; reply when its blocks have come or gone."""

        def done(num_tokens: int = 0) -> None:
            self._reply(frontend_id, ControlDone(control_id=order.control_id, num_tokens=num_tokens))

        if order.action == "clear_kv_cache":
            self._engine.clear_kv_cache(done)
        else:
            kv_cache = self._engine.scheduler.kv_cache
            kv_cache.prefetch(order.prompt_token_ids, order.cache_salt, order.adapter_digest, order.media, done)

    def _begin(self) -> None:
        _, order = self.orders[0]
        self._was_paused, self._num_losses = self._engine.is_paused, 0
        if order.action == "resume":
            self._engine.resume()
        elif order.action == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
        elif order.action != "wake_up":  # asleep workers run no steps
            self._engine.pause(order.mode if order.action in ("pause", "sleep") else "keep")

    def tick(self) -> None:
        """Run queued controls until one must wait for a quiet engine or for the workers, which must be present."""
        while self.orders and not self._is_at_work:
            _, order = self.orders[0]
            if order.action not in ("resume", "wake_up", "reset_prefix_cache") and not self._engine.is_quiet:
                return
            asleep = self._asleep_after(order)
            if order.action == "reload" or asleep != self._engine.asleep:
                self._is_at_work = True
                self._engine.forget_computed()
                self._reload(Holding(model_folder=order.model_folder, asleep=asleep, drops_pages=order.sleep_level > 1))
            elif order.action in ("start_profile", "stop_profile"):
                self._go_on_with_profile(records=order.action == "start_profile")
            elif order.action == "sleep":
                self._end_pause(None)
            else:
                self._finish()

    def _asleep_after(self, order: EngineControl) -> list[MemoryTag]:
        if order.action == "sleep":
            return _ALL
        if order.action == "wake_up":
            awake = _ALL if order.tags is None else order.tags
            return [tag for tag in self._engine.asleep if tag not in awake]
        return self._engine.asleep

    def on_reloaded(self) -> None:
        """Finish the current reload, sleep or wake_up: all ranks, and workers to replace them, have the new holding."""
        if self._is_at_work:
            order = self.orders[0][1]
            self._engine.asleep = self._asleep_after(order)
            if order.action == "reload":
                self._use_weights(order.model_folder)
            self._end_pause(None)

    def _go_on_with_profile(self, *, records: bool) -> None:
        if records != self._is_recording:
            self._is_at_work = True
            self._profile(records)
        elif records:
            self._end_pause(RequestError("a profile is running already: stop_profile ends it"))
        else:
            lost = "it ends, too, with a worker or the core that is replaced"
            self._end_pause(RequestError(f"no profile is running: start_profile begins one; {lost}"))

    def on_profiled(self, error: str) -> None:
        """Finish a profile control: every rank has started or written its profile, or `error` says why not."""
        action = self.orders[0][1].action
        self._is_recording = action == "start_profile" and not error
        self._end_pause(InternalError(f"{action} failed: {error}") if error else None)

    def on_workers_lost(self, reason: str) -> None:
        """Fail the control that the lost workers carried out, if any: new ones have the former holding. Sleep and
        wake_up are tried once more first."""
        self._is_recording = False
        if not self._is_at_work:
            return
        action = self.orders[0][1].action
        self._num_losses += 1
        if action == "reload":
            what = "the workers ended while they read the new weights, the old ones stay"
        elif action in ("start_profile", "stop_profile"):
            what = f"{action} failed, no profile is running: the workers ended"
        elif self._num_losses < 2:
            self._is_at_work = False
            return
        else:
            what = f"{action} failed twice and nothing has changed: the workers ended"
        self._end_pause(InternalError(f"{what}: {reason}"))

    def _end_pause(self, error: TokenloomError | None) -> None:
        self._is_at_work = False
        if not self._was_paused:
            self._engine.resume()
        self._finish(error)

    def _finish(self, error: TokenloomError | None = None) -> None:
        frontend_id, order = self.orders.popleft()
        self._reply(
            frontend_id, ControlDone(control_id=order.control_id, error=None if error is None else error_info(error))
        )
        if self.orders:
            self._begin()
