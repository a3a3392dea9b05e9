"""Only global addresses are fetched from, however they are written."""

from __future__ import annotations

import pytest

from tokenloom.frontend.sources.addresses import is_public

PUBLIC = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]
PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",  # carriers' NAT
    "169.254.169.254",  # clouds' metadata
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:a9fe:a9fe",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::7f00:1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "2001:0:7f00:1::80ff:fffe",
    "localhost",
    "",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_global_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_other_addresses_are_not(address: str) -> None:
    assert not is_public(address)
