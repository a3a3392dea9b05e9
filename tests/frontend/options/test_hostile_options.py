"""An option with a hostile value is taken, or refused by its name."""

from __future__ import annotations

import pytest

from tokenloom.frontend.options.options import config_from_keywords
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.tests.support.hostile_fields import REMOVED, VALUES, Hostile, faults

NAMES = [name for name in EngineConfig.__struct_fields__ if name != "model"]


def plain(name: str) -> str:
    return name.replace("-", "_")


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_keyword_is_refused_by_its_name(name: str) -> None:
    def read(change: Hostile) -> None:
        try:
            config_from_keywords("LLM", None, {name: VALUES[change.value]})
        except ValueError as error:
            raise type(error)(plain(str(error))) from None

    found = faults((Hostile((name,), value) for value in VALUES if VALUES[value] is not REMOVED), read)
    assert not found, found
