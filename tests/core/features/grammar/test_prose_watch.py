"""Prose without masks lets no call through that masks would have forbidden, whatever tokens markers are cut into."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tokenizers

from tokenloom.core.features.grammar.compiler import GrammarCompiler
from tokenloom.core.features.grammar.gate import ConstraintGate
from tokenloom.core.features.grammar.server import GrammarServer
from tokenloom.frontend.server.prompts.marker_tokens import MarkerTokens, is_torn
from tokenloom.frontend.server.text.token_bytes import spellings_of
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.grammar import RESTART, AdvanceGrammars, OpenGrammar
from tokenloom.ipc.params.call_form import CallForm
from tokenloom.ipc.params.calls_constraint import CallsConstraint, markers_in_text
from tokenloom.tests.core.features.grammar.matching import ids_of
from tokenloom.tests.support.engine_specs import in_folder, new_spec
from tokenloom.tests.support.today import seeds

EOS, LENGTH = 0, 250
OBJECT = CallForm(
    kind="object",
    start="<tool_call>\n",
    next="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    name_path=("name",),
    arguments_path=("arguments",),
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"], "additionalProperties": False}
MARKERS = ("<tool_call>", "tt:t", "[TOOL_CALLS]", "aab", "«call»", "<|call|>")
PROSE = ("the <b>tool</b>", " a < b", "<tool_cal", "[TOOL_", "aa", "“«", "é«c", "<|", "\n")


def call_of(marker: str, arguments: str) -> str:
    return f'{marker}\n{{"name": "f", "arguments": {arguments}}}\n</{marker.strip("<>")}>'


def form_of(marker: str) -> CallForm:
    end = f"\n</{marker.strip('<>')}>"
    return msgspec.structs.replace(OBJECT, start=f"{marker}\n", next=f"{end}\n{marker}\n", end=end)


class Vocabulary:
    """All bytes, random cuts of texts that answers hold, and special tokens."""

    def __init__(self, folder: Path, markers: tuple[str, ...], draw: random.Random, more: Sequence[bytes] = ()) -> None:
        """more: further tokens."""
        self.texts = [*PROSE, *(call_of(marker, each) for marker in markers for each in ('{"a": 23}', '{"b": 1}', "1"))]
        cuts = set[bytes]()
        for _ in range(draw.choice([0, 40, 300])):
            text = (draw.choice(PROSE) + draw.choice(self.texts)).encode()
            place = draw.randrange(len(text))
            cuts.add(text[place : place + draw.choice([2, 3, 4, 6, 12])])
        if draw.random() < 0.8:
            cuts = {each for each in cuts if not any(marker.encode() in each[:-1] for marker in markers)}
        pieces = [*(bytes([byte]) for byte in range(256)), *sorted(cuts.union(more))]
        spellings = dict.fromkeys("".join(spellings_of(byte)[1] for byte in piece) for piece in pieces)
        vocab = {"<eos>": EOS} | {spelling: number for number, spelling in enumerate(spellings, 1)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        specials = ["<eos>", *(marker for marker in markers if "|" in marker)]
        backend.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in specials])
        backend.save(str(folder / "tokenizer.json"))
        self.tokenizer = Tokenizer.from_backend(backend, {})
        self.pieces = [b"<eos>", *dict.fromkeys(pieces), *(each.encode() for each in specials[1:])]

    @property
    def size(self) -> int:
        return len(self.pieces)


class Answer:
    """A random answer, as a core lets a model write it: masks apply to the parts that a gate finds."""

    def __init__(
        self, vocabulary: Vocabulary, folder: Path, constraint: str, triggers: bytes, draw: random.Random
    ) -> None:
        spec = new_spec(vocab_size=vocabulary.size)
        model = msgspec.structs.replace(spec.model, eos_token_ids=[EOS])
        self._spec = in_folder(spec, folder, tokenizer_folder=str(folder), model=model)
        self._vocabulary, self._text, self._draw = vocabulary, constraint, draw
        self._triggers = frozenset(decode_ids(triggers).tolist())
        self._compiler = GrammarCompiler(folder, vocabulary.size, [EOS])
        self._full = self._compiler.compile("calls", constraint)  # the grammar of the whole answer: an oracle
        self._gate = ConstraintGate((), self._triggers)
        self._pending: list[int] = []
        self._goal = self._torn = b""
        self.outputs: list[int] = []
        self.num_free = self.num_masked = self.num_left = self.num_calls = 0
        self._open(GrammarServer(self._spec))

    def _open(self, server: GrammarServer) -> None:
        """Let another helper read the answer so far."""
        self._server, self._pending = server, []
        while True:
            known = [] if self._gate.start is None else self.outputs[self._gate.start :]
            order = OpenGrammar(grammar_id=1, kind="calls", text=self._text, token_ids=encode_ids(known), repeats=True)
            opened = self._server.open(1, self._server.compile(order))
            assert opened.error is None, opened.error
            if not opened.is_complete:
                return
            assert self._gate.start is not None
            self._leave(self._gate.start + opened.num_tokens)

    def _leave(self, end: int) -> None:
        self._gate.leave(end)
        self._gate.enter(np.array(self.outputs, np.int32), end)

    def lose(self, *, with_core: bool) -> None:
        """Lose the helper, and perhaps the core, whose successor has the tokens alone."""
        if with_core:
            self._gate = ConstraintGate((), self._triggers)
            self._gate.enter(np.array(self.outputs, np.int32), 0)
        self._open(GrammarServer(self._spec))

    def write(self) -> bool:
        """Write one token; return False at the answer's end."""
        allowed = list(range(self._vocabulary.size))
        if not self._gate.is_free:
            words = self.mask()
            if words is None:
                self.num_left += not self._holds_call()
                self._leave(len(self.outputs))
                return True
            allowed = ids_of(words)
            expected = np.zeros(self._compiler.num_words, np.uint32)
            self._full.fill(expected)
            assert allowed == [each for each in ids_of(expected) if each < self._vocabulary.size]
        token_id = self._choose(allowed)
        if token_id == EOS:
            return False
        self._full.consume([token_id])
        assert self._full.error is None, (b"".join(map(self._vocabulary.pieces.__getitem__, self.outputs)), token_id)
        if self._full.is_complete:
            self._full = self._compiler.compile("calls", self._text)
            self.num_calls += 1
        self.give(token_id)
        return len(self.outputs) < LENGTH

    def mask(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]] | None:
        """Return the mask of the next token; None if the text has left its constrained part."""
        ids, self._pending = self._pending, []
        reply = self._server.advance(
            AdvanceGrammars(
                grammar_ids=encode_ids([1] * len(ids)),
                token_ids=encode_ids(ids),
                serial=1,
                mask_ids=encode_ids([1]),
            )
        )
        assert not reply.failures, reply.failures
        return None if decode_ids(reply.complete_ids) else np.frombuffer(reply.bits, np.uint32)

    def _choose(self, allowed: list[int]) -> int:
        """Return a token, mostly one with which a text goes on that may become a call."""
        if not self._goal:
            self._goal = self._draw.choice(self._vocabulary.texts).encode()
        pieces = self._vocabulary.pieces
        allowed = [each for each in allowed if self._fits(pieces[each])]
        going_on = [each for each in allowed if each != EOS and self._goal.startswith(pieces[each])]
        if going_on and self._draw.random() < 0.97:
            token_id = self._draw.choice(going_on)
            self._goal = self._goal[len(pieces[token_id]) :]
            return token_id
        self._goal = b""
        return self._draw.choice([each for each in allowed if each != EOS] if self._gate.is_free else allowed)

    def _fits(self, piece: bytes) -> bool:
        """Whether a token leaves no torn character behind: masks of prose allow none, and no half of a pair (ED A0)."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        decoder.setstate((self._torn, 0))
        try:
            decoder.decode(piece)
        except UnicodeDecodeError:
            return False
        return b"\xed" not in piece

    def give(self, token_id: int) -> None:
        """Add a token to the answer."""
        self.outputs.append(token_id)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.setstate((self._torn, 0))
        decoder.decode(self._vocabulary.pieces[token_id])
        self._torn = decoder.getstate()[0]
        if not self._gate.is_free:
            self.num_masked += 1
            self._pending.append(token_id)
            return
        self.num_free += 1
        if token_id in self._gate.last_ids and self._gate.enter(np.array(self.outputs), len(self.outputs) - 1):
            self._pending = [RESTART, *self.outputs[self._gate.start :]]

    def _holds_call(self) -> bool:
        return b'"name"' in b"".join(map(self._vocabulary.pieces.__getitem__, self.outputs[self._gate.start :]))


def leads(piece: bytes, markers: tuple[str, ...]) -> bool:
    """Whether a token ends with the begin of a marker, or with all of it."""
    data = [marker.encode() for marker in markers]
    return any(piece.endswith(each[:length]) for each in data for length in range(1, len(each) + 1))


@pytest.mark.parametrize("seed", seeds(5, 295))
def test_no_call_comes_that_masks_would_have_forbidden(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    markers = tuple(draw.sample(MARKERS, draw.choice([1, 1, 2])))
    vocabulary = Vocabulary(tmp_path, markers, draw)
    forms = [form_of(marker) for marker in markers]
    tools = {"f": SCHEMA, "g": None}
    constraint = CallsConstraint(
        form=forms[0], others=tuple(forms[1:]), tools=tools, has_text=True, has_one_call=draw.random() < 0.8
    ).to_text()
    assert markers_in_text(constraint, vocabulary.tokenizer.added_ids) == markers
    triggers = MarkerTokens(vocabulary.tokenizer).leading_to(markers)
    holding = [piece for piece in vocabulary.pieces if any(marker.encode() in piece for marker in markers)]
    if any(is_torn(piece) or not piece.endswith(tuple(map(str.encode, markers))) for piece in holding):
        assert not triggers, "a token goes on behind a marker, so that all prose needs masks"
        return
    assert set(decode_ids(triggers)) == {i for i, piece in enumerate(vocabulary.pieces) if leads(piece, markers)}
    answer = Answer(vocabulary, tmp_path, constraint, triggers, draw)
    while answer.write():
        if draw.random() < 0.04:
            answer.lose(with_core=draw.random() < 0.5)
    assert answer.num_free


@pytest.mark.parametrize("begin", [b"<", b"\x9c<", b" a<tool"])
def test_a_part_begins_with_any_token_that_a_marker_may_begin_in(begin: bytes, tmp_path: Path) -> None:
    draw = random.Random(1)
    vocabulary = Vocabulary(tmp_path, MARKERS[:1], draw, [begin])
    constraint = CallsConstraint(form=OBJECT, tools={"f": SCHEMA}, has_text=True).to_text()
    triggers = MarkerTokens(vocabulary.tokenizer).leading_to(MARKERS[:1])
    answer = Answer(vocabulary, tmp_path, constraint, triggers, draw)
    answer.give(vocabulary.pieces.index(begin))
    spelled = OBJECT.start.encode()[len(begin.split(b"<")[1]) + 1 :]
    for number, byte in enumerate(spelled):
        words = answer.mask()
        assert words is not None and vocabulary.pieces.index(bytes([byte])) in ids_of(words)
        assert (ids_of(words) == [1 + byte]) == (number >= spelled.index(b"\n"[0])), (
            "behind the marker there is no choice"
        )
        answer.give(1 + byte)
    answer = Answer(vocabulary, tmp_path, constraint, triggers, draw)
    for piece in (begin, b"b"):
        answer.give(vocabulary.pieces.index(piece))
        assert (answer.mask() is None) == (piece == b"b"), "prose goes on without masks"
