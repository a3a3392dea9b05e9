"""The costs of kept connections are measured on the real journal and channel."""

from __future__ import annotations

from tokenloom.scripts.bench.kept_costs import kept_costs


def test_a_stream_takes_at_most_16_kib_and_each_part_has_a_time() -> None:
    costs = kept_costs(1)
    assert 4 < costs["stream_kib"] <= 16
    assert costs["piece_us"] > 0 and costs["connection_us"] > 0
