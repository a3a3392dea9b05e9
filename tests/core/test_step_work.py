"""The core's work per step does not grow with the batch: counted in calls, messages and bytes, not in time."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import Calls, CoreSteps

BLOCK_SIZE = 16
MAX_ROWS = 256
MAX_CALLS_PER_STEP = 88  # 87 by Python 3.11, with an update's message to the frontend
CONFIG = EngineConfig(model=str(DEMO_FOLDER), max_num_seqs=MAX_ROWS, block_size=BLOCK_SIZE, speculation="off")


def calls_of_steps(num_rows: int, num_steps: int, config: EngineConfig = CONFIG) -> list[int]:
    steps, counts = CoreSteps(config, num_rows, num_steps), []
    for _ in range(num_steps):
        with Calls() as scheduling:
            steps.schedule()
        result = steps.execute()
        with Calls() as updating:
            steps.update(result)
        counts.append(scheduling.count + updating.count)
    return counts


def test_a_decode_step_calls_as_much_for_256_rows_as_for_8() -> None:
    few, many = calls_of_steps(8, BLOCK_SIZE), calls_of_steps(MAX_ROWS, BLOCK_SIZE)
    assert sorted(few)[BLOCK_SIZE // 2] <= MAX_CALLS_PER_STEP
    assert sorted(many)[BLOCK_SIZE // 2] == sorted(few)[BLOCK_SIZE // 2]  # where no row fills or needs a block
    assert sum(count > 2 * sorted(many)[0] for count in many) <= 2  # all rows fill one, and need one, together


def test_serving_adapters_costs_at_most_one_call_in_a_step_without_them() -> None:
    with_adapters = msgspec.structs.replace(CONFIG, enable_lora=True)
    pairs = zip(calls_of_steps(8, BLOCK_SIZE, with_adapters), calls_of_steps(8, BLOCK_SIZE), strict=True)
    assert all(with_them <= without + 1 for with_them, without in pairs)


def test_a_row_that_fills_a_block_costs_a_few_calls() -> None:
    few, many = calls_of_steps(8, BLOCK_SIZE), calls_of_steps(MAX_ROWS, BLOCK_SIZE)
    assert (max(many) - max(few)) / (MAX_ROWS - 8) < 20


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
def test_a_step_is_one_message_to_the_workers_and_one_to_the_frontend_of_a_few_bytes_per_row(num_rows: int) -> None:
    steps = CoreSteps(CONFIG, num_rows, 2)
    steps.schedule()  # the step in which each row needs a block
    steps.update(steps.execute())
    to_workers = steps.schedule()
    (to_frontend,) = steps.update(steps.execute())
    assert len(to_workers) < 200 + 8 * num_rows  # row and count
    assert len(to_frontend) < 200 + 16 * num_rows  # key, start, count and token
