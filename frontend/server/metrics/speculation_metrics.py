"""SpeculationMetrics: metrics of draft tokens, from the core's Progress. Only engines with speculation have them.

The label `source` is `own` for drafts from a request's own tokens and `corpus` for those from earlier answers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ....ipc.codec import JsonObject
from ....ipc.messages.supervisor import SpeculationProgress
from .registry import Counter, Gauge, Metric


class SpeculationMetrics:
    """Owner of the counters. `increase(key, total)` returns how much a total of the core has grown since its last
    report under that key."""

    def __init__(self, increase: Callable[[Hashable, float], float]) -> None:
        self._increase = increase
        self._state = SpeculationProgress()
        self.steps = Counter("spec_steps_total", "Results of answers with drafts, by the number of drafts.", ["drafts"])
        self.drafted = Counter("spec_drafted_total", "Guessed tokens that were verified.", ["source"])
        self.accepted = Counter("spec_accepted_total", "Those that were right.", ["source", "position"])
        self.expected = Counter("spec_expected_total", "Those that were expected to be right when they were sent.")
        self._corpus = Gauge("spec_corpus_tokens", "Tokens of finished answers that are kept.", self._corpus_tokens)

    @property
    def metrics(self) -> list[Metric]:
        return [self._corpus, *(each for each in vars(self).values() if isinstance(each, Counter))]

    def _corpus_tokens(self) -> float:
        return self._state.num_corpus_tokens

    def on_progress(self, state: SpeculationProgress) -> None:
        self._state = state
        totals: list[tuple[Counter, tuple[str, ...], float]] = [(self.expected, (), state.num_expected)]
        totals += [(self.steps, (str(drafts),), count) for drafts, count in state.num_steps_by_drafts.items()]
        for source in state.sources:
            totals.append((self.drafted, (source.name,), source.num_drafted))
            for position, count in enumerate(source.num_accepted_by_position):
                totals.append((self.accepted, (source.name, str(position)), count))
        for counter, labels, total in totals:
            counter.add(self._increase((counter.name, labels), total), *labels)

    def summary(self) -> JsonObject:
        """Return totals for the dashboard: results of answers with drafts, draft tokens, and accepted draft tokens."""
        state = self._state
        return {
            "steps": sum(state.num_steps_by_drafts.values()),
            "drafted": sum(source.num_drafted for source in state.sources),
            "accepted": sum(sum(source.num_accepted_by_position) for source in state.sources),
        }
