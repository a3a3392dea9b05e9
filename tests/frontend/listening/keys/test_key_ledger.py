"""Open requests and tokens of keys are exact, whatever becomes of the frontends that count them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.frontend.listening.keys.api_keys import ApiKey
from tokenloom.frontend.listening.keys.key_ledger import INHERIT_S, WINDOW_S, KeyLedger, OpenUse
from tokenloom.ipc.errors import RateLimited, RequestError
from tokenloom.tests.support.today import seeds


class Killed(Exception):
    """A frontend was killed between two stores."""


class MortalWords:
    """Words of a ledger that let their process end before a store."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.num_left = 1 << 60

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        return self._words[place]

    def __setitem__(self, place: int, value: int) -> None:
        if not self.num_left:
            raise Killed
        self.num_left -= 1
        self._words[place] = value


class Model:
    """Three frontends, and all that their clients have: the truth about open requests and tokens."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder, self.now = random.Random(seed), folder, 1000.0
        self.keys = [
            ApiKey(secret="a", name="alice", open_requests=4),
            ApiKey(secret="b", name="bob-with-a-long-name.of-the-team", tokens_per_minute=300),
            ApiKey(secret="c", name="c"),
        ]
        self.ledgers = [self._new_ledger(which) for which in range(3)]
        self.open: dict[str, tuple[int, ApiKey, OpenUse | None, list[int]]] = {}  # by id, with prompt and output tokens
        self.totals = {key.name: [0, 0, 0] for key in self.keys}  # requests, tokens of prompts and of answers
        self.spent: list[tuple[str, int, int]] = []  # key, second, tokens
        self.num_ids = self.num_killed = self.num_refused = 0

    def _new_ledger(self, which: int) -> KeyLedger:
        ledger = KeyLedger(self.folder, which, 3, lambda: self.now)
        ledger.tick()
        ledger._own.words = MortalWords(ledger._own.words)  # type: ignore[assignment]
        return ledger

    def act(self) -> None:
        self.now += self.rng.choice([0.0, 0.1, 3.0])
        which = self.rng.randrange(3)
        if self.rng.random() < 0.2:
            self.ledgers[which]._own.words.num_left = self.rng.randrange(30)  # type: ignore[attr-defined]
        try:
            self.rng.choice([self._begin, self._begin, self._answer, self._answer, self._end])(which)
        except Killed:
            self._replace(which)

    def _begin(self, which: int) -> None:
        key, num_prompt = self.rng.choice(self.keys), self.rng.randrange(1, 120)
        self.num_ids += 1
        name = f"request-{self.num_ids}"
        num_open = sum(each is key for _, each, _, _ in self.open.values())
        may = not key.open_requests or num_open < key.open_requests
        since = int(self.now) - WINDOW_S
        used = sum(tokens for owner, second, tokens in self.spent if owner == key.name and second > since)
        may_start = not key.tokens_per_minute or used + num_prompt <= key.tokens_per_minute
        try:
            use = self.ledgers[which].open(key, name, goes_on=False)
        except RateLimited:
            assert not may
            self.num_refused += 1
            return
        except Killed:  # its client sends it again
            if may:
                self._note_begin(which, key, name, None, num_prompt)
            raise
        assert may
        try:
            use.begin(num_prompt, goes_on=False)
        except RateLimited as error:
            assert not may_start and 0 < error.retry_after_s <= WINDOW_S
            self.totals[key.name][0] += 1
            self.num_refused += 1
            use.close()
            return
        except Killed:
            if may_start:
                self._note_begin(which, key, name, use, num_prompt)
            else:
                self.totals[key.name][0] += 1
            raise
        assert may_start
        self._note_begin(which, key, name, use, num_prompt)

    def _note_begin(self, which: int, key: ApiKey, name: str, use: OpenUse | None, num_prompt: int) -> None:
        self.totals[key.name][0] += 1
        self.open[name] = which, key, use, [0, 0]
        self._charge(name, 0, num_prompt)

    def _charge(self, name: str, part: int, tokens: int) -> None:
        _, key, _, has = self.open[name]
        self.totals[key.name][1 + part] += tokens
        self.spent.append((key.name, int(self.now), tokens))
        has[part] += tokens

    def _answer(self, which: int) -> None:
        for name, (where, _, use, has) in list(self.open.items()):
            if where == which and self.rng.random() < 0.5:
                more = self.rng.randrange(1, 9)
                self._charge(name, 1, more)
                assert use is not None
                use.charge(has[1])

    def _end(self, which: int) -> None:
        for name in [name for name, (where, *_) in self.open.items() if where == which and self.rng.random() < 0.5]:
            _, _, use, _ = self.open.pop(name)
            assert use is not None
            use.close()

    def _replace(self, which: int) -> None:
        """Start a successor, at which the open requests go on."""
        self.num_killed += 1
        ledger = self.ledgers[which] = self._new_ledger(which)
        for name, (where, key, _, has) in list(self.open.items()):
            if where == which:
                use = ledger.open(key, name, goes_on=True)
                use.begin(has[0], goes_on=True)
                use.charge(has[1])
                self.open[name] = which, key, use, has
        self.now += INHERIT_S
        ledger.tick()
        self.check()

    def check(self) -> None:
        since = int(self.now) - WINDOW_S
        for key in self.keys:
            usage = self.rng.choice(self.ledgers).usage(key.name)
            assert usage.open_requests == sum(each is key for _, each, _, _ in self.open.values())
            assert [usage.requests, usage.prompt_tokens, usage.output_tokens] == self.totals[key.name]
            spent = [tokens for owner, second, tokens in self.spent if owner == key.name and second > since]
            assert usage.tokens_last_minute == sum(spent)
            assert not key.open_requests or usage.open_requests <= key.open_requests


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_usage_is_exact_though_frontends_are_killed_between_any_two_stores(seed: int, tmp_path: Path) -> None:
    model = Model(seed, tmp_path)
    for _ in range(300):
        model.act()
        model.check()
    assert model.num_killed > 5 and model.num_refused > 5


def test_a_prompt_beyond_the_tokens_of_a_minute_is_the_callers_fault(tmp_path: Path) -> None:
    ledger = KeyLedger(tmp_path, 0, 1, lambda: 0.0)
    with pytest.raises(RequestError, match="the prompt has 11 tokens, key k may use 10 in a minute"):
        ledger.open(ApiKey(secret="s", name="k", tokens_per_minute=10), "r", goes_on=False).begin(11, goes_on=False)
