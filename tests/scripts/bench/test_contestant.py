"""A peer process answers line by line; each kind of failure ends the run with a message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tokenloom.scripts.bench.contestant import PEERS, Peer, PeerFailed
from tokenloom.scripts.bench.processes import tree
from tokenloom.tests.support.waiting import wait_until

PROGRAM = """
import sys
sys.path.insert(0, {peers!r})
import peer_protocol
def load(options):
    print("noise of a library")
    def answer(request):
        print("more noise")
        {body}
    return {{"version": "1"}}, answer
raise SystemExit(peer_protocol.serve("", load))
"""
Start = Callable[[str], Peer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    peers = []

    def start_peer(body: str) -> Peer:
        file = tmp_path / "peer.py"
        file.write_text(PROGRAM.format(peers=str(PEERS), body=body))
        peers.append(Peer("the peer", [sys.executable, str(file), "model"]))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.close()


def test_a_peer_answers_until_its_input_ends(start: Start) -> None:
    peer = start('return {"seconds": 0.5, "num_tokens": len(request["prompts"]) * request["max_tokens"]}')
    assert peer.facts == {"version": "1"}
    assert peer.generate([[1, 2], [3]], 4) == peer.generate([[5]], 1) == 0.5
    peer.close()
    assert peer._process.returncode == 0


def test_a_peer_is_stopped_with_its_children_between_its_answers(start: Start) -> None:
    peer = start('import subprocess; subprocess.Popen(["sleep", "60"]); return {}')
    for _ in range(2):
        peer.ask({})
        processes = tree(peer.pid)
        assert len(processes) > 1
        wait_until(lambda: {process.status() for process in tree(peer.pid)} == {psutil.STATUS_STOPPED})
    for process in tree(peer.pid)[1:]:
        process.kill()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('return {"seconds": 0.5, "num_tokens": 7}', " generated 7 tokens, 8 were requested"),
        ("return 1 / 0", ": ZeroDivisionError"),
        ("sys.stderr.flush(); import os; os._exit(3)", " ended with exit code 3"),
    ],
)
def test_a_peers_failure_is_reported(start: Start, body: str, reason: str) -> None:
    with pytest.raises(PeerFailed, match=f"the peer{reason}"):
        start(body).generate([[1], [2]], 4)
