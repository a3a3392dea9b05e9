"""OrderRunner: carries out the supervisor's orders, one at a time.

A pause is complete when the engine is quiet (`EngineCore.is_quiet`). A reload pauses the engine, makes every rank load
the weights in place of a step, and drops everything computed or cached. Sleep frees the memory of the ranks, and
wake_up loads the former weights, in the same way. Requests stay and continue from their tokens. A profile starts
and ends between two steps; it is lost if a worker or the core is replaced. clear_kv_cache needs no quiet engine, and
may run at the same time as another order.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ipc.errors import InternalError, RequestError, TokenloomError, error_info
from ...ipc.messages.base import Holding
from ...ipc.messages.orders import WORKERS_ACTIONS, Held, Hold
from ..engine import EngineCore


class OrderRunner:
    """Owner of `hold`, the order that is being carried out; None: no order. `go_on` is called once in each turn."""

    def __init__(
        self,
        engine: EngineCore,
        reply: Callable[[Held], None],
        reload: Callable[[Holding], None],
        profile: Callable[[bool], None],
    ) -> None:
        self._engine, self._reply, self._reload, self._profile = engine, reply, reload, profile
        self.hold: Hold | None = None
        self._is_at_work = False  # whether the workers are carrying out the order
        self._is_recording = False  # whether the workers record a profile
        self._was_paused = False  # whether the engine was paused before the order

    def begin(self, hold: Hold) -> None:
        if hold.action == "clear_kv_cache":
            self._engine.clear_kv_cache(lambda: self._reply(Held(order_id=hold.order_id)))
            return
        assert self.hold is None, "the supervisor sends one at a time"
        self.hold = hold
        self._was_paused = self._engine.is_paused
        if hold.action == "resume":
            self._engine.resume()
        elif hold.action == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
        elif hold.action != "wake_up":  # workers that sleep run no steps
            self._engine.pause(hold.mode if hold.action in ("pause", "sleep") else "keep")

    def go_on(self) -> None:
        """Continue with the order if the engine is quiet, or if the order does not need that. Must not be called
        without workers."""
        if (hold := self.hold) is None or self._is_at_work:
            return
        if hold.action not in ("resume", "wake_up", "reset_prefix_cache") and not self._engine.is_quiet:
            return
        holding = hold.holding
        if holding is not None and (holding.model_folder or holding.asleep != self._engine.asleep):
            self._is_at_work = True
            self._engine.forget_computed()
            self._reload(holding)
        elif hold.action in ("start_profile", "stop_profile"):
            self._go_on_with_profile(records=hold.action == "start_profile")
        else:
            self._end()

    def on_reloaded(self, holding: Holding, generation: int) -> None:
        """End the reload, sleep or wake_up, since all ranks of `generation` have the new holding."""
        self._engine.asleep = holding.asleep
        self._end(generation=generation)

    def _go_on_with_profile(self, *, records: bool) -> None:
        if records != self._is_recording:
            self._is_at_work = True
            self._profile(records)
        elif records:
            self._end(RequestError("a profile is running already: stop_profile ends it"))
        else:
            lost = "it ends, too, with a worker or the core that is replaced"
            self._end(RequestError(f"no profile is running: start_profile begins one; {lost}"))

    def on_profiled(self, error: str) -> None:
        """End the order for a profile, since every rank has started or written its profile. `error`: why one could not;
        "" if all could."""
        assert self.hold is not None
        action = self.hold.action
        self._is_recording = action == "start_profile" and not error
        self._end(InternalError(f"{action} failed: {error}") if error else None)

    def on_workers_lost(self) -> bool:
        """Drop an order that the lost workers were to carry out: the supervisor sends it again, or lets it fail. Return
        whether they had begun."""
        was_at_work = self._is_at_work
        self._is_recording = False
        if self.hold is not None and self.hold.action in WORKERS_ACTIONS:
            self._release()
        return was_at_work

    def _end(self, error: TokenloomError | None = None, generation: int | None = None) -> None:
        """End the order and reply Held. `generation`: the generation of workers that have a new holding, if any."""
        hold = self._release()
        info = None if error is None else error_info(error)
        self._reply(Held(order_id=hold.order_id, generation=generation, error=info))

    def _release(self) -> Hold:
        """Remove the order and return it. End the pause that was made for it, unless the order itself is a pause."""
        assert self.hold is not None
        hold = self.hold
        self.hold = None
        self._is_at_work = False
        if not self._was_paused and hold.action != "pause":
            self._engine.resume()
        return hold
