"""Endpoints: the addresses of the sockets between an engine's processes, and to its clients.

Every process takes them from the EngineSpec; no other module composes an address. An intake process has none: it
inherits its socket.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses, ipc:// or tcp://; the process that binds one is named first beside it.

    `{}` in an address stands for the number of a replaceable process, so that its successor binds a new one.
    """

    clients: str  # frontend, for clients
    control: str  # supervisor, for its children
    core: str  # core, for frontends
    steps: str  # core, for the workers of generation {}: SchedulerOutput
    results: str  # core, for the workers of generation {}: ModelRunnerOutput
    grammar: str  # grammar process of the core of epoch {}
    tier: str  # tier process number {}, for the core

    @classmethod
    def in_folder(cls, folder: str | Path, clients: str | None = None) -> Endpoints:
        """Return ipc addresses in a run directory; `clients` replaces the one for clients."""
        names = {"clients": "client", "control": "control", "core": "core"}
        names |= {"steps": "workers-{}", "results": "results-{}", "grammar": "grammar-{}", "tier": "tier-{}"}
        addresses = {field: f"ipc://{folder}/{name}.sock" for field, name in names.items()}
        return cls(**addresses | ({} if clients is None else {"clients": clients}))

    def steps_of(self, generation: int) -> str:
        return _numbered(self.steps, generation)

    def results_of(self, generation: int) -> str:
        return _numbered(self.results, generation)

    def grammar_of(self, core_epoch: int) -> str:
        return _numbered(self.grammar, core_epoch)

    def tier_of(self, number: int) -> str:
        return _numbered(self.tier, number)


def _numbered(address: str, number: int) -> str:
    before, mark, after = address.rpartition("{}")
    return f"{before}{number}{after}" if mark else address
