"""An agent knows from which address of its machine it reaches the head."""

from __future__ import annotations

import pytest

from tokenloom.frontend.hosts.head_link import HeadAddress
from tokenloom.ipc.errors import ConfigError

HEAD = "tcp://127.0.0.1:7100"


def test_the_address_of_this_machine_is_that_of_the_way_to_the_head_or_the_chosen_one() -> None:
    assert HeadAddress(HEAD, None).resolve() == ("127.0.0.1", "127.0.0.1")
    assert HeadAddress(HEAD, "127.0.0.2").resolve() == ("127.0.0.1", "127.0.0.2")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "ipc:///tmp/x"])
def test_an_address_that_is_none_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form tcp://HOST:PORT: give the address that the head logs"):
        HeadAddress(address, None)


@pytest.mark.parametrize("own", ["192.0.2.1", "2001:db8::1", "no address"])
def test_an_address_that_this_machine_does_not_have_is_named(own: str) -> None:
    with pytest.raises(OSError, match=f"--own-address {own} is no address of this machine"):
        HeadAddress(HEAD, own).resolve()
