"""Namespaces: the roots of block keys under which the requests of one tenant were computed lately.

The same tokens have other keys with another adapter, other weights or another salt. A tenant is an API key, or a salt;
requests of different tenants are never compared, since that would reveal the prompts of one to the other.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, TypeAlias

from ....ipc.messages.base import MissReason
from ...kv.block_hash import shared_root
from ...request import Request

MAX_TENANTS = 1024
MAX_OF_TENANT = 4  # namespaces of a tenant that are remembered

Tenant: TypeAlias = tuple[str, str | None]  # name of the API key, or salt


def tenant_of(request: Request) -> Tenant:
    return (request.tenant.name, None) if request.tenant.name else ("", request.params.cache_salt)


def mark_of(tenant: Tenant) -> int:
    """Return a number that is equal for equal tenants, and for no others but by chance."""
    return hash(tenant) & 0xFFFF_FFFF_FFFF_FFFF


class Namespace(NamedTuple):
    """All that the key of a block depends on besides tokens and media."""

    weights: bytes
    adapter: bytes  # digest; empty: the base model
    salt: str | None

    @property
    def root(self) -> bytes:
        return shared_root(self.weights, self.salt, self.adapter)

    def difference(self, other: Namespace) -> MissReason:
        """Return how another namespace differs from this one."""
        if self.weights != other.weights:
            return "weights"
        return "adapter" if self.adapter != other.adapter else "salt"


class Namespaces:
    """Owner of the namespaces by tenant; the tenants and namespaces that were used longest ago are forgotten."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[Tenant, OrderedDict[Namespace, None]] = OrderedDict()

    def visit(self, request: Request, weights: bytes) -> tuple[Namespace, list[Namespace]]:
        """Record the namespace of a request, and return it and the others of its tenant, the newest first. weights:
        the namespace of the weights."""
        tenant = tenant_of(request)
        known = self._by_tenant.pop(tenant, None)
        if known is None:
            known = OrderedDict[Namespace, None]()
            if len(self._by_tenant) == MAX_TENANTS:
                self._by_tenant.popitem(last=False)
        self._by_tenant[tenant] = known
        adapter = b"" if request.adapter is None else request.adapter.digest
        own = Namespace(weights, adapter, request.params.cache_salt)
        known.pop(own, None)
        found = [*reversed(known)]
        known[own] = None
        if len(known) > MAX_OF_TENANT:
            known.popitem(last=False)
        return own, found
