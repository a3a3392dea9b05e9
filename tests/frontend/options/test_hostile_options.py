"""An option with a hostile value is taken, or refused by its name."""

from __future__ import annotations

from tokenloom.frontend.options.options import config_from_keywords
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.tests.support.hostile_fields import REMOVED, VALUES, Hostile, faults

NAMES = [name for name in EngineConfig.__struct_fields__ if name != "model"]
VALUE_NAMES = [value for value in VALUES if VALUES[value] is not REMOVED]


def read(change: Hostile) -> None:
    (name,) = change.path
    try:
        config_from_keywords("LLM", None, {str(name): VALUES[change.value]})
    except ValueError as error:
        raise type(error)(str(error).replace("-", "_")) from None


def test_a_hostile_keyword_is_refused_by_its_name() -> None:
    found = faults((Hostile((name,), value) for name in NAMES for value in VALUE_NAMES), read)
    assert not found, found
