"""Learn the form of thoughts from a chat template's texts of a thought beside content and beside a call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ....ipc.codec import JsonObject
from .probe import CONTENT, KEYS, NAMES, THOUGHT, ProbeAnswer, ProbeCall
from .renderings import NO_VARIABLES, SETTINGS, Renderings
from .whole_markers import common_prefix, common_suffix

_CALLS = (ProbeCall(NAMES[0], {KEYS[0]: "Zqone"}),)


class Thoughts(NamedTuple):
    """The form of thoughts as it was learned."""

    texts: tuple[str, str] | None = None  # that open and close a thought; None: no thoughts are known
    content_open: str = ""  # header between thought and content
    variables: JsonObject = NO_VARIABLES  # of the template, with which it shows thoughts
    begins_inside: bool = False  # answers begin inside the thought, though no prompt opens it


def learn_thoughts(shown: Renderings, pairs: Sequence[tuple[str, str]] = ()) -> Thoughts:
    """Return the form of thoughts. `pairs`: texts around thoughts that stand in the template; the first counts if the
    template shows no thoughts of earlier answers."""
    for variables in SETTINGS:
        thoughts = _shown_thoughts(shown, variables)
        if thoughts is not None:
            return thoughts
    return Thoughts(next(iter(pairs), None))


def without_thought(text: str, texts: tuple[str, str] | None) -> str:
    """Return `text` without an empty thought, or the end of one, at its begin."""
    if texts is None:
        return text
    opening, closing = map(re.escape, texts)
    return re.sub(rf"\A\s*(?:{opening}\s*)?{closing}\s*", "", text)


def _shown_thoughts(shown: Renderings, variables: JsonObject) -> Thoughts | None:
    """Return the form of thoughts as the template shows them with some variables; None if it shows none."""
    alone = shown.answer(ProbeAnswer(thought=THOUGHT, content=CONTENT), variables)
    called = shown.answer(ProbeAnswer(thought=THOUGHT, calls=_CALLS), variables)
    before_call = called.partition(THOUGHT)[2]
    whole = alone
    if not _shows_thought(alone):
        whole = called
        before_call = ""
    if not _shows_thought(whole):
        return None
    opening, _, rest = whole.partition(THOUGHT)
    plain = shown.answer(ProbeAnswer(content=CONTENT), variables).partition(CONTENT)[0]
    closing = _closing(shown, opening.strip(), rest, before_call, plain)
    if not closing:
        return None
    marker = closing.replace("/", "", 1)
    if not opening.strip() and shown.header.rstrip().endswith(marker):
        shown.shorten_header(marker)
        return _shown_thoughts(shown, variables)
    opening = opening.strip() or shown.prompt(variables).removeprefix(shown.header).strip()
    content_open = without_thought(plain, (opening, closing)).strip()
    return Thoughts((opening, closing), content_open, variables, not opening)


def _closing(shown: Renderings, opening: str, rest: str, called: str, plain: str) -> str:
    """Return the text that closes a thought: it follows both before content and before a call. If only one of the two
    shows thoughts, an empty thought may stand in the plain turn or in a prompt; else it ends where the call begins.

    `rest`, `called`: the text behind a thought, and the text behind it before a call if `rest` is before content."""
    rest = rest.partition(CONTENT)[0]
    if called:
        return common_prefix(rest, called).strip()
    for text in (plain, *map(shown.prompt, SETTINGS)):
        if opening and opening in text:
            closing = common_prefix(rest, text.partition(opening)[2].lstrip() + "\n").strip()
            if closing:
                return closing
    before = rest.partition(NAMES[0])[0]
    unthought = shown.answer(ProbeAnswer(calls=_CALLS)).partition(NAMES[0])[0]
    return before[: len(before) - len(common_suffix(before, unthought))].strip()


def _shows_thought(text: str) -> bool:
    """Return whether a template shows the thought as text: some print the message as a list."""
    return THOUGHT in text and f"'{THOUGHT}" not in text and f'"{THOUGHT}' not in text
