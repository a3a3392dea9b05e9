"""Only global addresses are fetched from, however they are written."""

from __future__ import annotations

import ipaddress

import pytest

from tokenloom.frontend.server.sources.addresses import is_public

# IANA's registries of special-purpose addresses, and the nets that are no unicast
SPECIAL = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.0.0.8/32", "192.0.0.9/32", "192.0.0.170/32", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24"),
    *("192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
    *("224.0.0.0/4", "240.0.0.0/4", "::/128", "::1/128", "::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64"),
    *("2001::/23", "2001::/32", "2001:1::1/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48", "2001:10::/28"),
    *("2001:20::/28", "2001:30::/28", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7"),
    *("fe80::/10", "fec0::/10", "ff00::/8", "4000::/3", "8000::/1"),
]


@pytest.mark.parametrize("net", SPECIAL)
def test_no_address_of_a_special_net_is_public_in_any_form(net: str) -> None:
    found = ipaddress.ip_network(net)
    for address in (found[0], found[-1], found[found.num_addresses // 2], found[found.num_addresses // 3]):
        forms = [str(address)]
        if address.version == 4:
            packed = f"{int(address) >> 16:x}:{int(address) & 0xFFFF:x}"
            forms += [f"::ffff:{packed}", f"64:ff9b::{packed}", f"2002:{packed}::1", f"::{packed}"]
        assert [form for form in forms if is_public(form)] == []


@pytest.mark.parametrize("text", ["", "localhost", "2606:4700::1111%eth0"])
def test_names_and_addresses_of_one_interface_are_not_public(text: str) -> None:
    assert not is_public(text)


@pytest.mark.parametrize(
    "beside",
    [
        *("1.0.0.0", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0"),
        *("169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "191.255.255.255", "192.0.1.0"),
        *("192.0.3.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "203.0.114.0"),
        *("223.255.255.255", "2000::", "2001:200::1", "2001:db7::1", "2001:db9::1", "2003::1", "2606:4700::1111"),
        *("2620:4f:8001::1", "3ffe::1", "2a00:1450::1", "64:ff9b::808:808", "2002:808:808::1", "::ffff:8.8.8.8"),
    ],
)
def test_addresses_beside_the_special_nets_are_public(beside: str) -> None:
    assert is_public(beside)
