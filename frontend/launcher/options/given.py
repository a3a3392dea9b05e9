"""Given: an option as the user gave it."""

from __future__ import annotations

from typing import NamedTuple


class Given(NamedTuple):
    """Value that the user gave for an option, with the option's spelling and the place of the value for errors."""

    value: object
    written: str  # the user's spelling: --max-num-seqs, max-num-seqs, max_num_seqs
    where: str = ""  # "engine.yaml line 3: "
