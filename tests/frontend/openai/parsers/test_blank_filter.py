"""BlankFilter drops content of white space before other parts, wherever the content is cut."""

from __future__ import annotations

import pytest

from tokenloom.frontend.openai.parsers.parts import BlankFilter, CallBegin, CallEnd, Content, Part, Thought

CALL = (CallBegin("f", "1"), CallEnd(""))


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("texts", "keeps_first", "expected"),
    [
        (["\n", None, " \n", None, " x \n", None, "y"], False, ["", "", " x \n", "y"]),
        (["\n", None, " \n", None, " x \n", None, "y"], True, ["\n", "", " x \n", "y"]),
        ([" ", None, " "], False, ["", ""]),
    ],
)
def test_white_space_belongs_to_the_text_that_follows(
    texts: list[str | None], keeps_first: bool, expected: list[str], is_cut: bool
) -> None:
    parts: list[Part] = []
    for text in texts:
        parts += CALL if text is None else [Content(each) for each in (text if is_cut else [text])]
    blanks, read = BlankFilter(keeps_first=keeps_first), [""]
    for part in parts:
        for found in blanks.read([part]):
            if isinstance(found, Content):
                read[-1] += found.text
            elif isinstance(found, CallEnd):
                read.append("")
    assert read == expected


def test_other_parts_pass_unchanged() -> None:
    parts: list[Part] = [Thought(" "), *CALL]
    assert BlankFilter().read(parts) == parts
