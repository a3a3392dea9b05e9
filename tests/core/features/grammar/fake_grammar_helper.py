"""A GrammarHelper without a library: grammars are arithmetic, answers come when the test says so, and it can die.

The text of a grammar is "m,k", "m,k,i" or "m,k,i,q": after the outputs o, token t may come iff (t + last + len(o)) % m
== 0, of the first i tokens any, and k tokens complete it, or one that q divides, second or third. With m = 0 its mask
ends the helper. "bad" does not compile, "slow…" never answers, "deadly" ends the helper.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from tokenloom.core.features.grammar.helper import HELPER_IS_UP
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import RequestError, error_info
from tokenloom.ipc.helper_process import HelperLost, HelperUnavailable
from tokenloom.ipc.messages.grammar import (
    RESTART,
    AdvanceGrammars,
    CloseGrammars,
    CoreToGrammar,
    GrammarFailure,
    GrammarOpened,
    GrammarsAdvanced,
    GrammarToCore,
    OpenGrammar,
)

VOCAB_SIZE = 997
MAX_FORCED = 20


def allowed_tokens(text: str, outputs: Sequence[int]) -> list[int]:
    modulus, _, num_free, _ = numbers_of(text)
    if len(outputs) < num_free:
        return list(range(VOCAB_SIZE))
    last = outputs[-1] if outputs else 0
    return [token for token in range(VOCAB_SIZE) if (token + last + len(outputs)) % modulus == 0]


def numbers_of(text: str) -> tuple[int, int, int, int]:
    modulus, length, num_free, leaving = map(int, f"{text},0,0".split(",")[:4])
    return modulus, length, num_free, leaving


def forced_tokens(text: str, outputs: Sequence[int]) -> list[int]:
    """Return the tokens that must follow, up to the next choice or the end."""
    forced = list[int]()
    while len(forced) < MAX_FORCED and not is_complete(text, [*outputs, *forced]):
        allowed = allowed_tokens(text, [*outputs, *forced])
        if len(allowed) != 1:
            break
        forced += allowed
    return forced


def is_complete(text: str, outputs: Sequence[int]) -> bool:
    _, length, _, leaving = numbers_of(text)
    return len(outputs) >= length or (leaving > 0 and any(token % leaving == 0 for token in outputs[1:3]))


class FakeGrammarHelper:
    """Takes `num_answers` messages with each `work`."""

    has_process = True

    def __init__(self) -> None:
        self.inbox: deque[CoreToGrammar] = deque()
        self.outbox: list[GrammarToCore] = []
        self.open_grammars: dict[int, tuple[str, list[int]]] = {}
        self.repeating: set[int] = set()
        self.is_lost = False
        self.num_refusals = 0  # starts that fail from now on
        self.num_starts = 0
        self.is_started = False

    def send(self, message: CoreToGrammar) -> None:
        if not self.is_started and not self.is_lost:
            if self.num_refusals:
                self.num_refusals -= 1
                raise HelperUnavailable("a test")
            self.is_started = True
            self.num_starts += 1
            self.outbox.append(GrammarOpened(grammar_id=HELPER_IS_UP))
        self.inbox.append(message)

    def receive(self) -> list[GrammarToCore]:
        answers, self.outbox = self.outbox, []
        if not answers and self.is_lost:
            self.stop()
            raise HelperLost("was ended by a test", num_answers=0)
        return answers

    def stop(self) -> None:
        self.inbox.clear()
        self.outbox.clear()
        self.open_grammars.clear()
        self.is_lost = self.is_started = False

    def die(self) -> None:
        """Answers stay readable after the end of the helper, as in a socket."""
        if self.is_started:
            self.inbox.clear()
            self.open_grammars.clear()
            self.is_lost = True

    def work(self, num_messages: int = 1 << 30) -> None:
        while self.inbox and num_messages and not self.is_lost:
            num_messages -= 1
            message = self.inbox.popleft()
            if isinstance(message, OpenGrammar):
                self._open(message)
            elif isinstance(message, CloseGrammars):
                for grammar_id in message.grammar_ids:
                    self.open_grammars.pop(grammar_id, None)
            else:
                self._advance(message)

    def _open(self, message: OpenGrammar) -> None:
        if message.text == "deadly":
            self.die()
        elif message.text == "bad":
            error = error_info(RequestError("it is bad at 1"))
            self.outbox.append(GrammarOpened(grammar_id=message.grammar_id, error=error))
        elif not message.text.startswith("slow"):
            outputs, text = decode_ids(message.token_ids).tolist(), message.text
            ends = [count for count in range(len(outputs) + 1) if is_complete(text, outputs[:count])]
            if not ends:
                assert all(token in allowed_tokens(text, outputs[:i]) for i, token in enumerate(outputs))
                self.open_grammars[message.grammar_id] = text, outputs
                self.repeating |= {message.grammar_id} if message.repeats else set()
            num_tokens = min(ends, default=0)
            self.outbox.append(
                GrammarOpened(grammar_id=message.grammar_id, is_complete=bool(ends), num_tokens=num_tokens)
            )

    def _advance(self, message: AdvanceGrammars) -> None:
        complete, failures = [], []
        for grammar_id, token_id in zip(decode_ids(message.grammar_ids), decode_ids(message.token_ids), strict=True):
            if grammar_id not in self.open_grammars:
                continue
            text, outputs = self.open_grammars[grammar_id]
            if token_id == RESTART:
                assert grammar_id in self.repeating
                outputs.clear()
                continue
            assert not is_complete(text, outputs), "a token comes behind the end"
            if token_id not in allowed_tokens(text, outputs):
                failures.append(GrammarFailure(grammar_id, error_info(RequestError(f"{token_id} is not allowed"))))
                del self.open_grammars[grammar_id]
                continue
            outputs.append(token_id)
            if is_complete(text, outputs):
                complete.append(grammar_id)
                if grammar_id not in self.repeating:
                    del self.open_grammars[grammar_id]
        open_ids = {each for each, position in self.open_grammars.items() if not is_complete(*position)}
        mask_ids = [grammar_id for grammar_id in decode_ids(message.mask_ids) if grammar_id in open_ids]
        if any(self.open_grammars[grammar_id][0].startswith("0,") for grammar_id in mask_ids):
            self.die()
            return
        drafts, counts = list(decode_ids(message.draft_ids)), decode_ids(message.draft_counts)
        drafts_of = {}
        for grammar_id, count in zip(decode_ids(message.mask_ids), counts, strict=False):
            drafts_of[grammar_id], drafts = drafts[:count], drafts[count:]
        prefixes = [(i, n) for i in mask_ids for n in range(1 + self._num_allowed(i, drafts_of.get(i, [])))]
        masks = np.zeros((len(prefixes), -(-VOCAB_SIZE // 32) * 32), np.uint8)
        for place, (grammar_id, n) in enumerate(prefixes):
            text, outputs = self.open_grammars[grammar_id]
            masks[place, allowed_tokens(text, [*outputs, *drafts_of.get(grammar_id, [])[:n]])] = 1
        num_masks = [sum(each == i for each, _ in prefixes) for i in mask_ids]
        forced = [forced_tokens(*self.open_grammars[grammar_id]) for grammar_id in mask_ids]
        self.outbox.append(
            GrammarsAdvanced(
                serial=message.serial,
                mask_ids=encode_ids(mask_ids),
                mask_counts=encode_ids(num_masks) if len(counts) else b"",
                bits=np.packbits(masks, axis=1, bitorder="little").tobytes(),
                jump_counts=encode_ids(len(ids) for ids in forced),
                jump_ids=encode_ids(token for ids in forced for token in ids),
                complete_ids=encode_ids(complete),
                failures=failures,
            )
        )

    def _num_allowed(self, grammar_id: int, drafts: list[int]) -> int:
        """The number of drafts that the grammar allows, and after which it goes on."""
        text, outputs = self.open_grammars[grammar_id]
        for n, draft in enumerate(drafts):
            had = [*outputs, *drafts[:n]]
            if draft not in allowed_tokens(text, had) or is_complete(text, [*had, draft]):
                return n
        return len(drafts)
