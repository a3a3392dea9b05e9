"""A harness for requests with a grammar of the fake helper, and their expected tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence

from tokenloom.core.request import Request
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.messages.core import ConstraintBegin
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.tests.core.adversary import Adversary, right_tokens
from tokenloom.tests.core.fake_worker import masked_token, next_token
from tokenloom.tests.core.features.grammar.fake_grammar_helper import allowed_tokens, is_complete
from tokenloom.tests.core.harness import Harness


class Parts:
    """An answer read token by token, slowly: which of its tokens a grammar constrains."""

    def __init__(
        self,
        text: str,
        begins: Sequence[ConstraintBegin] = (),
        *,
        repeats: bool = False,
        triggers: Collection[int] = (),
    ) -> None:
        self.text, self.repeats, self.triggers = text, repeats, triggers
        self.begins = {tuple(decode_ids(begin.token_ids)): begin.is_included for begin in begins}
        self.free: list[int] = []  # since the last part
        self.part: list[int] | None = None if begins or triggers else []  # the open one
        self.is_over = False
        self.num_parts = self.num_masked = 0

    def next(self, tokens: Sequence[int], seed: int) -> int:
        """Return the token that comes next."""
        token = next_token(tokens, seed)
        return token if self.part is None else masked_token(token, allowed_tokens(self.text, self.part))

    def take(self, token: int) -> None:
        if self.part is None and self.triggers and not self.begins:
            self.part = [token] if token in self.triggers else None
            self.num_parts += self.part is not None
        elif self.part is None:
            self.free.append(token)
            ends = [tuple(self.free[i:]) for i in range(len(self.free)) if tuple(self.free[i:]) in self.begins]
            if ends and self.triggers:
                self.begins = {}
            elif ends:
                self.part = list(ends[0]) if self.begins[ends[0]] else []
                self.num_parts += 1
        else:
            self.part.append(token)
            self.num_masked += 1
        if self.part is not None and is_complete(self.text, self.part):
            self.part, self.free, self.is_over = None, [], not self.repeats


def expected_with_grammar(
    text: str,
    prompt: Sequence[int],
    seed: int,
    max_tokens: int,
    stop: Sequence[int],
    begins: Sequence[ConstraintBegin] = (),
    *,
    repeats: bool = False,
    triggers: Collection[int] = (),
) -> tuple[list[int], str]:
    """Return the tokens of a request that runs alone, and why it ends."""
    tokens, parts = list(prompt), Parts(text, begins, repeats=repeats, triggers=triggers)
    for num_tokens in range(1, max_tokens + 1):
        tokens.append(parts.next(tokens, seed))
        parts.take(tokens[-1])
        if tokens[-1] in stop or (parts.is_over and num_tokens < max_tokens):
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class GrammarHarness(Harness):
    """Requests may have a grammar; `run` lets the helper work."""

    def __init__(
        self, num_blocks: int = 64, monotonic: Callable[[], float] = time.monotonic, **options: object
    ) -> None:
        super().__init__(num_blocks, monotonic=monotonic, **options)
        self.texts: dict[int, str] = {}

    def ask(self, key: int, prompt: list[int], max_tokens: int, text: str, **more: object) -> None:
        self.texts[key] = text
        self.add(key, prompt, max_tokens, structured_outputs=StructuredOutputsParams(grammar=text), **more)  # type: ignore[arg-type]

    def give_adversary(self, rng: random.Random, accuracy: float) -> None:
        """Let drafts be proposed for all rows."""
        self.proposer = self.core.scheduler.batches.drafting.proposer = Adversary(rng, accuracy, self.right_tokens)

    def right_tokens(self, request: Request, tokens: list[int], count: int) -> list[int]:
        """The tokens that come next, for an Adversary; past the end of a grammar, any."""
        if request.key not in self.texts:
            return right_tokens(request, tokens, count)
        parts, tokens = self.parts_of(request.key), list(tokens)
        for token in tokens[request.num_prompt_tokens :]:
            parts.take(token)
        for _ in range(count):
            tokens.append(parts.next(tokens, request.seed))
            parts.take(tokens[-1])
        return tokens[len(tokens) - count :]

    def parts_of(self, key: int) -> Parts:
        request = self.requests[key]
        return Parts(
            self.texts[key],
            request.constraint_begins,
            repeats=request.constraint_repeats,
            triggers=decode_ids(request.constraint_triggers),
        )

    def turn(self, answers: int = 1) -> None:
        if self.prover is not None:
            self.prover.work()
        self.mask()
        super().turn(answers)

    def mask(self) -> None:
        """The helper works, and the core takes its answers."""
        self.grammars.work()
        self.core.grammars.take()

    def run(self, max_turns: int = 20_000) -> None:
        self.take()
        for _ in range(max_turns):
            if not self.core.num_requests:
                break
            self.turn()
        self.mask()
        self.grammars.work()  # closes the grammars that were being opened for requests that have ended
        super().run()

    def check(self, key: int) -> None:
        if key not in self.texts:
            super().check(key)
            return
        prompt, params, seed, stop = self.prompts[key]
        assert params.max_tokens is not None
        request = self.requests[key]
        tokens, reason = expected_with_grammar(
            self.texts[key],
            prompt,
            seed,
            params.max_tokens,
            stop,
            request.constraint_begins,
            repeats=request.constraint_repeats,
            triggers=decode_ids(request.constraint_triggers),
        )
        assert (self.tokens[key], self.finished[key].reason) == (tokens, reason)
