"""Steps of the same decoding rows share a batch."""

from __future__ import annotations

from tokenloom.core.scheduling.batch import Batch
from tokenloom.tests.core.harness import Harness


def batches_of_steps(harness: Harness, num_steps: int) -> list[Batch]:
    batches = []
    for _ in range(num_steps):
        harness.core.step()
        entry = harness.core.scheduler.ledger.oldest
        assert entry is not None
        batches.append(entry.batch)
        result = harness.worker.answer()
        assert result is not None
        harness.core.on_result(result)
        harness.take()
    return batches


def test_decode_steps_share_a_batch_until_a_row_comes_or_goes() -> None:
    harness = Harness(steps_in_flight=1, block_size=4)
    harness.add(0, [1, 2, 3], 40)
    harness.add(1, [4, 5], 20)
    prompts, *decodes = batches_of_steps(harness, 12)  # over the ends of two blocks
    assert prompts is not decodes[0]
    assert set(decodes) == {decodes[0]}
    harness.add(2, [6], 40)
    *_, with_another = batches_of_steps(harness, 3)
    assert with_another is not decodes[0]
    harness.core.abort(0, [2])
    *_, without_it = batches_of_steps(harness, 2)
    assert without_it is not with_another
    harness.run()
    for key in (0, 1):
        harness.check(key)


def test_a_step_that_scores_a_prompt_shares_nothing_with_the_decodes_after_it() -> None:
    harness = Harness(steps_in_flight=1, max_num_seqs=1, max_num_batched_tokens=2)
    harness.add(0, [5, 6, 7], 8, prompt_logprobs=1)  # two tokens, and one
    assert [batch.scores_prompts for batch in batches_of_steps(harness, 4)] == [True, True, False, False]
