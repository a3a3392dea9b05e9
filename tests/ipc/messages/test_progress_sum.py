"""The sum of several cores' reports: numbers and histograms add up, and totals outlive a core."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tokenloom.frontend.launcher.supervisor.replica import Replica
from tokenloom.ipc.messages.adapter import AdaptersProgress
from tokenloom.ipc.messages.progress_sum import add_up, totals_of
from tokenloom.ipc.messages.supervisor import DraftSource, KVGroupState, Progress, SpeculationProgress
from tokenloom.ipc.messages.tier import SourceState, TiersProgress
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.engine_specs import new_spec

BUSY = Progress(
    step=7,
    step_age_s=0.5,
    num_running=2,
    num_waiting=1,
    num_blocks=12,
    num_free_blocks=10,
    kv_map=bytes([1, 2, 3, 0]),
    num_hit_tokens=100,
    kv_groups=[KVGroupState(name="window 8", num_used_blocks=3, num_unusable_tokens=16)],
    num_steps_by_rows=[1, 2, 4],
    adapters=AdaptersProgress(num_slots=2, num_ready=1, num_fills=3, running=[b"a"]),
    speculation=SpeculationProgress(
        sources=[DraftSource(name="own", num_drafted=5, num_accepted_by_position=[2, 1])],
        num_steps_by_drafts={0: 4, 2: 1},
    ),
)
IDLE = Progress(
    step=3,
    step_age_s=90.0,
    num_running=0,
    num_waiting=0,
    num_blocks=24,
    num_free_blocks=20,
    kv_map=bytes([0, 0, 0, 1]),
    num_hit_tokens=11,
    kv_groups=[KVGroupState(name="window 8", num_used_blocks=4, num_unusable_tokens=1)],
    num_steps_by_rows=[5],
    is_paused=True,
    adapters=AdaptersProgress(num_slots=2, num_fills=1, running=[b"a", b"b"]),
    speculation=SpeculationProgress(
        sources=[
            DraftSource(name="own", num_drafted=1, num_accepted_by_position=[1]),
            DraftSource(name="corpus", num_drafted=2, num_accepted_by_position=[0, 1]),
        ],
        num_steps_by_drafts={2: 9},
    ),
)


def test_numbers_and_histograms_of_several_cores_add_up() -> None:
    total = add_up([BUSY, IDLE])
    assert (total.step, total.num_running, total.num_hit_tokens) == (10, 2, 111)
    assert (total.num_blocks, total.num_free_blocks) == (36, 30)
    assert total.num_steps_by_rows == [6, 2, 4] and total.is_paused
    assert total.step_age_s == 0.5, "an idle core is not late"
    assert total.kv_map == bytes([1, 3, 0, 0]), "each pool has its share of the map"
    assert total.adapters == AdaptersProgress(num_slots=4, num_ready=1, num_fills=4, running=[b"a", b"b"])
    assert total.speculation is not None and total.speculation.num_steps_by_drafts == {0: 4, 2: 10}
    assert [(each.name, each.num_drafted, each.num_accepted_by_position) for each in total.speculation.sources] == [
        ("own", 6, [3, 1]),
        ("corpus", 2, [0, 1]),
    ]
    assert total.kv_groups == [KVGroupState(name="window 8", num_used_blocks=7, num_unusable_tokens=17)]
    assert totals_of(total).kv_groups == [KVGroupState(name="window 8", num_unusable_tokens=17)]
    assert add_up([BUSY]) == BUSY


def of_tiers(num_read: int, held_bytes: int) -> Progress:
    host = SourceState(name="host", is_open=True, held_bytes=7, num_read=1)
    disk = SourceState(name="disk", is_open=True, held_bytes=held_bytes, num_read=num_read, rejected={"key": num_read})
    tiers = TiersProgress(
        num_tokens_by_place=[1, 2],
        num_slots=4,
        num_filled_slots=3,
        num_used_slots=1,
        used_slot_bytes=9,
        is_open=True,
        sources=[host, disk],
    )
    return msgspec.structs.replace(IDLE, tiers=tiers)


def disk_of(replica: Replica) -> SourceState:
    tiers = replica.whole_progress().tiers
    assert tiers is not None
    return next(each for each in tiers.sources if each.name == "disk")


@pytest.mark.parametrize("loss", [Replica.on_core_lost, Replica.on_tier_lost])
def test_totals_of_tiers_outlive_their_process_and_its_state_does_not(loss: Callable[[Replica], None]) -> None:
    replica = Replica(new_spec(config=EngineConfig(data_parallel_size=2)), 0)
    replica.note(of_tiers(5, 100))
    loss(replica)
    disk = disk_of(replica)
    assert (disk.num_read, disk.held_bytes, disk.is_open, disk.rejected) == (5, 0, False, {"key": 5})
    totals = totals_of(of_tiers(5, 100)).tiers
    assert totals is not None and (totals.num_used_slots, totals.used_slot_bytes) == (0, 0)
    replica.note(of_tiers(1, 30))
    assert (disk_of(replica).num_read, disk_of(replica).held_bytes) == (6, 30)


def test_totals_outlive_a_core_and_its_state_does_not() -> None:
    replica = Replica(new_spec(config=EngineConfig(data_parallel_size=2)), 0)
    assert replica.note(BUSY) and not replica.note(BUSY)
    replica.on_core_lost()
    lost = replica.whole_progress()
    assert (lost.step, lost.num_hit_tokens, lost.num_steps_by_rows) == (7, 100, [1, 2, 4])
    assert (lost.num_running, lost.num_blocks, lost.num_free_blocks, lost.kv_map) == (0, 0, 0, b"")
    assert lost.adapters is not None and (lost.adapters.num_ready, lost.adapters.num_fills) == (0, 3)
    assert replica.note(IDLE), "its successor counts from 0"
    assert replica.whole_progress().num_hit_tokens == 111
