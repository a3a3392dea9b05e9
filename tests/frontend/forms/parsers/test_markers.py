"""MarkerFinder finds stop strings and tags wherever the text is cut, and holds back no more text than needed."""

from __future__ import annotations

import random

import pytest

from tokenloom.frontend.forms.parsers.markers import MarkerFinder, split_marker

NUM_CASES = 4_000


def brute_force(text: str, stops: tuple[str, ...], begin: int = 0) -> tuple[int, str] | None:
    """Find the first end of a stop string after `begin`, and the longest stop string that ends there."""
    for end in range(begin + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Return the longest suffix of `text` that is a proper prefix of a stop string."""
    return max(
        (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0
    )


def random_case(rng: random.Random) -> tuple[str, tuple[str, ...], list[str]]:
    alphabet = rng.choice(["ab", "abc", "aé\n"])
    stops = tuple("".join(rng.choices(alphabet, k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4)))
    text = "".join(rng.choices(alphabet, k=rng.randrange(0, 30)))
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return text, stops, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(("is_included", "has_min_tokens"), [(False, False), (True, False), (False, True)])
def test_any_split_finds_the_stop_that_ends_first_and_holds_back_the_least(
    is_included: bool, has_min_tokens: bool
) -> None:
    """An occurrence before min_tokens is ignored."""
    rng = random.Random(5)
    num_found = 0
    for _ in range(NUM_CASES):
        text, stops, pieces = random_case(rng)
        num_early = rng.randrange(len(pieces) + 1) if has_min_tokens else 0
        expected = brute_force(text, stops, len("".join(pieces[:num_early])))
        finder, shown, stop = MarkerFinder(*stops, is_included=is_included), "", ""
        for index, piece in enumerate(pieces):
            before, stop, rest = finder.feed(piece, may_match=index >= num_early)
            shown += before
            if stop:
                break
            assert not rest
            seen = "".join(pieces[: index + 1])
            assert len(seen) - len(shown) == (0 if is_included else held_back(seen, stops))
        if expected is None:
            assert not stop and shown + finder.finish() == text
        else:
            end, longest = expected
            assert stop == longest
            assert shown == text[: end if is_included else end - len(longest)]
            num_found += 1
    assert 0.2 < num_found / NUM_CASES < 0.9


def all_markers(text: str, markers: tuple[str, ...]) -> list[str]:
    """Return the text split at its markers: text, marker, text, …; brute force."""
    found = brute_force(text, markers)
    if found is None:
        return [text]
    end, marker = found
    return [text[: end - len(marker)], marker, *all_markers(text[end:], markers)]


def test_a_text_is_read_from_marker_to_marker_wherever_it_is_cut() -> None:
    rng = random.Random(7)
    num_markers = 0
    for _ in range(NUM_CASES):
        text, markers, pieces = random_case(rng)
        finder, split = MarkerFinder(*markers), [""]
        for piece in pieces:
            while piece:
                before, marker, piece = finder.feed(piece)
                split[-1] += before
                split += [marker, ""] if marker else []
        split[-1] += finder.finish()
        assert split == all_markers(text, markers)
        num_markers += len(split) // 2
    assert num_markers > NUM_CASES


def test_the_beginning_of_a_marker_at_the_end_is_held_back() -> None:
    assert [split_marker(text, "<a>") for text in (" ", " <", " <a", " <b", "\n<a> <")] == (
        [None, None, None, ("", " <b"), ("\n<a>", " <")]
    )
