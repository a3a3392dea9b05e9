"""A matcher allows exactly the tokens with bytes that can continue a text of its grammar; errors name their place."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from tokenloom.core.features.grammar.compiler import CACHE_BYTES, CACHE_SIZE, GrammarCompiler
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.params.structured_outputs import GrammarKind
from tokenloom.tests.core.features.grammar.matching import COMPILER, DEMO, EOS, TOKENIZER, VOCAB_SIZE, allowed

DECODED = [TOKENIZER.decode([token_id], skip_special_tokens=True) for token_id in range(VOCAB_SIZE)]
TEXTS = ["" if "\ufffd" in text else text for text in DECODED]  # "" for special tokens and parts of characters


def test_choices_allow_their_prefixes_and_nothing_else() -> None:
    choices = ["Paris", "Panama", "Par is", "Rome"]
    matcher, so_far = COMPILER.compile("choice", json.dumps(choices)), ""
    draw = random.Random(0)
    while not matcher.is_complete:
        expected = {
            token_id
            for token_id, text in enumerate(TEXTS)
            if text and any(each.startswith(so_far + text) for each in choices)
        }
        if so_far in choices:
            expected.add(EOS)
        found = set(allowed(matcher))
        rest = [each[len(so_far) :] for each in choices if each.startswith(so_far)]
        is_forced = "" not in rest and len({each[0] for each in rest}) == 1
        assert len(found) == 1 and found <= expected if is_forced else found == expected
        token_id = draw.choice(sorted(found - {EOS}))
        matcher.consume([token_id])
        so_far += TEXTS[token_id]
    assert so_far in choices


@pytest.mark.parametrize("pattern", [r"[ab]{3}", r"(x|yz)*", r"[0-9]+\.[0-9]{2}", r"é+e?"])
def test_an_end_token_is_allowed_exactly_where_the_text_is_complete(pattern: str) -> None:
    draw = random.Random(1)
    for _ in range(20):
        matcher, so_far = COMPILER.compile("regex", pattern), ""
        for _ in range(6):
            found = allowed(matcher)
            assert (EOS in found) == (re.fullmatch(pattern, so_far) is not None), so_far
            choices = sorted(token_id for token_id in found if TEXTS[token_id])
            if not choices or matcher.is_complete:
                break
            token_id = draw.choice(choices)
            matcher.consume([token_id])
            so_far += TEXTS[token_id]
        assert matcher.error is None


def test_tokens_replayed_give_the_same_place() -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 3})
    walked, taken, draw = COMPILER.compile("json", schema), list[int](), random.Random(2)
    for _ in range(30):
        token_id = draw.choice([each for each in allowed(walked) if each != EOS])
        walked.consume([token_id])
        taken.append(token_id)
        replayed = COMPILER.compile("json", schema)
        replayed.consume(taken)
        assert allowed(replayed) == allowed(walked)
        if walked.is_complete:
            break


def test_the_cache_is_bounded() -> None:
    for i in range(CACHE_SIZE + 10):
        COMPILER.compile("regex", f"a{{{i + 1}}}")
    assert len(COMPILER._cache) == CACHE_SIZE


def test_the_cache_is_bounded_by_the_memory_that_its_grammars_took() -> None:
    memory = itertools.count(0, CACHE_BYTES // 8)  # looked at before and after a grammar is compiled
    compiler = GrammarCompiler(DEMO, VOCAB_SIZE, [EOS], resident_bytes=lambda: next(memory))
    for i in range(20):
        compiler.compile("regex", f"a{i}")
        assert len(compiler._cache) == min(i + 1, 8)
    compiler.compile("regex", "a19")
    assert next(memory) == 40 * CACHE_BYTES // 8, "a cached grammar is not compiled again"
    compiler = GrammarCompiler(DEMO, VOCAB_SIZE, [EOS], resident_bytes=itertools.count(0, CACHE_BYTES + 1).__next__)
    assert compiler.compile("regex", "a") and not compiler._cache, "it alone is too large to be kept"


def test_a_token_that_is_not_allowed_is_an_error_and_not_a_completion() -> None:
    matcher = COMPILER.compile("choice", '["Paris"]')
    matcher.consume([5])
    assert matcher.error is not None and not matcher.is_complete


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            "json",
            '{"properties": {"a/b": {"items": {"type": "x"}}}}',
            "json at #/properties/a~1b/items: Invalid type: x",
        ),
        ("json", '{"$defs": {"d": {"enum": "no"}}, "$ref": "#/$defs/d"}', "json at #/$defs/d: "),
        ("json", '{"anyOf": [{}, {"minimum": 3, "maximum": 2, "type": "integer"}]}', ""),
        ("json", '{"type": "string"', "at line 1 column"),
        ("json", '{"$ref": "#"}', "no text of finite length conforms to it"),
        ("json", "3", "Expecting object schema"),
        ("json", "true", ""),
        ("regex", "[z-a]", "invalid character class range"),
        ("regex", r"[^\s\S]", "no text"),
        ("lark", "start: a\na: b", 'at 2(4): unknown name: "b"'),
        ("lark", 'root ::= "a" | foo', "Rule 'foo' not found"),
    ],
)
def test_errors_say_where(kind: GrammarKind, text: str, words: str) -> None:
    if not words:  # one branch is enough, and true allows anything
        COMPILER.compile(kind, text)
        return
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(kind, text)
    assert words in str(caught.value)


def test_a_model_without_tokenizer_json_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, [EOS])


def test_masks_are_as_wide_as_the_larger_of_model_and_tokenizer() -> None:
    assert GrammarCompiler(DEMO, 3000, [EOS]).num_words == -(-3000 // 32)
    assert GrammarCompiler(DEMO, 100, [EOS, 9999]).num_words == VOCAB_SIZE // 32


def test_the_language_of_a_grammar_is_found_in_linear_time() -> None:
    with pytest.raises(RequestError, match="Expected ::="):
        COMPILER.compile("lark", "\n" * 200_000 + "x")
    COMPILER.compile("lark", "\n" * 1000 + ' \tstart : "a"')


@pytest.mark.parametrize("num_choices", [1, 2500, 4096])
def test_each_of_many_choices_can_be_written_to_its_end(num_choices: int) -> None:
    choices = [f"{'é' * (i % 3)}choice {i * 7919}" for i in range(num_choices)]
    start = COMPILER.compile("choice", json.dumps(choices))
    for choice in random.Random(0).sample(choices, min(num_choices, 40)):
        matcher = start.copy()
        for token_id in TOKENIZER.encode(choice, add_special_tokens=False).ids:
            assert token_id in allowed(matcher), choice
            matcher.consume([token_id])
        assert matcher.error is None and matcher.inner.is_accepting()
