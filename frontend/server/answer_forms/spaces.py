"""Learn the white space that a chat template writes around thoughts and content, from its texts of answers."""

from __future__ import annotations

from collections.abc import Iterator

from ...forms.answer_forms.form import Spaces
from .probe import CONTENT, KEYS, NAMES, THOUGHT, ProbeAnswer, ProbeCall
from .renderings import SETTINGS, Renderings

_CALLS = (ProbeCall(NAMES[0], {KEYS[0]: "Zqone"}),)
_PLAIN = ProbeAnswer(content=CONTENT)
_THINKING = (ProbeAnswer(thought=THOUGHT, content=CONTENT), ProbeAnswer(thought=THOUGHT, calls=_CALLS))


def learn_spaces(shown: Renderings, thought: tuple[str, str] | None) -> Spaces:
    """Return the white space around the texts of answers; none where the template does not show it. `thought`: the
    texts that open and close a thought."""
    opened, closed = _around_thought(shown, thought)
    return Spaces(
        thought_open=opened,
        prompted_thought=_behind_prompt(shown, thought, opened),
        thought_close=closed,
        behind_thought=_behind_thought(shown, thought),
        content=_before_content(shown),
        calls=_before_calls(shown),
    )


def _around_thought(shown: Renderings, thought: tuple[str, str] | None) -> tuple[str, str]:
    """Return the white space between a thought and the texts that open and close it."""
    if thought is not None:
        opening, closing = thought
        for text in _texts(shown, *_THINKING):
            before, found, behind = text.partition(THOUGHT)
            if found and before.rstrip().endswith(opening) and behind.lstrip().startswith(closing):
                return before[len(before.rstrip()) :], _leading(behind)
    return "", ""


def _behind_thought(shown: Renderings, thought: tuple[str, str] | None) -> str | None:
    """Return the white space between a thought, which may be empty, and content; None if they do not stand so."""
    if thought is not None:
        for text in _texts(shown, _THINKING[0], _PLAIN):
            before, content, _ = text.partition(CONTENT)
            end = before.rstrip()
            if content and end.endswith(thought[1]):
                return before[len(end) :]
    return None


def _texts(shown: Renderings, *answers: ProbeAnswer) -> Iterator[str]:
    """Yield the texts of answers with all variables."""
    for answer in answers:
        for variables in SETTINGS:
            yield shown.header + shown.answer(answer, variables)


def _behind_prompt(shown: Renderings, thought: tuple[str, str] | None, opened: str) -> str:
    """Return what is missing of `opened`, the white space behind the text that opens a thought, in a prompt that ends
    with it."""
    if thought is not None:
        for prompt in map(shown.prompt, SETTINGS):
            text = prompt.rstrip()
            if text.endswith(thought[0]):
                return opened.removeprefix(prompt[len(text) :])
    return ""


def _before_content(shown: Renderings) -> str:
    """Return the white space between the prompt and content without a thought."""
    prompt = shown.prompt()
    text = shown.header + shown.answer(_PLAIN)
    between = text.removeprefix(prompt).partition(CONTENT)[0]
    return between * (text.startswith(prompt) and not between.strip())


def _before_calls(shown: Renderings) -> str:
    """Return the white space between content and calls in one turn."""
    for text in _texts(shown, ProbeAnswer(content=CONTENT, calls=_CALLS)):
        behind = text.rpartition(CONTENT)[2]
        if NAMES[0] in behind:
            end = shown.turn_end.strip()
            is_one_turn = not end or not behind.lstrip().startswith(end)
            return _leading(behind) * is_one_turn
    return ""


def _leading(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]
