"""The HTTP server: uvicorn on the frontend's own event loop. Imported only when --http is given.

One thread runs the frontend's turns and the HTTP handlers, so that a token goes from the core's message to the
client's socket without a lock, a queue or a second process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from ..ipc.config import http_endpoint
from ..ipc.engine_spec import EngineSpec
from ..ipc.errors import ConfigError
from .server_app import new_app
from .server_engine import LocalEngine
from .server_loop import TurnLoop
from .service import Frontend

if TYPE_CHECKING:
    from .process import FrontendProcess

BACKLOG = 2048
FAREWELL_S = 2  # how long answers that are being written may take when the engine stops


def run_with_http(
    process: FrontendProcess, frontend: Frontend, spec: EngineSpec, address: str, on_listening: Callable[[str], None]
) -> None:
    """Serve until the process is stopping; raises ConfigError if nothing can listen at `address`."""
    listener = _bind(address)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    on_listening(f"http://{shown}:{port}")
    uvloop.run(_serve(process, frontend, spec, listener))


def _bind(address: str) -> socket.socket:
    host, port = http_endpoint(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a replacement takes the port over
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --http {address}: {error.strerror or error}; choose another") from None
    listener.setblocking(False)
    return listener


async def _serve(process: FrontendProcess, frontend: Frontend, spec: EngineSpec, listener: socket.socket) -> None:
    turns = TurnLoop(process)
    app = new_app(LocalEngine(frontend, turns.wake), frontend, spec)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=FAREWELL_S,
    )
    config.load()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    await turns.run()  # uvicorn's own main loop would wake ten times a second to do nothing
    process.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await server.shutdown(sockets=[listener])
