"""Siblings: the answers of one request that wait until the first has computed their prompt.

Of n answers one leads; the others wait for it (`waits_for`) until the prompt's blocks are published and then find
them. If the leader ends before that, the next one leads. Knows no rows, no blocks and no queue.
"""

from __future__ import annotations

from .request import Request

WAITS_FOR = "siblings"


class Siblings:
    """Invariant: who waits for a sibling has a leader here that is not finished and has not computed the prompt."""

    def __init__(self) -> None:
        self._followers_by_leader: dict[Request, list[Request]] = {}
        self._leader_by_follower: dict[Request, Request] = {}

    def __len__(self) -> int:
        """How many requests wait for a sibling."""
        return len(self._leader_by_follower)

    @property
    def leaders(self) -> list[Request]:
        return list(self._followers_by_leader)

    def add(self, leader: Request, followers: list[Request]) -> None:
        """`followers`, of which there is at least one, wait from now on."""
        self._followers_by_leader[leader] = followers
        for follower in followers:
            self._leader_by_follower[follower] = leader
            follower.waits_for.add(WAITS_FOR)

    def release(self, leader: Request) -> list[Request]:
        """The leader has computed the prompt: its followers, which are returned, wait for it no more."""
        followers = self._followers_by_leader.pop(leader, [])
        for follower in followers:
            del self._leader_by_follower[follower]
            follower.waits_for.discard(WAITS_FOR)
        return followers

    def forget(self, request: Request) -> Request | None:
        """`request` ends. Returns the follower that leads in its place, if any."""
        leader = self._leader_by_follower.pop(request, None)
        if leader is not None:
            self._followers_by_leader[leader].remove(request)
            if not self._followers_by_leader[leader]:
                del self._followers_by_leader[leader]
            return None
        followers = self.release(request)
        if not followers:
            return None
        successor, *rest = followers
        successor.num_prompt_logprobs = request.num_prompt_logprobs
        if rest:
            self.add(successor, rest)
        return successor
