"""PromptGroups: the answers of one request that wait until the first has computed their prompt.

Of n answers one leads; the others wait for it (`waits_for`) until the prompt's blocks are published and then find
them. If the leader ends before that, the next one leads. When all that was computed is lost, they do it again. Knows
no rows, no blocks and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..request import Request

WAITS_FOR = "prompt_groups"


class PromptGroups:
    """Invariant: who waits for a sibling has a leader here that is not finished and has not computed the prompt."""

    def __init__(self) -> None:
        self._followers_by_leader: dict[Request, list[Request]] = {}
        self._leader_by_follower: dict[Request, Request] = {}
        self._num_groups = 0

    def __len__(self) -> int:
        """How many requests wait for a sibling."""
        return len(self._leader_by_follower)

    @property
    def leaders(self) -> list[Request]:
        return list(self._followers_by_leader)

    def add(self, leader: Request, followers: list[Request]) -> None:
        """`followers`, of which there is at least one, wait from now on."""
        self._num_groups += 1
        self._followers_by_leader[leader] = followers
        leader.prompt_group = self._num_groups
        for follower in followers:
            self._leader_by_follower[follower] = leader
            follower.prompt_group = self._num_groups
            follower.waits_for.add(WAITS_FOR)

    def reunite(self, requests: Iterable[Request]) -> None:
        """What these had computed is lost: the first of each prompt_group leads again, and the others wait for it."""
        members_by_group: dict[int, list[Request]] = {}
        for request in sorted(requests, key=lambda request: request.key):
            if request.prompt_group:
                members_by_group.setdefault(request.prompt_group, []).append(request)
        for leader, *followers in members_by_group.values():
            if followers:
                self.add(leader, followers)

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
