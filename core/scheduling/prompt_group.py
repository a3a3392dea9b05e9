"""PromptGroups: the answers of one request share the computation of their prompt.

Of n answers the first is the leader; the others wait (WaitReason.PROMPT) until the leader's whole prompt is scheduled,
and then find its blocks in the cache. If the leader ends before that, the next answer leads. If computed blocks are
lost, the group re-forms. Knows no rows, no blocks and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..request import Request, WaitReason


class PromptGroups:
    """Groups of the answers of one request that wait for its prompt to be computed once, by group number. A group's
    first request is its leader. Invariant: a group has at least two requests, all unfinished, and its leader's prompt
    is not yet scheduled to its end."""

    def __init__(self) -> None:
        self._members_by_group: dict[int, list[Request]] = {}  # the first leads
        self._num_groups = 0

    def __len__(self) -> int:
        return len(self._members_by_group)

    @property
    def leaders(self) -> list[Request]:
        return [leader for leader, *_ in self._members_by_group.values()]

    def add(self, members: list[Request]) -> None:
        """Form a group of two requests or more; all but the first get WaitReason.PROMPT."""
        self._num_groups += 1
        self._members_by_group[self._num_groups] = members
        for member in members:
            member.prompt_group = self._num_groups
        for follower in members[1:]:
            follower.waits_for.add(WaitReason.PROMPT)

    def reunite(self, requests: Iterable[Request]) -> None:
        """Group those of `requests` again that once shared a group, after their computed blocks were lost."""
        members_by_group: dict[int, list[Request]] = {}
        for request in sorted(requests, key=lambda request: request.key):
            if request.prompt_group:
                members_by_group.setdefault(request.prompt_group, []).append(request)
        for members in members_by_group.values():
            if len(members) > 1:
                self.add(members)

    def dissolve(self, leader: Request) -> list[Request]:
        """Remove the leader's group and return its followers, which the caller must release."""
        return self._members_by_group.pop(leader.prompt_group)[1:]

    def remove(self, request: Request) -> Request | None:
        """Remove a request that ends from its group. If it was the leader, return the next one, which the caller must
        release; else None."""
        members = self._members_by_group.get(request.prompt_group)
        if members is None:
            return None
        is_leader = members[0] is request
        members.remove(request)
        if len(members) == 1:
            del self._members_by_group[request.prompt_group]
        if not is_leader:
            return None
        members[0].num_prompt_logprobs = request.num_prompt_logprobs
        return members[0]
