"""An engine with a host tier that other engines load from, also as a process of its own for tests that stop it."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from tokenloom.core.tiers.network.peer_server import PeerServer
from tokenloom.core.tiers.source import Item, Namespace, Source
from tokenloom.tests.core.tiers.slots import NAMESPACE, filled


class Host:
    """A host tier with these blocks. Slot n + 1 has the n-th of them."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = list(items)
        self.pins: Counter[int] = Counter()  # by slot
        self.num_pins = 0

    def pin(self, keys: Sequence[bytes], deadline: float) -> list[int]:
        slots = {item.key: number for number, item in enumerate(self.items, 1)}
        found = [slots.get(key, -1) for key in keys]
        self.pins.update(slot for slot in found if slot >= 0)
        self.num_pins += 1
        return found

    def unpin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot >= 0:
                self.pins[slot] -= 1
                assert self.pins[slot] >= 0

    def slot(self, number: int) -> memoryview:
        return self.items[number - 1].slot

    def serve(
        self,
        address: str,
        secret: bytes = b"",
        disk: Source | None = None,
        namespace: Namespace = NAMESPACE,
        **limits: int,
    ) -> PeerServer:
        server = PeerServer(address, secret, self, self.slot, disk, **limits)
        server.open(namespace._replace(secret=secret))
        return server


def main() -> None:
    """Serve blocks 0 … N-1 until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("count", type=int)
    arguments = parser.parse_args()
    server = Host(filled(range(arguments.count))).serve(arguments.address)
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
