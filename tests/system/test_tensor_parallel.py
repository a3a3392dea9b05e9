"""One engine of two ranks with drafts, right and wrong ones: tokens, logprobs and vectors are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tokenloom import Client, PoolingParams, RequestOutput, SamplingParams
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system import recorded_drafts
from tokenloom.tests.system.drafting_engine import drafting_engine
from tokenloom.tests.system.launched import newest_engine
from tokenloom.tests.system.logprob_oracle import LogprobOracle
from tokenloom.tests.system.sampling_engine import BASE, make_prompts, open_llm
from tokenloom.tests.system.test_embeddings import PoolingOracle
from tokenloom.tests.system.test_logprobs import check_output
from tokenloom.tests.system.test_speculation import num_drafts

VOCAB_SIZE = 301  # the ranks' parts are not equal
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 204}
PROMPTS = make_prompts(4, 6)
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=30, presence_penalty=0.3 * i) for i in range(4)]


class Ranks(NamedTuple):
    """A model, an engine of two ranks with its faults, and the answers to PROMPTS of one rank without drafts."""

    folder: Path
    faults: Path
    llm: Client
    expected: list[RequestOutput]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    root = tmp_path_factory.mktemp("ranks")
    folder = tiny_checkpoint(root / "m", "llama", vocab_size=VOCAB_SIZE, **SHAPE)
    with open_llm(folder, speculation="off") as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    (root / "faults").mkdir()
    recorded_drafts.record(root / "record", "mixed", VOCAB_SIZE, expected, PARAMS)
    options = BASE | {"device": "cpu", "tensor_parallel_size": 2, "max_logprobs": -1}
    options = options | {"max_num_batched_tokens": 32, "max_num_seqs": 16}
    del options["in_process"]
    config = config_from_keywords("LLM", folder, options)
    with drafting_engine(config, root / "record", {"TOKENLOOM_FAULTS": str(root / "faults")}) as client:
        yield Ranks(folder, root / "faults", client, expected)


def test_two_ranks_keep_the_same_tokens(ranks: Ranks) -> None:
    found = ranks.llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in ranks.expected]
    drafted, accepted = num_drafts(found)
    assert drafted > accepted > 20


def test_token_ranks_agree_with_logprobs_under_tensor_parallelism(ranks: Ranks) -> None:
    oracle = LogprobOracle(ranks.folder)
    params = SamplingParams(temperature=2, seed=3, max_tokens=9, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    num_checked = 0
    for output in ranks.llm.generate(make_prompts(2, 4), params, use_tqdm=False):
        check_output(oracle, output, VOCAB_SIZE, VOCAB_SIZE)
        answer = output.outputs[0]
        told = [*zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)][1:]
        for token_id, found in [*told, *zip(answer.token_ids, answer.logprobs or (), strict=True)]:
            assert found is not None
            own, num_checked = found[token_id], num_checked + 1
            num_larger = sum(each.logprob > own.logprob for each in found.values())
            num_equal = sum(each.logprob == own.logprob for each in found.values())
            assert own.rank is not None and num_larger < own.rank <= num_larger + num_equal
    assert num_checked > 30


def test_ranks_share_the_work_and_a_killed_rank_changes_no_vector(ranks: Ranks) -> None:
    llm, prompts, oracle = ranks.llm, make_prompts(40, 3), PoolingOracle(ranks.folder)
    params, fault = PoolingParams(method="mean", normalize=False), ranks.faults / "worker.forward.0"
    with ThreadPoolExecutor(1) as pool:
        embedding = pool.submit(llm.embed, prompts, params, use_tqdm=False)
        for _ in range(4):  # steps that last longer than the next lines take
            inject(ranks.faults, "worker.forward", "delay 0.5", 0)
            wait_until(lambda: not fault.exists(), "no step begins")
        next(each for each in newest_engine() if " ".join(each.cmdline()).startswith("tokenloom worker 1")).kill()
        oracle.check(prompts, embedding.result(100), params)
    assert llm.health().num_restarts == 1, "the group was replaced while prompts were open"
    last = PoolingParams(method="last")
    oracle.check(prompts[:10], llm.embed(prompts[:10], last, use_tqdm=False), last)
