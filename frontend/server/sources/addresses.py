"""Addresses from which media may be fetched: public internet addresses only.

The excluded nets are those of IANA's registries of special-purpose addresses (RFC 6890), so that the result does not
depend on the Python version. An IPv6 address that contains an IPv4 address (mapped, 6to4, NAT64) is judged by the
latter.
"""

from __future__ import annotations

import ipaddress

_SPECIAL_V4 = [
    ipaddress.IPv4Network(net)
    for net in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
    )
]
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")  # all other IPv6 addresses are local, multicast or reserved
_SPECIAL_V6 = [  # 2001::/23: protocols, including Teredo, benchmarks and ORCHID
    ipaddress.IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20")
]
_MAPPED, _NAT64, _6TO4 = map(ipaddress.IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96", "2002::/16"))


def is_public(text: str) -> bool:
    """Return whether a text is an address of the public internet, not of a private, local or special net."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in net for net in _SPECIAL_V4)
    if address.scope_id is not None:
        return False  # an address of one interface
    number = int(address)
    if address in _MAPPED or address in _NAT64:
        return is_public(str(ipaddress.IPv4Address(number & 0xFFFFFFFF)))
    if address in _6TO4:
        return is_public(str(ipaddress.IPv4Address(number >> 80 & 0xFFFFFFFF)))
    return address in _UNICAST_V6 and not any(address in net for net in _SPECIAL_V6)
