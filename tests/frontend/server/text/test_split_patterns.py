"""No tokenizer takes the square of a text's length to split it, and linear expressions split as the published ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
from tokenizers import Regex, Tokenizer, models
from tokenizers.pre_tokenizers import Sequence, Split

from tokenloom.frontend.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from tokenloom.frontend.server.text.tokenizer import LINEAR, make_splits_linear
from tokenloom.frontend.server.text.tokenizer import Tokenizer as OurTokenizer
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.bounds.growth import fast_growth

UNITS = ("a", "A", "1", " ", "\n", "\t", ".", "'", "\u0301", "中", "가", "😀", "\u0378", "ﷺ", "/", "’", "\u200b")
TAILS = ("", "a", "1", "!")
FORMS = {form.splits: name for name, form in PRE_TOKENIZERS.items()}


def split_by(*patterns: str) -> Sequence:
    return Sequence([Split(Regex(each), "isolated") for each in patterns])


def linear(*patterns: str) -> Sequence:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = split_by(*patterns)
    make_splits_linear(backend)
    return backend.pre_tokenizer


@pytest.mark.parametrize("before", [(), (r"\p{N}+",), (r"[\r\n]",)])
@pytest.mark.parametrize("pattern", LINEAR)
def test_a_linear_expression_splits_as_the_one_that_it_replaces(pattern: str, before: tuple[str, ...]) -> None:
    theirs, ours, rng = split_by(*before, pattern), linear(*before, pattern), random.Random(pattern)
    assert LINEAR[pattern] != pattern
    for _ in range(3000):
        text = "".join(rng.choices("0123456789٣½²ab_ \t\n\u00a0.,", k=rng.randrange(1, 24)))
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize("name", FORMS.values())
def test_a_text_of_any_characters_is_split_in_time_in_proportion_to_its_length(name: str) -> None:
    splitter = linear(*PRE_TOKENIZERS[name].splits)

    def splitting(unit: str, tail: str, size: int) -> Callable[[], object]:
        return partial(splitter.pre_tokenize_str, unit * (size // len(unit)) + tail)

    for unit, tail in product(UNITS, TAILS):
        slow = fast_growth(partial(splitting, unit, tail), (2048,), quick_s=0.01)
        assert not slow, f"{name}: {unit!r} and {tail!r}: {slow}"


def test_a_library_that_panics_refuses_the_text_alone() -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = split_by("(?:1|11)+2")
    with pytest.raises(RequestError, match=r"a text of 64 characters cannot be tokenized: .*retry-limit"):
        OurTokenizer.from_backend(backend, {}).encode("1" * 64)
