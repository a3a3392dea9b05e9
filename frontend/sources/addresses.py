"""Addresses that media may be fetched from: global ones alone.

An IPv6 address with an IPv4 address in it (mapped, compatible, 6to4, NAT64) is judged by that; Teredo is not global.
"""

from __future__ import annotations

import ipaddress
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_COMPATIBLE = ipaddress.IPv6Network("::/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")  # RFC 8215: the place of the IPv4 address is not known


def is_public(text: str) -> bool:
    """Whether an address is global: of the internet, and of no private, local or reserved net."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False  # also an IPv6 address with a zone, which is local
    real = _real_address(address)
    return real.is_global and not real.is_multicast and not real.is_reserved


def _real_address(address: Address) -> Address:
    """Return the IPv4 address in an address, if there is one, else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _LOCAL_NAT64:
        return ipaddress.IPv4Address(0)
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.sixtofour is not None:
        return address.sixtofour
    return address
