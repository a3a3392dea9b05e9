"""A harness for requests with a grammar of the fake helper, and their expected tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from tokenloom.core.request import Request
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.tests.core.adversary import Adversary, right_tokens
from tokenloom.tests.core.fake_worker import masked_token, next_token
from tokenloom.tests.core.features.grammar.fake_grammar_helper import allowed_tokens, is_complete
from tokenloom.tests.core.harness import Harness


def expected_with_grammar(
    text: str, prompt: Sequence[int], seed: int, max_tokens: int, stop: Sequence[int]
) -> tuple[list[int], str]:
    """Return the tokens of a request that runs alone, and why it ends."""
    tokens, outputs = list(prompt), list[int]()
    while len(outputs) < max_tokens:
        outputs.append(masked_token(next_token(tokens, seed), allowed_tokens(text, outputs)))
        tokens.append(outputs[-1])
        if outputs[-1] in stop:
            return outputs, "stop"
        if is_complete(text, outputs) and len(outputs) < max_tokens:
            return outputs, "stop"
    return outputs, "length"


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
        text, num_prompt = self.texts.get(request.key), request.num_prompt_tokens
        if text is None:
            return right_tokens(request, tokens, count)
        tokens = list(tokens)
        for _ in range(count):
            allowed = allowed_tokens(text, tokens[num_prompt:])
            tokens.append(masked_token(next_token(tokens, request.seed), allowed))
        return tokens[len(tokens) - count :]

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
        super().run()

    def check(self, key: int) -> None:
        if key not in self.texts:
            super().check(key)
            return
        prompt, params, seed, stop = self.prompts[key]
        assert params.max_tokens is not None
        tokens, reason = expected_with_grammar(self.texts[key], prompt, seed, params.max_tokens, stop)
        assert (self.tokens[key], self.finished[key].reason) == (tokens, reason)
