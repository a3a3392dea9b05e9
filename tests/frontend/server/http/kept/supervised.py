"""A supervisor that keeps the connections of a small HTTP server, and replaces its process by a fork after a loss.

`python -m … PORT-FILE`: prints the port, then the pid of each server. The app's answers depend on their request alone:

    /stream?N       a stream of N tokens, each a word, from the first one that the client has not
    /tokens?N       a whole answer of N tokens, which are kept as they come
    /length         the number of bytes of the body
    /deadly         kills its server
    /plain          a stream that shows no tokens
    /early          an answer that does not wait for the body
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import uvloop
import zmq
from starlette.types import Receive, Scope, Send

from tokenloom.frontend.launcher.supervisor.frontends.kept_connections import KeptConnections
from tokenloom.frontend.listening.http_listeners import HttpListeners
from tokenloom.frontend.listening.journal.journal import HttpJournal
from tokenloom.frontend.listening.journal.pages import JournalLimits
from tokenloom.frontend.listening.keeper import Keeper
from tokenloom.frontend.server.api.continuation import Answer, Shown, current
from tokenloom.frontend.server.http.connections import Connections, HttpConnection
from tokenloom.frontend.server.http.kept.adoption import adopt
from tokenloom.frontend.server.http.kept.connection import ConnectionKeeper, Kept
from tokenloom.frontend.server.http.server import accept, new_server
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.engine_specs import new_spec

LIMITS = JournalLimits(num_slots=500, max_body_bytes=4 << 20, max_bytes=64 << 20)
TOKEN_S = 0.001


def word(number: int) -> bytes:
    """Return the text of a stream's token."""
    return b"%d " % number * (number % 7 + 1)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/early":
        await send_whole(send, b"early")
        return
    body, has_more = b"", True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, has_more = body + message["body"], message["more_body"]
    if scope["path"] == "/deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    if scope["path"] == "/length":
        await send_whole(send, b"%d %s" % (len(body), body[-10:]))
    elif scope["path"] == "/tokens":
        await send_tokens(int(scope["query_string"]), send)
    else:
        await stream(int(scope["query_string"]), send, is_plain=scope["path"] == "/plain")


async def send_whole(send: Send, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_tokens(count: int, send: Send) -> None:
    answer = current().answers.get(0, Answer([]))
    for number in range(len(answer.token_ids), count):
        await asyncio.sleep(TOKEN_S)
        await send({"type": "tokenloom.tokens", "shown": Shown([(0, encode_ids([number]))], [], number, 0)})
    await send_whole(send, b"".join(map(word, range(count))))


async def stream(count: int, send: Send, *, is_plain: bool) -> None:
    continuation = current()
    answer = continuation.answers.get(0, Answer([]))
    assert answer.token_ids == list(range(continuation.num_events))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(continuation.num_events, count):
        piece = {"type": "http.response.body", "body": word(number), "more_body": True}
        await send(piece if is_plain else piece | {"shown": Shown([(0, encode_ids([number]))], [], number + 1, 0)})
        await asyncio.sleep(TOKEN_S)
    await send({"type": "http.response.body", "body": b"end " + continuation.nonce.hex().encode()})


async def serve(journal_fd: int, channel: socket.socket, is_on: bool) -> None:
    keeper = ConnectionKeeper(HttpJournal(journal_fd, LIMITS, "v"), keeping := Keeper(channel), is_on=is_on)
    kept = list(keeping.take_kept())
    server, connections = new_server(app), Connections(20.0, 400, lambda *refused: None)

    def new_connection(kept: Kept, connection: socket.socket) -> HttpConnection:
        return HttpConnection(server.config, server.server_state, connections, True, kept)

    unread = await adopt(keeper, kept, new_connection)
    acceptor = accept(keeper, server, connections, EngineConfig(http="0"), lambda: None, keeper, is_local=True)
    for each in unread:
        acceptor.take(*each)
    await asyncio.get_running_loop().create_future()


def main(is_on: bool) -> None:
    listeners = HttpListeners()
    listeners.open(EngineConfig(http="127.0.0.1:0"))
    print(listeners.sockets[0].getsockname()[1], flush=True)
    poller = zmq.Poller()
    kept = KeptConnections(new_spec(config=EngineConfig()), listeners, poller)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        journal_fd, channel_fd = kept.prepare(0)
        kept.hand_over(0)
        if (pid := os.fork()) == 0:
            channel = socket.socket(fileno=os.dup(channel_fd))
            uvloop.run(serve(journal_fd, channel, is_on))
        print(pid, flush=True)
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if dict(poller.poll(2)).get(sys.stdin.fileno()):
                os.kill(pid, signal.SIGKILL)
                return
            kept.go_on()
        num_resumed, num_cut = kept.counts()
        print(num_resumed, sum(num_cut.values()), [r for r, n in num_cut.items() if n], file=sys.stderr)


if __name__ == "__main__":
    main(is_on=sys.argv[1] == "on")
