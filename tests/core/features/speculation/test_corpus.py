"""The corpus finds what an owner's answers said, never another owner's, and never grows."""

from __future__ import annotations

import numpy as np
import pytest

from tokenloom.core.features.speculation.corpus import Corpus
from tokenloom.core.features.speculation.ngrams import hashes_at
from tokenloom.core.features.speculation.own_index import Match

rng = np.random.default_rng(0)


def tokens(count: int, vocab_size: int = 1000) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return rng.integers(0, vocab_size, count).astype(np.int32)


def find(corpus: Corpus, owner: bytes, text: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Match | None:
    hashes = hashes_at(text, np.array([len(text)]))[:, 0]
    return corpus.find(owner, text, len(text), hashes, 6)


def test_an_answer_is_found_by_its_owner_alone() -> None:
    corpus, answer, other = Corpus(10_000), tokens(300), tokens(300)
    corpus.add(b"x", answer)
    corpus.add(b"y", other)
    text = np.concatenate([tokens(20), answer[100:120]])
    found = find(corpus, b"x", text)
    assert found is not None and (found.source, found.length) == ("corpus", 20)
    assert found.token_ids == answer[120:126].tolist()
    assert find(corpus, b"y", text) is None and find(corpus, b"z", text) is None
    assert corpus.num_matches == 1


def test_owners_with_equal_answers_never_share_a_match() -> None:
    """Whatever the order and the size of the ring: each continuation is that of the asker's own answer."""
    corpus, common = Corpus(600), tokens(40, 50)
    last = dict[bytes, int]()
    for step in range(300):
        owner = b"%d" % (step % 7)
        last[owner] = 10_000 + step % 7 * 1000 + step
        corpus.add(owner, np.append(common, [last[owner]] * 3).astype(np.int32))
        for asker in (b"%d" % each for each in range(7)):
            found = find(corpus, asker, common)
            if found is not None:
                assert {each // 1000 for each in found.token_ids} == {10 + int(asker)}
        mine = find(corpus, owner, common)
        assert mine is not None and mine.token_ids[0] == last[owner]


def test_the_ring_stays_within_its_bytes_and_forgets_the_oldest() -> None:
    corpus = Corpus(2000)
    num_bytes, first = corpus.num_bytes, tokens(100)
    corpus.add(b"first", first)
    for number in range(200):
        corpus.add(b"%d" % number, tokens(int(rng.integers(1, 1500))))
        assert corpus.num_bytes == num_bytes and corpus.num_tokens <= 2000
        assert corpus.num_owners < 2000
    assert find(corpus, b"first", np.concatenate([tokens(9), first[:50]])) is None
    assert corpus.num_owners < 150


@pytest.mark.parametrize("count", [0, 1, 8, 9])
def test_short_answers_and_texts_find_nothing(count: int) -> None:
    corpus, answer = Corpus(100), tokens(count)
    corpus.add(b"x", answer)
    assert corpus.find(b"x", answer, count, np.zeros(4, np.uint64), 3) is None
