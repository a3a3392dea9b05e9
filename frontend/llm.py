"""LLM: an engine of its own and the Client of that engine, in one object.

    llm = LLM(model="Qwen/Qwen3-0.6B", max_model_len=4096)
    outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=32))

The engine runs in separate processes and ends with this object. AsyncLLM does the same for an AsyncClient:

    async for output in AsyncLLM(model=…).generate("The capital of France is"): …
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Unpack

from ..ipc.spec.config.engine_config import EngineConfig
from .client.async_client import AsyncClient
from .client.client import Client
from .client.transport import Transport
from .client.zmq_transport import ZmqTransport
from .embedded.child_engine import ChildEngine
from .embedded.in_process_transport import InProcessTransport
from .launcher.options.engine_options import EngineOptions
from .launcher.options.options import config_from_keywords, keyword_errors

START_TIMEOUT_S = 30.0  # longest wait for the first reply of an engine that has reported Ready


class LLM(Client):
    """Synchronous client with an engine of its own. `model`: a folder, GGUF file or hub id; None: the demo model."""

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, in_process: bool = False, **options: Unpack[EngineOptions]
    ) -> None:
        """Start an engine and wait until it serves. Each option of engine-launch is a keyword, as in `max_num_seqs=16`.

        `in_process` runs the engine in this process, in the thread that waits for outputs: for debuggers and profilers.
        TypeError for an unknown keyword, ConfigError for an invalid configuration, EngineDead if the start fails.
        """
        config = config_from_keywords("LLM", model, options)
        with keyword_errors("LLM", model, options):
            self._attach(*(open_in_process(config) if in_process else open_private(config)))
        self._model = config.model or "demo"


def open_private(config: EngineConfig) -> tuple[Transport, Callable[[], None]]:
    """Start an engine in separate processes. Return a transport to it, and a function that closes the transport and
    stops the engine."""
    engine = ChildEngine(config)
    try:
        transport = ZmqTransport(engine.addresses, connect_timeout_s=START_TIMEOUT_S)
    except BaseException:
        engine.stop()
        raise

    def close() -> None:
        transport.close()
        engine.stop()

    try:
        engine.on_death(transport.fail)
        transport.wait_connected()
    except BaseException:
        close()
        raise
    return transport, close


def open_in_process(config: EngineConfig, *, in_background: bool = False) -> tuple[Transport, Callable[[], None]]:
    """Start an engine in this process. Return a transport to it, and a function that ends both. `in_background`: run
    the engine in a thread of its own, not in the caller's."""
    from .embedded.in_process import InProcessEngine  # imports torch, which only this mode needs

    transport = InProcessTransport(InProcessEngine(config), in_background=in_background)
    return transport, transport.close


class AsyncLLM(AsyncClient):
    """Asyncio client with an engine of its own. `model`: a folder, GGUF file or hub id; None: the demo model."""

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, in_process: bool = False, **options: Unpack[EngineOptions]
    ) -> None:
        """Start an engine and block until it serves. Keywords and errors are the same as for LLM.

        `in_process` runs the engine in a thread of this process.
        """
        config = config_from_keywords("AsyncLLM", model, options)
        with keyword_errors("AsyncLLM", model, options):
            self._attach(*(open_in_process(config, in_background=True) if in_process else open_private(config)))
        self._model = config.model or "demo"
