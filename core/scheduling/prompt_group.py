"""PromptGroups: the answers of one request share the computation of their prompt.

Of n answers the first is the leader; the others wait (WaitReason.PROMPT) until the leader has computed the prompt, and
then find its blocks in the cache. If the leader ends before that, the next answer leads. If computed blocks are lost,
the group re-forms. Knows no rows, no blocks and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..request import Request, WaitReason


class PromptGroups:
    """Invariant: each follower has a leader that is not finished and has not computed the prompt."""

    def __init__(self) -> None:
        self._followers_by_leader: dict[Request, list[Request]] = {}
        self._leader_by_follower: dict[Request, Request] = {}
        self._num_groups = 0

    def __len__(self) -> int:
        """The number of followers."""
        return len(self._leader_by_follower)

    @property
    def leaders(self) -> list[Request]:
        return list(self._followers_by_leader)

    def add(self, leader: Request, followers: list[Request]) -> None:
        """Form a group; `followers`, at least one, wait for the leader."""
        self._num_groups += 1
        self._followers_by_leader[leader] = followers
        leader.prompt_group = self._num_groups
        for follower in followers:
            self._leader_by_follower[follower] = leader
            follower.prompt_group = self._num_groups
            follower.waits_for.add(WaitReason.PROMPT)

    def reunite(self, requests: Iterable[Request]) -> None:
        """Form the groups of these requests again, after their computed blocks were lost."""
        members_by_group: dict[int, list[Request]] = {}
        for request in sorted(requests, key=lambda request: request.key):
            if request.prompt_group:
                members_by_group.setdefault(request.prompt_group, []).append(request)
        for leader, *followers in members_by_group.values():
            if followers:
                self.add(leader, followers)

    def dissolve(self, leader: Request) -> list[Request]:
        """Remove the leader's group; return its followers, which the caller releases."""
        followers = self._followers_by_leader.pop(leader, [])
        for follower in followers:
            del self._leader_by_follower[follower]
        return followers

    def remove(self, request: Request) -> Request | None:
        """Remove a request that ends. Returns the follower that leads in its place, which the caller releases."""
        leader = self._leader_by_follower.pop(request, None)
        if leader is not None:
            self._followers_by_leader[leader].remove(request)
            if not self._followers_by_leader[leader]:
                del self._followers_by_leader[leader]
            return None
        followers = self.dissolve(request)
        if not followers:
            return None
        successor, *rest = followers
        successor.num_prompt_logprobs = request.num_prompt_logprobs
        if rest:
            self.add(successor, rest)
        return successor
