"""GrammarServer: holds the position of each answer in its grammar, and makes the masks of all of them together.

It runs in a process of its own (process.py) or inside the in-process engine. `compile` and `prove` may run in any
thread; all else belongs to one thread. Knows messages, no socket.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import numpy as np
from llguidance import LLExecutor

from ....ipc.codec import decode_ids, encode_ids
from ....ipc.errors import ErrorInfo, RequestError, error_info
from ....ipc.messages.grammar import (
    RESTART,
    AdvanceGrammars,
    GrammarFailure,
    GrammarOpened,
    GrammarsAdvanced,
    OpenGrammar,
)
from ....ipc.spec.config.engine_spec import EngineSpec
from .compiler import CACHE_SIZE, GrammarCompiler, Matcher, Words
from .cursor import MASK_S, MAX_OVERTIME_S, GrammarCursor

PROOF_TOKENS = 32  # tokens of the random walk by which a grammar is tried
PROOF_S = 0.5  # CPU time for that walk
SHARE_S = 0.001  # CPU time for a mask among many that are made together
PARALLEL_FROM = 1 << 17  # bits of masks in a step: with fewer, one thread is done before others wake


class GrammarServer:
    """Owner of the compiler, which is made at its first use, and of the cursor of each answer."""

    def __init__(
        self,
        spec: EngineSpec,
        cache_size: int = CACHE_SIZE,
        thread_time: Callable[[], float] = time.thread_time,
        process_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._spec, self._cache_size = spec, cache_size
        self._thread_time, self._process_time = thread_time, process_time
        self._num_words = -(-spec.model.vocab_size // 32)
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = Lock()
        self._answer_by_id: dict[int, GrammarCursor] = {}
        self._executor = LLExecutor(max(1, min((os.cpu_count() or 1) // 2, 8)))

    def prepare(self) -> None:
        """Read the vocabulary now. If that fails, do not raise: each `compile` returns the error."""
        with contextlib.suppress(RequestError):
            self._shared_compiler()

    def compile(self, message: OpenGrammar) -> Matcher | ErrorInfo:
        """Compile a grammar; return its matcher, advanced by the answer's tokens, or the error."""
        try:
            matcher = self._shared_compiler().compile(message.kind, message.text)
        except RequestError as error:
            return error_info(error)
        if message.repeats:
            matcher.let_repeat(self._shared_compiler().watch(message.kind, message.text))
        matcher.num_resumed = matcher.consume_to_end(decode_ids(message.token_ids))
        if matcher.error is not None:
            return error_info(RequestError(f"the tokens of this resumed request leave its grammar: {matcher.error}"))
        return matcher

    def prove(self, message: OpenGrammar) -> Matcher | ErrorInfo:
        """Compile a grammar and make the masks of a short walk through it. Return its matcher, or the error if that
        fails or the masks take too long, so that the request is refused before its answer starts."""
        matcher = self.compile(message)
        if isinstance(matcher, ErrorInfo):
            return matcher
        words, draw = np.zeros(self._shared_compiler().num_words, np.uint32), random.Random(0)
        cursor = GrammarCursor(matcher, self._spec.model.vocab_size)
        begun_at = self._thread_time()
        for _ in range(PROOF_TOKENS):
            mask_at = self._thread_time()
            matcher.fill(words)
            cursor.spend(self._thread_time() - mask_at, 1)
            if cursor.is_too_slow:
                return error_info(RequestError(f"structured_outputs: {_too_slow(cursor)}"))
            if matcher.error is not None:
                return error_info(RequestError(f"structured_outputs: {matcher.error}"))
            if matcher.has_stopped or not words.any() or self._thread_time() - begun_at > PROOF_S:
                break
            matcher.consume([_any_token(words, draw)])
        return matcher

    def _shared_compiler(self) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                model = self._spec.model
                folder = Path(self._spec.tokenizer_folder)
                self._compiler = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids, self._cache_size)
            return self._compiler

    def open(self, grammar_id: int, compiled: Matcher | ErrorInfo) -> GrammarOpened:
        """Add a cursor for the result of `compile`, unless that is an error or complete; return the answer to the
        core."""
        if isinstance(compiled, ErrorInfo):
            return GrammarOpened(grammar_id=grammar_id, error=compiled)
        if compiled.is_complete:
            return GrammarOpened(grammar_id=grammar_id, is_complete=True, num_tokens=compiled.num_resumed)
        self._answer_by_id[grammar_id] = GrammarCursor(compiled, self._spec.model.vocab_size, self._thread_time)
        return GrammarOpened(grammar_id=grammar_id)

    def close(self, grammar_ids: list[int]) -> None:
        for grammar_id in grammar_ids:
            self._answer_by_id.pop(grammar_id, None)

    def advance(self, message: AdvanceGrammars) -> GrammarsAdvanced:
        """Advance the cursors and make the masks that a message orders; return the answer to the core. Skip closed
        grammars; close those that fail or are complete, unless they repeat."""
        failures: list[GrammarFailure] = []
        complete: list[int] = []
        for grammar_id, token_id in zip(decode_ids(message.grammar_ids), decode_ids(message.token_ids), strict=True):
            answer = self._answer_by_id.get(grammar_id)
            if answer is not None and token_id == RESTART:
                answer.restart()
                continue
            if answer is None or answer.is_complete:
                continue
            begun_at = self._thread_time()
            answer.take(token_id)
            answer.spend(self._thread_time() - begun_at, 0)
            if not answer.has_stopped:
                continue
            if answer.error is not None:
                failures.append(self._fail(grammar_id, answer.error))
            else:
                complete.append(grammar_id)
                if not answer.repeats:
                    self.close([grammar_id])
        open_ids = {grammar_id for grammar_id, answer in self._answer_by_id.items() if not answer.is_complete}
        mask_ids = [grammar_id for grammar_id in decode_ids(message.mask_ids) if grammar_id in open_ids]
        answers = [self._answer_by_id[grammar_id] for grammar_id in mask_ids]
        masks = self._masks(answers)
        bits = masks[:, : self._num_words]
        is_good = np.count_nonzero(bits, axis=1) > 0
        for i, answer in enumerate(answers):
            if answer.has_stopped or answer.is_too_slow or not is_good[i]:
                is_good[i] = False
                reason = _too_slow(answer) if answer.is_too_slow else "no token can follow"
                failures.append(self._fail(mask_ids[i], answer.error or reason))
        good = np.flatnonzero(is_good).tolist()
        bits, mask_counts = (bits if is_good.all() else bits[is_good]), b""
        if message.draft_counts:
            drafts_by_id = _drafts_by_id(message)
            more = [self._draft_masks(answers[i], masks[i], drafts_by_id.get(mask_ids[i], [])) for i in good]
            parts = [
                words[None, : self._num_words]
                for i, after in zip(good, more, strict=True)
                for words in (masks[i], *after)
            ]
            bits = np.concatenate(parts) if parts else bits
            mask_counts = encode_ids(1 + len(after) for after in more)
        return GrammarsAdvanced(
            serial=message.serial,
            mask_ids=encode_ids(mask_ids[i] for i in good),
            mask_counts=mask_counts,
            bits=bits.tobytes(),
            jump_counts=encode_ids(len(answers[i].ahead) for i in good),
            jump_ids=encode_ids(token_id for i in good for token_id in answers[i].ahead),
            complete_ids=encode_ids(complete),
            failures=failures,
        )

    def _masks(self, answers: list[GrammarCursor]) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
        """Return the masks of the answers' next tokens: [n, words of the compiler], which may be more words than the
        model's vocabulary needs. Count their CPU time in the cursors."""
        if not answers:
            return np.zeros((0, self._num_words), np.uint32)
        width = self._shared_compiler().num_words
        words = np.zeros((len(answers), width), np.uint32)
        address, num_bytes = words.ctypes.data, 4 * width
        unmasked = [(matcher, i) for i, answer in enumerate(answers) if (matcher := answer.unmasked) is not None]
        alone, together = unmasked, [(matcher, i) for matcher, i in unmasked if not answers[i].is_watched]
        if len(together) * width * 32 >= PARALLEL_FROM and len(together) > 1:
            alone = [(matcher, i) for matcher, i in unmasked if answers[i].is_watched]
            begun_at = self._process_time()
            pairs = [(matcher.inner, i) for matcher, i in together]
            self._executor.unsafe_compute_mask_ptr(pairs, address, num_bytes, len(answers))
            if self._process_time() - begun_at > MASK_S + SHARE_S * len(together):
                for _, i in together:
                    answers[i].is_watched = True
        for matcher, i in alone:
            begun_at = self._thread_time()
            matcher.fill_at(address + i * num_bytes, num_bytes)
            seconds = self._thread_time() - begun_at
            answers[i].spend(seconds, 1)
            answers[i].is_watched = seconds > MASK_S
        for i in np.flatnonzero(np.count_nonzero(words, axis=1) <= 1).tolist():  # forced, or known already
            begun_at, num_ahead = self._thread_time(), len(answers[i].ahead)
            answers[i].finish_mask(words[i])
            answers[i].spend(self._thread_time() - begun_at, len(answers[i].ahead) - num_ahead)
        return words

    def _draft_masks(self, answer: GrammarCursor, words: Words, token_ids: list[int]) -> list[Words]:
        begun_at = self._thread_time()
        masks = answer.draft_masks(words, token_ids)
        answer.spend(self._thread_time() - begun_at, len(masks))
        return masks

    def _fail(self, grammar_id: int, reason: str) -> GrammarFailure:
        self.close([grammar_id])
        return GrammarFailure(grammar_id, error_info(RequestError(f"structured_outputs cannot go on: {reason}")))


def _any_token(words: Words, draw: random.Random) -> int:
    """Return a random token that a mask allows. Only the bits of one random word are listed, since all are many."""
    word = int(draw.choice(words.nonzero()[0]))
    bits = int(words[word])
    return 32 * word + draw.choice([bit for bit in range(32) if bits >> bit & 1])


def _too_slow(cursor: GrammarCursor) -> str:
    return (
        f"its masks take {cursor.overtime_s:.1f} s of CPU beyond {MASK_S} s each, at most {MAX_OVERTIME_S} s are "
        "allowed: repeat or nest less"
    )


def _drafts_by_id(message: AdvanceGrammars) -> dict[int, list[int]]:
    """Return the drafts of each grammar whose masks are ordered, by grammar id."""
    counts, token_ids = decode_ids(message.draft_counts), decode_ids(message.draft_ids).tolist()
    drafts_by_id, start = dict[int, list[int]](), 0
    for grammar_id, count in zip(decode_ids(message.mask_ids), counts, strict=True):
        drafts_by_id[grammar_id] = token_ids[start : start + count]
        start += count
    return drafts_by_id
