from __future__ import annotations

import re

import pytest

from tokenloom.frontend.checkpoint.downloads.progress import HubProgress
from tokenloom.frontend.checkpoint.start_report import (
    MIN_INTERVAL_S,
    StartReport,
    ThrottledWriter,
    describe_arena,
    describe_groups,
)
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.supervisor import Initialize, Measured
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.ipc.process.awake_clock import AwakeClock
from tokenloom.ipc.spec.kv.kv_groups import KVGroup
from tokenloom.tests.support.engine_specs import new_spec


def test_a_throttled_writer_writes_a_line_per_interval_and_none_for_a_quick_start() -> None:
    now, shown = 0.0, list[str]()
    report = ThrottledWriter(shown.append, lambda: now)
    for tenths in range(100):
        now = tenths / 10
        report(f"at {now}")
    assert shown == [f"at {when * MIN_INTERVAL_S}" for when in (1.0, 2.0, 3.0)]


def test_a_download_is_shown_as_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0

    class Bar(HubProgress):
        monotonic = staticmethod(lambda: now)

    bar = Bar(total=4, desc="Fetching 4 files", disable=True)
    for step in range(4):
        now = step * MIN_INTERVAL_S
        bar.update(1)
        bar.refresh()
    bar.close()
    captured = capsys.readouterr()
    shares = [re.findall(r"INFO supervisor: Fetching 4 files: +(\d+)%", line) for line in captured.err.splitlines()]
    assert shares == [["50"], ["75"], ["100"]]
    assert not captured.out and "\r" not in captured.err


def test_the_sizes_of_pool_and_arena_are_announced() -> None:
    lines, spec = list[str](), new_spec()
    report = StartReport(lines.append, AwakeClock(1.0))
    measured = Measured(pool_bytes=9 << 20, block_bytes=(1 << 20,), device="cpu, 2 threads")
    for arena in (None, ArenaShape(64, (1,), (2 << 20,))):
        report.announce_sizes(spec, Initialize(pool=PoolShape(9, 1 << 20, (1 << 20,)), arena=arena), measured)
    pool = "KV cache: 8 blocks of 16 = 128 tokens, 9 MiB per rank on cpu, 2 threads; max_model_len 512"
    tiers = "KV tiers: 64 blocks of 2097152 bytes, 0.12 GiB of shared memory"
    assert [line.partition("supervisor: ")[2] for line in lines] == [pool, pool, tiers]
    assert describe_arena(ArenaShape(12, (1, 32), (8 << 20, 1 << 18))) == (
        "12 slabs of 1 block of 8.0 MiB or 32 blocks of 256 KiB"
    )
    groups = [KVGroup(None, (5, 11), 4, 64), KVGroup(512, (0, 1, 2), 4, 64)]
    assert describe_groups(groups, PoolShape(9, 1 << 20, (1 << 19, 1 << 18)), 16) == (
        " in 9 slabs of 1.0 MiB · attention, 2 layers: 512 KiB a block"
        " · window 512, 3 layers: 256 KiB a block of 16 tokens"
    )
    groups[1] = KVGroup(None, (0, 1, 2), 0, 0, is_state=True)
    assert describe_groups(groups, PoolShape(9, 1 << 20, (1 << 16, 1 << 20)), 16) == (
        " in 9 slabs of 1.0 MiB · attention, 2 layers: 64 KiB a block of 16 tokens · states, 3 layers: 1.0 MiB a row"
    )
