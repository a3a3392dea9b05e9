"""The figures of requests with adapters are those of their arrival times; many adapters are drawn by Zipf's law."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import pytest

from tokenloom.scripts.bench.cases.lora import counts
from tokenloom.scripts.bench.inputs.adapter_requests import Figures, linked_cache
from tokenloom.scripts.bench.inputs.adapter_rotation import draw_zipf


def test_decoding_counts_from_the_last_first_token_to_the_first_last_token() -> None:
    figures = Figures.of([[1.0, 2.0, 3.0, 4.0], [2.5, 3.5, 4.5, 5.0]], begun=0.0)
    assert figures.seconds == 5.0 and figures.tokens_per_s == 8 / 5
    assert figures.decode_tokens_per_s == 3 / 1.5, "3.0, 3.5 and 4.0, between 2.5 and 4.0"
    assert figures.p99_s == pytest.approx(1.0)


def test_zipf_draws_the_first_adapters_most_and_many_others() -> None:
    drawn = Counter(draw_zipf(1000, 20_000, "a"))
    assert drawn == Counter(draw_zipf(1000, 20_000, "a")) != Counter(draw_zipf(1000, 20_000, "b"))
    assert 2**1.2 * 0.9 < drawn[0] / drawn[1] < 2**1.2 * 1.1
    assert 0.45 < sum(drawn[i] for i in range(8)) / 20_000 < 0.6 and len(drawn) > 800


def test_numbers_of_adapters_are_at_least_one() -> None:
    assert counts("1,8,32") == [1, 8, 32] and counts("") == []
    with pytest.raises(argparse.ArgumentTypeError):
        counts("0,8")


def test_a_linked_cache_shares_all_but_stores_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernels", "adapters", "gguf"):
        (tmp_path / "user" / "tokenloom" / name).mkdir(parents=True)
    (tmp_path / "user" / "tokenloom" / "kernels" / "a").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    own = linked_cache(tmp_path / "own") / "tokenloom"
    assert [path.name for path in own.iterdir()] == ["kernels"] and (own / "kernels" / "a").read_text() == "x"
