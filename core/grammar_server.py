"""GrammarServer: the matchers of all answers that have a grammar, advanced and masked together.

The same object serves in a process of its own (grammar_process.py) and inside the in-process engine. `compile` may
run in any thread; all else belongs to one thread. Knows messages, no socket.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from threading import Lock

import numpy as np
from llguidance import LLExecutor

from ..ipc.codec import decode_ids, encode_ids
from ..ipc.engine_spec import EngineSpec
from ..ipc.errors import ErrorInfo, RequestError, error_info
from ..ipc.messages import AdvanceGrammars, GrammarFailure, GrammarOpened, GrammarsAdvanced, OpenGrammar
from .grammar_compiler import GrammarCompiler, Matcher

PARALLEL_FROM = 1 << 17  # bits of masks in a step: with fewer, one thread is done before others wake


class GrammarServer:
    """Owns the compiler, made when the first grammar comes, and one matcher per open grammar."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._num_words = -(-spec.model.vocab_size // 32)
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = Lock()
        self._matcher_by_id: dict[int, Matcher] = {}
        self._executor = LLExecutor(max(1, min((os.cpu_count() or 1) // 2, 8)))

    def prepare(self) -> None:
        """Read the vocabulary; where that fails, each request hears why."""
        with contextlib.suppress(RequestError):
            self._shared_compiler()

    def compile(self, message: OpenGrammar) -> Matcher | ErrorInfo:
        """A matcher that stands after the answer's tokens, or why there is none."""
        try:
            matcher = self._shared_compiler().compile(message.kind, message.text)
        except RequestError as error:
            return error_info(error)
        matcher.consume(decode_ids(message.token_ids).tolist())
        if matcher.error is not None:
            return error_info(RequestError(f"the tokens of this resumed request leave its grammar: {matcher.error}"))
        return matcher

    def _shared_compiler(self) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                model = self._spec.model
                folder = Path(self._spec.tokenizer_folder)
                self._compiler = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids)
            return self._compiler

    def open(self, grammar_id: int, compiled: Matcher | ErrorInfo) -> GrammarOpened:
        """Enter what `compile` has brought."""
        if isinstance(compiled, ErrorInfo):
            return GrammarOpened(grammar_id=grammar_id, error=compiled)
        self._matcher_by_id[grammar_id] = compiled
        return GrammarOpened(grammar_id=grammar_id, is_complete=compiled.is_complete)

    def close(self, grammar_ids: list[int]) -> None:
        for grammar_id in grammar_ids:
            self._matcher_by_id.pop(grammar_id, None)

    def advance(self, message: AdvanceGrammars) -> GrammarsAdvanced:
        """Take in the tokens, make the masks. Grammars that were closed meanwhile are passed over."""
        failures: list[GrammarFailure] = []
        complete: list[int] = []
        for grammar_id, token_id in zip(decode_ids(message.grammar_ids), decode_ids(message.token_ids), strict=True):
            matcher = self._matcher_by_id.get(grammar_id)
            if matcher is None:
                continue
            matcher.consume([token_id])
            if matcher.error is not None:
                failures.append(self._fail(grammar_id, matcher.error))
            elif matcher.is_complete:
                complete.append(grammar_id)
        self.close(complete)
        mask_ids = [grammar_id for grammar_id in decode_ids(message.mask_ids) if grammar_id in self._matcher_by_id]
        bits = self._masks(mask_ids)
        is_good = np.ones(len(mask_ids), np.bool_)
        for i, grammar_id in enumerate(mask_ids):
            error = self._matcher_by_id[grammar_id].error
            if error is not None or not bits[i].any():
                is_good[i] = False
                failures.append(self._fail(grammar_id, error or "no token can follow"))
        return GrammarsAdvanced(
            serial=message.serial,
            mask_ids=encode_ids(grammar_id for grammar_id, good in zip(mask_ids, is_good, strict=True) if good),
            bits=(bits if is_good.all() else bits[is_good]).tobytes(),
            complete_ids=encode_ids(complete),
            failures=failures,
        )

    def _masks(self, grammar_ids: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
        """[n, ceil(vocab_size / 32)] of the model's vocabulary."""
        if not grammar_ids:
            return np.zeros((0, self._num_words), np.uint32)
        width = self._shared_compiler().num_words
        words = np.zeros((len(grammar_ids), width), np.uint32)
        matchers = [self._matcher_by_id[grammar_id] for grammar_id in grammar_ids]
        if len(matchers) * width * 32 >= PARALLEL_FROM and len(matchers) > 1:
            pairs = [(matcher.inner, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, width * 4, len(matchers))
        else:
            for matcher, row in zip(matchers, words, strict=True):
                matcher.fill(row)
        return words if width == self._num_words else np.ascontiguousarray(words[:, : self._num_words])

    def _fail(self, grammar_id: int, reason: str) -> GrammarFailure:
        self.close([grammar_id])
        return GrammarFailure(grammar_id, error_info(RequestError(f"structured_outputs cannot go on: {reason}")))
