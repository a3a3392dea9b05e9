"""Results in which a row brings no token, or several."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ProtocolError
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.harness import Harness


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_new_tokens", [2, 3, 5, 16])
def test_several_tokens_a_row_take_fewer_results_and_bring_the_same_text(
    num_new_tokens: int, steps_in_flight: int
) -> None:
    harness = Harness(num_new_tokens=lambda: num_new_tokens, steps_in_flight=steps_in_flight)
    for key in range(3):
        harness.add(key, [1, 2, key], 30)
    harness.run_to_the_end()
    assert harness.worker.num_steps <= 3 + steps_in_flight * 30 / num_new_tokens


def test_tokens_after_a_stop_id_or_the_limit_are_dropped() -> None:
    stop = expected_tokens([1, 2, 3], 0, 10, [])[4:5]
    harness = Harness(num_new_tokens=lambda: 7)
    harness.add(0, [1, 2, 3], 20, stop=stop)
    harness.add(1, [1, 2, 3], 5)
    harness.run_to_the_end()
    assert harness.finished[0].reason == "stop" and harness.finished[1].reason == "length"


def test_a_stop_id_below_min_tokens_ends_nothing_within_a_result() -> None:
    tokens = expected_tokens([1, 2, 3], 0, 10, [])
    harness = Harness(num_new_tokens=lambda: 10)
    harness.add(0, [1, 2, 3], 20, stop=tokens[1:2] + tokens[5:6], min_tokens=4)
    harness.run()
    assert harness.tokens[0] == tokens[:6]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rows": [0]}, "tokens, .* were asked for"),
        ({"rows": [1, 0]}, "asked for"),
        ({"rows": [0, 3]}, "asked for"),
        ({"counts": [1]}, "asked for"),
        ({"counts": [2, -1]}, "asked for"),
        ({"counts": [2, 2]}, "2 tokens came, the counts say 4"),
        ({"token_ids": [5]}, "1 tokens came, the counts say 2"),
        ({"rows": [0], "counts": [1], "token_ids": [5]}, r"no result for rows \[1\]"),
    ],
)
def test_a_result_that_does_not_fit_its_step_is_refused(columns: dict[str, list[int]], message: str) -> None:
    harness = Harness()
    harness.add(0, [1, 2, 3])
    harness.add(1, [4, 5, 6])
    harness.core.step()
    result = harness.worker.answer()
    assert result is not None and decode_ids(result.rows).tolist() == [0, 1]
    bad = msgspec.structs.replace(result, **{name: encode_ids(ids) for name, ids in columns.items()})
    with pytest.raises(ProtocolError, match=message):
        harness.core.on_result(bad)
