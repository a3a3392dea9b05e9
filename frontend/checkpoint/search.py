"""CheckpointSearch: finds the checkpoints of reloads in threads, because a hub id may need a download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

from ...ipc.errors import ConfigError, InternalError, Overloaded, RequestError, TokenloomError
from ...ipc.shortages.threads import start_thread
from ...ipc.spec.config.engine_spec import EngineSpec
from ...ipc.spec.config.served_model import check_exchange
from .hub import find_checkpoint

Then: TypeAlias = Callable[[str | TokenloomError], None]  # gets the folder, or the reason why there is none


class CheckpointSearch:
    """Owns the searches that are not over."""

    def __init__(self, spec: EngineSpec, wake: Callable[[], None]) -> None:
        """`wake` is called from other threads and must cause a call of `take`."""
        self._spec, self._wake = spec, wake
        self._found: SimpleQueue[tuple[Then, str | TokenloomError]] = SimpleQueue()
        self.num_open = 0

    def find(self, model: str, then: Then) -> None:
        """Find or download the checkpoint `model`. `then` gets a RequestError if it cannot replace the served one."""
        try:
            start_thread("tokenloom checkpoint", self._run, model, then)
        except Overloaded as error:
            then(error)
        else:
            self.num_open += 1

    def take(self) -> None:
        """Call the `then` of each search that is over, in this thread."""
        while not self._found.empty():
            then, found = self._found.get()
            self.num_open -= 1
            then(found)

    def _run(self, model: str, then: Then) -> None:
        found: str | TokenloomError
        try:
            found = self._find(model)
        except TokenloomError as error:
            found = error
        except Exception as error:
            found = InternalError(f"the search for {model!r:.200} failed: {type(error).__name__}: {error}")
        self._found.put((then, found))
        self._wake()

    def _find(self, model: str) -> str:
        if not model:
            raise RequestError("reload needs a model: a folder, a GGUF file or a hub id")
        try:
            spare = Path(self._spec.run_directory)
            folder = find_checkpoint(model, None, "the model", self._spec.config, spare)
        except ConfigError as error:  # the caller's mistake here, not the operator's
            raise RequestError(str(error)) from None
        spec = self._spec
        check_exchange(folder, spec.config, spec.model, has_integer_products=spec.has_integer_products)
        return str(folder)
