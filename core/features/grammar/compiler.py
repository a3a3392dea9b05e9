"""GrammarCompiler: compiles the text of a grammar to a matcher, which makes masks of the allowed next tokens.

The library is llguidance 1.9. Compared with xgrammar 0.2.8 over six schemas and 49,152 tokens in one thread
(scripts/checkpoints/compare_grammars.py): it compiles in 0.5 to 17 ms, xgrammar in 28 ms to 7.2 s; a median mask takes
5 to 184 µs against 5 to 1,048 µs; the longest take 12 and 18 ms. llguidance limits the cost of a grammar by its "fuel",
and is imported in 40 ms without torch, which xgrammar needs and the core must not import.

Knows texts, tokens and bits; no request, no step and no process. Its calls release the GIL and may come from several
threads; a matcher belongs to one thread at a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from ....ipc.errors import RequestError
from ....ipc.params.calls_constraint import CallsConstraint, markers_in_text
from ....ipc.params.json_schema import subschemas
from ....ipc.params.structured_outputs import AnswerGrammar, GrammarKind, ThoughtEdges
from ....ipc.params.text_markers import TextMarkers
from .calls.call_rules import CallRules
from .calls.lark_rules import LarkRules
from .calls.own_thought import behind_own_thought
from .prose_watch import ProseWatch
from .schemas.finite_schema import FiniteSchema
from .schemas.json_schema import adapted
from .schemas.schema import Schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CACHE_SIZE = 64  # compiled grammars
CACHE_BYTES = 512 << 20  # of compiled grammars; one may take 10 MB, or 200
MAX_ROW_ITEMS = 8000  # parser items for one token: 4 for each property that may be absent, 1 for each alternative
MAX_STEP_ITEMS = 200_000
MAX_ERROR_CHARACTERS = 1000
MAX_LOCATE_TRIES = 200  # parts of a bad schema that are compiled alone to find where it is wrong
MAX_LOCATE_S = 0.3  # of CPU, for that
# A space, or a line break with its indent. Without a bound, whitespace need never end.
JSON_OPTIONS: dict[GrammarKind, JsonCompileOptions] = {
    "json": {"whitespace_pattern": r" |\n( {0,32}|\t{0,8})"},
    "compact_json": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
}

# A rule `start` or an option of Lark; without one the grammar is llama.cpp's. Reads each line once, even if many are
# empty.
_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)

Words = npt.NDArray[np.uint32]


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Matcher:
    """The position of one text in a grammar. `error` is set when a token is refused or a limit of the library is
    reached. With a `watch` the text may leave the grammar before its end: that completes it, too."""

    def __init__(self, inner: LLMatcher, watch: ProseWatch | None = None) -> None:
        self.inner = inner
        self._watch = watch
        self.start: Matcher | None = None  # a copy at the grammar's start, if the grammar repeats
        self.num_resumed = 0  # tokens of a resumed answer that it took

    def let_repeat(self, watch: ProseWatch | None) -> None:
        """Let the grammar repeat, at whose start this is. watch: finds where the text leaves it; None: nowhere."""
        self._watch = watch
        self.start = self.copy()

    def consume_to_end(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens, up to one that completes the grammar or has no place in it; return how many these are.
        Prose in which the text has left the grammar is read on, up to where a call may begin again."""
        for count, token_id in enumerate(token_ids, 1):
            if self._watch is not None and self._watch.has_left:
                if not self._watch.begins(token_id):
                    continue
                assert self.start is not None, "only a grammar that repeats is watched"
                begun = self.start.copy()
                self.inner, self._watch = begun.inner, begun._watch
            self.consume([token_id])
            if self.inner.is_stopped():
                return count
        return len(token_ids)

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.inner.consume_tokens([token_id] if self._watch is None else list(self._watch.take(token_id)))

    def fill(self, words: Words) -> None:
        """Write the mask of the allowed next tokens. words: one bit per token of the compiler's vocabulary,
        contiguous."""
        self.fill_at(words.ctypes.data, words.nbytes)

    def fill_at(self, address: int, num_bytes: int) -> None:
        """Write the mask to memory at `address`. For callers that keep the address of an array: computing it takes as
        long as a small mask."""
        self.inner.unsafe_compute_mask_ptr(address, num_bytes)

    @property
    def has_stopped(self) -> bool:
        """Whether the grammar is complete or has an error."""
        return self.inner.is_stopped() or (self._watch is not None and self._watch.has_left)

    @property
    def is_complete(self) -> bool:
        """Whether the grammar is complete: only an end token can follow, or other prose if it is watched."""
        return self.has_stopped and not self.inner.is_error()

    @property
    def error(self) -> str | None:
        return _trimmed(self.inner.get_error()) if self.inner.is_error() else None

    def copy(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self._watch and dataclasses.replace(self._watch))


