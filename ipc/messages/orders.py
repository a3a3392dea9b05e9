"""Orders that change an engine as a whole: pause, reload, sleep and others.

A frontend passes a client's order on to the supervisor, which owns it and sends each core its part. The order of a
gateway's client reaches the supervisor through a core.

    frontend or core → supervisor  Order        supervisor → core              Hold
    core → supervisor              Held         supervisor → frontend or core  Ordered
"""

from __future__ import annotations

from ..errors import ErrorInfo
from ..process.log import LogLevel
from .base import Holding, MemoryTag, Message, OrderAction, PauseMode

MEMORY_ACTIONS = ("reload", "sleep", "wake_up")  # change what the workers hold
WORKERS_ACTIONS = (*MEMORY_ACTIONS, "start_profile", "stop_profile")  # the workers carry them out


class Order(Message, frozen=True, kw_only=True, tag="order"):
    """A client's order. The reply is Ordered, after it is carried out or has failed."""

    order_id: str  # random; an order that is sent again is carried out once
    action: OrderAction
    mode: PauseMode = "keep"
    model: str = ""
    sleep_level: int = 1
    tags: list[MemoryTag] | None = None
    level: LogLevel = "info"
    replica: int | None = None  # the only one that it is for; None: all


class Hold(Message, frozen=True, kw_only=True, tag="hold"):
    """A core's part of an order. A core gets one Hold at a time, besides those of clear_kv_cache. The reply is Held."""

    order_id: str
    action: OrderAction
    mode: PauseMode = "keep"
    holding: Holding | None = None  # of reload, sleep and wake_up


class Held(Message, frozen=True, kw_only=True, tag="held"):
    """Reply to Hold, after it is carried out or has failed."""

    order_id: str
    generation: int | None = None  # of the workers that have a new holding; None: they have the one from before
    error: ErrorInfo | None = None


class Ordered(Message, frozen=True, kw_only=True, tag="ordered"):
    """Reply to Order. It goes to all frontends and cores, since the one that passed the order on may have been
    replaced."""

    order_id: str
    error: ErrorInfo | None = None


def joint_error(action: OrderAction, errors: dict[int, ErrorInfo], num_all: int) -> ErrorInfo | None:
    """Return the error of an order that went to `num_all` replicas; None if `errors` is empty. `errors`: by number of
    the replica, of the replicas that refused the order or failed. The error names these, unless they are all."""
    if not errors:
        return None
    error = next(iter(errors.values()))
    if len(errors) == num_all:
        return error
    where = ", ".join(map(str, sorted(errors)))
    what = f"{action} failed at replica {where} of {num_all}, which is as it was before"
    message = f"{what}; the others have carried it out: repeat it, or undo it there. {error.message}"
    return ErrorInfo(error.kind, message, error.retry_after_s)
