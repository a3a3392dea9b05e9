"""ControlProxy: a client's orders, checked and passed on; the answers come back the same way.

Most are the core's. The log level is the supervisor's, which says the new one to every process: that it comes back to
us is the answer.

A reload's checkpoint is found and read in a thread: a hub id may have to be fetched. A reload whose core is lost is
given to the next one, so that its answer is true: weights that were read already are read once more. So is
all else that may be done twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from ...ipc.config.engine_spec import EngineSpec
from ...ipc.config.model_config import ModelConfig
from ...ipc.errors import ConfigError, EngineDead, ErrorInfo, RequestError, TokenloomError, error_info
from ...ipc.messages.client import Control, Done, QueryFailed, Reply
from ...ipc.messages.core import ControlDone, EngineControl
from ...ipc.messages.supervisor import SetLogLevel
from ...ipc.process.log import LogLevel
from ..intake.background import Background
from ..supervisor.hub import find_checkpoint
from .core_client import CoreClient, Outbox

Send: TypeAlias = Callable[[Reply], None]


class ControlProxy:
    """Owns the orders that the core has not answered yet."""

    def __init__(self, spec: EngineSpec, core: CoreClient, background: Background, outbox: Outbox) -> None:
        self._spec, self._core, self._background, self._outbox = spec, core, background, outbox
        self._numbers = itertools.count()
        self._open: dict[int, tuple[EngineControl, int, Send]] = {}  # control id: order, query id, who gets the answer
        self._level_changes: list[tuple[Control, Send]] = []  # orders for another log level

    def submit(self, control: Control, send: Send) -> None:
        """Pass an order on; `send` is called once, from the frontend's own thread."""
        if control.action == "log_level":
            self._level_changes.append((control, send))
            self._outbox.to_supervisor.append(SetLogLevel(level=control.level))
        elif control.action == "reload":
            self._background.run(
                lambda: self._find_checkpoint(control.model), lambda folder: self._forward(control, folder, send)
            )
        else:
            self._forward(control, "", send)

    def on_log_level(self, level: LogLevel) -> None:
        """The supervisor says so to every process."""
        done = [each for each in self._level_changes if each[0].level == level]
        self._level_changes = [each for each in self._level_changes if each[0].level != level]
        for control, send in done:
            send(Done(query_id=control.query_id))

    def _find_checkpoint(self, model: str) -> str:
        """The folder of a checkpoint that this engine could serve in place of its own."""
        if not model:
            raise RequestError("reload needs a model: a folder or a hub id")
        try:
            folder = find_checkpoint(model, None, "the model", self._spec.config)
            shape = _shape(ModelConfig.load(folder, self._spec.config.hf_overrides))
        except ConfigError as error:  # here it is the caller's
            raise RequestError(str(error)) from None
        if shape != _shape(self._spec.model):
            raise RequestError(f"{folder} has another architecture or shape than the model that is served: start anew")
        return str(folder)

    def _forward(self, control: Control, folder: str | TokenloomError, send: Send) -> None:
        if not isinstance(folder, TokenloomError) and not self._core.is_up:
            folder = EngineDead("the core is being replaced just now: ask again in a second")
        if isinstance(folder, TokenloomError):
            send(QueryFailed(query_id=control.query_id, error=error_info(folder)))
            return
        assert control.action != "log_level"
        order = EngineControl(
            control_id=next(self._numbers),
            action=control.action,
            mode=control.mode,
            model_folder=folder,
            sleep_level=control.sleep_level,
            tags=control.tags,
        )
        self._open[order.control_id] = (order, control.query_id, send)
        self._core.control(order)

    def on_done(self, done: ControlDone) -> None:
        if done.control_id in self._open:
            _, query_id, send = self._open.pop(done.control_id)
            send(Done(query_id=query_id) if done.error is None else QueryFailed(query_id=query_id, error=done.error))

    def on_core_lost(self) -> None:
        """A new core knows nothing of the orders of the old one, and is not paused."""
        for control_id, (order, query_id, send) in list(self._open.items()):
            if order.action in ("pause", "resume"):
                del self._open[control_id]
                send(QueryFailed(query_id=query_id, error=ErrorInfo("dead", "the core was replaced: ask again")))

    def on_core_up(self) -> None:
        """Give it what is open."""
        for order, _, _ in self._open.values():
            self._core.control(order)


def _shape(model: ModelConfig) -> ModelConfig:
    """What must be equal for weights to be exchanged in place."""
    return msgspec.structs.replace(model, eos_token_ids=[], bos_token_id=None, dtype="")
