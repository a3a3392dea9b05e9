"""Tenant: the requests of one API key, which share the engine with those of others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Tenant:
    """The owner of requests: an API key, or all callers without one. It gets a part of the engine in proportion
    to its weight, as long as it asks for so much. Requests of an unknown owner have a Tenant of their own."""

    name: str = ""  # of the key; empty: no key
    index: int = 0  # in the columns of Tenants
    kv_share: float = 1.0  # largest part of the pool that its running requests are to hold while others are open
    num_open: int = 0  # requests that wait or run
    num_waiting: int = 0
    num_waiting_tokens: int = 0
