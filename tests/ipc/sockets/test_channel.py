"""A Channel yields well-formed messages, and counts and logs the others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq

from tokenloom.ipc.codec import encode
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.core import AbortRequests, CoreToFrontend, FrontendToCore
from tokenloom.ipc.sockets.channel import Channel
from tokenloom.ipc.sockets.zmq_sockets import new_socket

DEADLINE_MS = 5000

Peer = Channel[CoreToFrontend, FrontendToCore]
Port = Channel[FrontendToCore, CoreToFrontend]


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Port]]:
    """A DEALER and the ROUTER that it is connected to."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer = new_socket(context, zmq.ROUTER), new_socket(context, zmq.DEALER, identity=b"peer")
    router.bind("inproc://port")
    dealer.connect("inproc://port")
    yield Channel(dealer, CoreToFrontend, "core"), Channel(router, FrontendToCore, "peers")
    context.destroy(linger=0)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The lines that channels log, whichever test has configured the log before."""
    logger, found = logging.getLogger("tokenloom.ipc"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def test_malformed_frames_are_counted_and_logged_at_powers_of_two(pair: tuple[Peer, Port], lines: list[str]) -> None:
    peer, port = pair
    peer.send(AbortRequests(keys=[1]))
    for _ in range(9):
        peer.socket.send(b"\xc1")
    peer.send(AbortRequests(keys=[2]))
    assert list(port.receive_from()) == [(b"peer", AbortRequests(keys=[1])), (b"peer", AbortRequests(keys=[2]))]
    assert port.counts == {"malformed_peers_frames": 9}
    assert [line.split(";")[0] for line in lines] == [f"{n} malformed from the peers" for n in (1, 2, 4, 8)]
    assert "malformed frame of 1 bytes" in lines[0]


def test_a_refused_message_counts_as_malformed_in_shared_counts(pair: tuple[Peer, Port], lines: list[str]) -> None:
    counts: Counter[str] = Counter(malformed_peers_frames=2)
    port: Port = Channel(pair[1].socket, FrontendToCore, "peers", counts)
    port.count_malformed(ProtocolError("columns disagree"))
    port.count_malformed(ProtocolError("columns disagree"))
    assert counts["malformed_peers_frames"] == 4
    assert lines == ["4 malformed from the peers; the last: columns disagree"]


def test_a_flood_of_malformed_frames_ends_at_the_time_limit(pair: tuple[Peer, Port]) -> None:
    peer, port = pair
    for _ in range(3):
        peer.socket.send(b"\xc1")
    assert list(port.receive_from(limit_s=-1)) == []
    assert port.counts == {"malformed_peers_frames": 1}


def test_a_send_tells_whether_the_peer_is_there(pair: tuple[Peer, Port]) -> None:
    peer, port = pair
    reply = AbortRequests(keys=[3])
    assert not Channel[FrontendToCore, FrontendToCore](port.socket, FrontendToCore, "peers").send_to(b"nobody", reply)
    echo: Channel[FrontendToCore, FrontendToCore] = Channel(peer.socket, FrontendToCore, "core")
    port.socket.send_multipart([b"peer", b"\xc1"])
    port.socket.send_multipart([b"peer", b"more", encode(reply)])
    assert echo.socket.poll(DEADLINE_MS)
    assert echo.wait() == reply and echo.counts == {"malformed_core_frames": 1}
    with pytest.raises(zmq.Again):
        echo.receive_one()