class GrammarCompiler:
    """Owner of the vocabulary, as bytes, and of the grammars compiled last. `num_words`: 32-bit words of a mask."""

    def __init__(
        self,
        tokenizer_folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        cache_size: int = CACHE_SIZE,
        resident_bytes: Callable[[], int] = resident_bytes,
    ) -> None:
        """Read the vocabulary; RequestError if the folder has no tokenizer.json with the bytes of each token."""
        self._tokenizer, self._special_ids = _load_tokenizer(tokenizer_folder, vocab_size, eos_token_ids)
        self.num_words = -(-self._tokenizer.vocab_size // 32)
        self._limits = LLParserLimits(
            verbose_errors=False, max_items_in_row=MAX_ROW_ITEMS, step_max_items=MAX_STEP_ITEMS
        )
        self._cache_size = cache_size
        self._resident_bytes = resident_bytes
        self._cache: OrderedDict[tuple[GrammarKind, str], tuple[Matcher, int]] = OrderedDict()  # with its bytes, about
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def compile(self, kind: GrammarKind, text: str) -> Matcher:
        """Return a new matcher at the grammar's start; compiled grammars are cached. RequestError for a bad grammar."""
        with self._lock:
            known = self._cache.get((kind, text))
            if known is not None:
                self._cache.move_to_end((kind, text))
                return known[0].copy()
        num_bytes = self._resident_bytes()
        answer = AnswerGrammar.of(kind, text)
        inner = self._compile(answer)
        if inner.is_error():
            reason = _trimmed(inner.get_error())
            where = self._locate(answer.text, reason) if answer.kind in JSON_OPTIONS else ""
            raise RequestError(f"structured_outputs.{_FIELD_BY_KIND[answer.kind]}{where}: {reason}")
        matcher = Matcher(inner)
        self._warm(matcher, answer.kind)
        self._keep((kind, text), matcher, max(0, self._resident_bytes() - num_bytes))
        return matcher.copy()

    def watch(self, kind: GrammarKind, text: str) -> ProseWatch | None:
        """Return a watch for the constrained parts of prose; None if the grammar is not of calls in prose, or if these
        may begin anywhere."""
        markers = markers_in_text(text, self._special_ids) if kind == "calls" else ()
        if not markers:
            return None
        return ProseWatch(TextMarkers(markers), self._bytes_of, self._tokenizer.tokenize_bytes)

    def _bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.decode_bytes([token_id])

    def _keep(self, key: tuple[GrammarKind, str], matcher: Matcher, num_bytes: int) -> None:
        """Add a matcher to the cache and drop the oldest ones. num_bytes: the size of the matcher, about, measured as
        the growth of the process."""
        with self._lock:
            _, old_bytes = self._cache.pop(key, (None, 0))  # of another thread, which compiled it, too
            self._cache[key] = matcher, num_bytes
            self._cached_bytes += num_bytes - old_bytes
            while self._cache and (len(self._cache) > self._cache_size or self._cached_bytes > CACHE_BYTES):
                _, (_, old_bytes) = self._cache.popitem(last=False)
                self._cached_bytes -= old_bytes

    def _compile(self, answer: AnswerGrammar) -> LLMatcher:
        try:
            if (options := JSON_OPTIONS.get(answer.kind)) is not None:
                return self._compile_schema(answer.text, options, answer.thought)
            if answer.kind == "calls":
                return self._compile_calls(CallsConstraint.from_text(answer.text))
            return self._matcher(_to_llguidance(answer.kind, answer.text), answer.thought)
        except RequestError:
            raise
        except Exception as error:  # the converters raise any kind of exception
            raise RequestError(f"structured_outputs.{_FIELD_BY_KIND[answer.kind]}: {_trimmed(str(error))}") from None

    def _compile_schema(self, text: str, options: JsonCompileOptions, thought: ThoughtEdges | None) -> LLMatcher:
        """Compile a schema, behind a thought if one may come. If it allows numbers beyond float64, or the library would
        round its numbers, compile it as a Lark grammar or, if that fails, with narrower bounds."""
        schema = _adapted(text)
        if isinstance(schema, str):
            return self._matcher(LLMatcher.grammar_from_json_schema(schema, overrides=options), thought)
        lark = FiniteSchema(schema, options)
        outline = lark.outline() if lark.is_needed else schema
        inner = self._matcher(LLMatcher.grammar_from_json_schema(_quote(outline), overrides=options), thought)
        if not lark.is_needed or inner.is_error():
            return inner
        if (exact := lark.text()) is not None:
            inner = self._matcher(LLMatcher.grammar_from_lark(exact), thought)
            if not inner.is_error():
                return inner
        narrowed = _quote(lark.narrowed())
        return self._matcher(LLMatcher.grammar_from_json_schema(narrowed, overrides=options), thought)

    def _compile_calls(self, constraint: CallsConstraint) -> LLMatcher:
        """Compile calls in a model's own form; with narrower bounds if exact numbers make the grammar too large.
        RequestError, with the tool's name, for a schema that the library refuses by itself."""
        for is_exact in (True, False):
            grammar = CallRules(constraint, self._new_rules(), is_exact=is_exact).text()
            inner = self._matcher(LLMatcher.grammar_from_lark(grammar))
            if not inner.is_error():
                return inner
        for name, schema in constraint.tools.items():  # which of them is it?
            try:
                self.compile("json", json.dumps({"type": "object"} | (schema or {})))
            except RequestError as error:
                raise RequestError(f"{error} (of the tool {name!r:.80})") from None
        return inner

    def _new_rules(self) -> LarkRules:
        return LarkRules(self._special_ids, self._tokenizer.eos_tokens)

    def _matcher(self, grammar: str, thought: ThoughtEdges | None = None) -> LLMatcher:
        if thought is not None:
            grammar = behind_own_thought(self._new_rules(), thought, grammar)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _warm(self, matcher: Matcher, kind: GrammarKind) -> None:
        """Make the first mask, which fills the lexer's tables. RequestError if that fails or allows no token at all."""
        words = np.zeros(self.num_words, np.uint32)
        matcher.fill(words)
        if matcher.error is not None or not words.any():
            reason = matcher.error or "no text conforms to it"
            raise RequestError(f"structured_outputs.{_FIELD_BY_KIND[kind]}: {reason}")

    def _locate(self, text: str, reason: str) -> str:
        """Return " at #POINTER" of the smallest part of a schema that fails alone for the same reason, with " or below"
        added if MAX_LOCATE_TRIES or MAX_LOCATE_S did not suffice; "" if unknown."""
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            return ""
        pointer, budget, begun_at = "", MAX_LOCATE_TRIES, time.thread_time()
        while True:
            for step, part in subschemas(schema):
                budget -= 1
                if budget < 0 or time.thread_time() - begun_at > MAX_LOCATE_S:
                    return f" at #{pointer} or below" if pointer else ""
                if self._reason_against(part) == reason:
                    pointer, schema = pointer + step, part
                    break
            else:
                return f" at #{pointer}" if pointer else ""

    def _reason_against(self, schema: object) -> str | None:
        """Return why a schema does not compile; None if it does."""
        try:
            inner = self._compile(AnswerGrammar(kind="json", text=json.dumps(schema)))
        except RequestError as error:
            return str(error)
        return _trimmed(inner.get_error()) if inner.is_error() else None


_FIELD_BY_KIND: dict[GrammarKind, str] = {
    **dict.fromkeys(("json", "compact_json"), "json"),
    "regex": "regex",
    "choice": "choice",
    "lark": "grammar",
    "calls": "calls",
}


def _to_llguidance(kind: GrammarKind, text: str) -> str:
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "choice":
        choices = " | ".join(_quote(each) for each in json.loads(text))  # one terminal: rules are limited in number
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
    return str(LLMatcher.grammar_from_lark(text if _LARK.search(text) else gbnf_to_lark(text)))


def _adapted(text: str) -> Schema | str:
    """Translate the text of a schema for the library. Text that is not a schema is returned as it is: the library
    reports the error. RequestError as in `adapted`."""
    try:
        schema = json.loads(text)
        if schema is True:
            return {}  # options apply to objects alone
        return adapted(schema) if isinstance(schema, dict) else text
    except RequestError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text


def _quote(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _trimmed(error: str) -> str:
    """Return an error of the library without the parser's state and empty lines, cut to MAX_ERROR_CHARACTERS."""
    lines = [line.rstrip() for line in error.split("<state>")[0].replace("<non-verbose/>", "").splitlines()]
    text = "\n".join(line for line in lines if line)
    text = {"NoExtensionBias": "no text of finite length conforms to it"}.get(text, text)
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + " …"


def _load_tokenizer(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> tuple[LLTokenizer, dict[str, int]]:
    """Return the tokenizer, and the ids of its special tokens by their texts."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise RequestError(f"structured_outputs needs a tokenizer.json and {folder} has none: serve a model that has")
    text = path.read_text(encoding="utf-8")
    try:
        size = max(LLTokenizer(text).vocab_size, vocab_size)
        eos = [token_id for token_id in eos_token_ids if token_id < size]
        tokenizer = LLTokenizer(text, n_vocab=size, eos_token=eos or None)
    except ValueError as error:
        raise RequestError(f"structured_outputs cannot be served with {path}: {_trimmed(str(error))}") from None
    added = json.loads(text).get("added_tokens") or []
    return tokenizer, {each["content"]: each["id"] for each in added if tokenizer.is_special_token(each["id"])}
