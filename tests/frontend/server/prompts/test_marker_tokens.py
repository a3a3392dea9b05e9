"""The tokens with which a marker may begin are those that a look at each token's text finds."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from tokenloom.frontend.server.prompts.marker_tokens import MAX_MARKERS, MarkerTokens
from tokenloom.frontend.server.text.pieces import PieceTable, find_probe
from tokenloom.frontend.server.text.token_texts import TokenTexts
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.codec import decode_ids
from tokenloom.tests.frontend.server.text.samples import KINDS, new_tokenizer


def texts_of(tokenizer: Tokenizer) -> list[bytes]:
    texts = TokenTexts(PieceTable(tokenizer, find_probe(tokenizer), frozenset()))
    return [texts.bytes_of(token_id) for token_id in range(tokenizer.size)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unigram"])
@pytest.mark.parametrize("markers", [("<tool_call>",), ("capitals",), ("«x", "F(x)"), ("漢x",), ("<|user|>",)])
def test_triggers_are_the_tokens_that_end_with_the_begin_of_a_marker(kind: str, markers: tuple[str, ...]) -> None:
    tokenizer = new_tokenizer(kind)
    found = list(decode_ids(MarkerTokens(tokenizer).leading_to(markers)))
    begins = tuple(marker.encode()[:length] for marker in markers for length in range(1, len(marker.encode()) + 1))
    expected = [token_id for token_id, text in enumerate(texts_of(tokenizer)) if text.endswith(begins)]
    assert found == expected or not found, kind
    assert found or kind == "word_piece" or not expected


@pytest.mark.parametrize(("more", "has_triggers"), [("x<call>", True), ("<call>x", False), ("<call><call>", False)])
def test_a_token_that_goes_on_behind_a_marker_leaves_none(more: str, *, has_triggers: bool) -> None:
    tokenizer = new_tokenizer("byte_level")
    assert tokenizer.backend is not None
    tokenizer.backend.add_tokens([AddedToken(more, normalized=False)])
    assert bool(MarkerTokens(tokenizer).leading_to(("<call>",))) == has_triggers


def test_only_the_last_markers_are_kept() -> None:
    tokens = MarkerTokens(new_tokenizer("byte_level"))
    for number in range(3 * MAX_MARKERS):
        assert tokens.leading_to((f"<{number}>",))
    assert len(tokens._found) == MAX_MARKERS
