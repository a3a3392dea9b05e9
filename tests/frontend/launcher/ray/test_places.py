"""Places against a cluster of facts: each place gets one host, no node two, and nothing stays reserved for nobody."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.launcher.ray.places import DELAYS_S, REST_S, Placement, Places

OWN = "own"


class Cluster:
    """Nodes by name, each with room for one host, and the reservations on them."""

    def __init__(self, num_places: int, nodes: list[str]) -> None:
        self.nodes = nodes
        self.placements: list[Placement] = []  # with a reservation
        self.places = Places(num_places, OWN, self._reserve)
        self.taken: list[Placement] = []  # in the engine
        self.now = 0.0

    def _reserve(self, placement: Placement) -> Reservation:
        assert OWN in placement.excluded
        self.placements.append(placement)
        return Reservation(self, placement)

    def place(self) -> None:
        """Let Ray place hosts on free nodes."""
        for placement in list(self.placements):
            used = {each.node for each in self.placements if each.node}
            free = [node for node in self.nodes if node not in used | placement.excluded]
            if not placement.node and free:
                self.places.on_placed(placement, free[0])

    def join(self) -> None:
        """Let hosts whose agents run take free places, those that were lost too."""
        there = [each for each in self.placements if each.node in self.nodes]
        self.taken = [each for each in self.taken if each in there]
        self.taken += [each for each in there if each not in self.taken][: self.places.num_wanted - len(self.taken)]
        self.tell()

    def tell(self) -> None:
        self.places.on_taken([each.name for each in self.taken])

    def lose(self, node: str) -> None:
        """Let the head lose the host of a node, unnoticed by Ray."""
        self.taken = [each for each in self.taken if each.node != node]
        self.tell()

    def end(self, node: str, *, may_retry: bool) -> None:
        """Let an agent end."""
        for placement in [each for each in self.placements if each.node == node]:
            self.taken = [each for each in self.taken if each is not placement]
            self.tell()
            self.places.on_gone(placement, "it ended", self.now, may_retry=may_retry)

    def arrange(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.places.arrange(self.now)
        nodes = [each.node for each in self.placements if each.node]
        assert len(nodes) == len(set(nodes)), "two hosts on a node"
        assert self.placements == self.places.all
        assert sum(not each.node for each in self.placements) <= 1

    def settle(self) -> None:
        for _ in range(20):
            self.arrange(DELAYS_S[-1])
            self.place()
            self.join()
        self.arrange()


class Reservation:
    def __init__(self, cluster: Cluster, placement: Placement) -> None:
        self._cluster, self._placement = cluster, placement

    def release(self) -> None:
        self._cluster.placements.remove(self._placement)


@given(st.integers(1, 3), st.integers(0, 1 << 32))
def test_each_place_gets_a_host_whatever_happens(num_places: int, seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(num_places, [f"n{number}" for number in range(num_places + 1)])
    for number in range(40):
        node = rng.choice(cluster.nodes)
        event = rng.randrange(7)
        if event == 0:
            cluster.lose(node)
        elif event == 1:
            cluster.end(node, may_retry=rng.random() < 0.7)
        elif event == 2:  # its raylet is killed, another comes up
            cluster.end(node, may_retry=True)
            cluster.nodes = [*(each for each in cluster.nodes if each != node), f"m{number}"]
        elif event in (3, 4):
            cluster.place()
        elif event == 5:
            cluster.join()
        cluster.arrange(rng.choice([0.0, 0.3, 10.0]))
    cluster.now += REST_S
    cluster.settle()
    assert len(cluster.taken) == num_places and cluster.placements == [
        each for each in cluster.placements if each in cluster.taken
    ]


def test_hosts_by_hand_need_no_placement() -> None:
    cluster = Cluster(2, ["a", "b"])
    cluster.settle()
    assert len(cluster.taken) == 2
    cluster.lose("a")
    cluster.places.on_taken(["", *(each.name for each in cluster.taken)])
    cluster.arrange()
    assert [each.node for each in cluster.placements] == ["b"]


def test_a_lost_host_may_come_back_until_another_has_its_place() -> None:
    cluster = Cluster(1, ["a"])
    cluster.settle()
    (lost,) = cluster.placements
    cluster.lose("a")
    cluster.arrange()
    assert lost in cluster.placements and len(cluster.placements) == 2
    cluster.nodes.append("b")
    cluster.place()
    cluster.taken = [each for each in cluster.placements if each.node == "b"]
    cluster.tell()
    cluster.arrange()
    assert [each.node for each in cluster.placements] == ["b"]


def test_a_node_whose_agent_could_not_serve_rests() -> None:
    cluster = Cluster(1, ["a"])
    cluster.arrange()
    cluster.place()
    cluster.end("a", may_retry=False)
    cluster.arrange(1.0)
    cluster.place()
    assert not any(each.node for each in cluster.placements) and cluster.places.left_out == {"a": "it ended"}
    assert cluster.places.next_at == pytest.approx(REST_S)
    cluster.arrange(REST_S)
    cluster.place()
    assert [each.node for each in cluster.placements] == ["a"]


def test_failures_in_a_row_are_tried_again_more_and_more_slowly() -> None:
    cluster, waits = Cluster(1, ["a"]), []
    for _ in DELAYS_S:
        cluster.arrange()
        cluster.place()
        cluster.end("a", may_retry=True)
        waits.append(cluster.places.next_at - cluster.now)
        cluster.now = cluster.places.next_at
    assert waits == list(DELAYS_S)
