"""KeyMetrics: usage of the named API keys, read from the ledger when it is shown.

All frontends show the same values, those of the whole engine. The names are those of the key file, so there are few.
"""

from __future__ import annotations

from ...listening.keys.api_keys import ApiKeys
from ...listening.keys.key_ledger import KeyLedger, KeyUsage
from .registry import Counter, Gauge, Metric, Readings


class KeyMetrics:
    """Owner of the counters. `refresh` reads them anew."""

    def __init__(self, keys: ApiKeys, ledger: KeyLedger) -> None:
        self._keys, self._ledger = keys, ledger
        self._requests = Counter("key_requests_total", "Requests by API key.", ["key"])
        self._refused = Counter("key_requests_refused_total", "Requests beyond a limit of their API key.", ["key"])
        self._prompt = Counter("key_prompt_tokens_total", "Tokens of prompts by API key.", ["key"])
        self._output = Counter("key_generation_tokens_total", "Tokens of answers by API key.", ["key"])
        self.metrics: list[Metric] = [
            Gauge("key_open_requests", "Open requests by API key.", self._open),
            *(self._requests, self._refused, self._prompt, self._output),
        ]

    def usages(self) -> dict[str, KeyUsage]:
        """Return the numbers of each valid key, by name."""
        return {key.name: self._ledger.usage(key.name) for key in self._keys.named}

    def _open(self) -> Readings:
        return [({"key": name}, usage.open_requests) for name, usage in self.usages().items()]

    def refresh(self) -> None:
        for name, usage in self.usages().items():
            self._requests.raise_to(usage.requests, name)
            self._refused.raise_to(usage.refused, name)
            self._prompt.raise_to(usage.prompt_tokens, name)
            self._output.raise_to(usage.output_tokens, name)
