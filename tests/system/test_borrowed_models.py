"""An engine with layers that keep a state, native or transformers': losses, preemption and shared prompts change no
token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.system.launched import serve
from tokenloom.tests.system.loss_turns import turn_of

pytestmark = turn_of("states")

RECOVERY_S = 60.0
OPTIONS = ["--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--max-model-len", "80"]
SMALL = ["--block-size", "4", "--num-kv-blocks", "36", "--max-num-batched-tokens", "24", "--max-num-seqs", "6"]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = [[3 + (7 * i + 13 * j) % 250 for j in range(5 + 9 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recurrent_checkpoint(tmp_path_factory.mktemp("lfm2"), "lfm2", seed=3)


@pytest.fixture(scope="module", params=some(["transformers", "native"], 1))
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(implementation: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Start an engine whose pool holds less than all prompts and answers."""
    options = [*OPTIONS, *SMALL, "--model-impl", implementation, "--model", str(folder)]
    yield from serve(Engine(tmp_path_factory.mktemp("run"), options))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Return the answers of transformers' own generate."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    answers = []
    for prompt in PROMPTS:
        options = {"max_new_tokens": GREEDY.max_tokens, "do_sample": False, "eos_token_id": None}
        answers.append(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("role", some(["worker 0", "core"], num_today=1))
def test_a_killed_process_changes_no_token(engine: Engine, expected: list[list[int]], role: str) -> None:
    with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
        futures = [client.submit({"prompt_token_ids": prompt}, GREEDY) for prompt in PROMPTS]
        stream = client.stream({"prompt_token_ids": PROMPTS[0]}, GREEDY)
        next(stream)  # the answer has begun
        engine.child(role).kill()
        stream.close()
        for future, tokens in zip(futures, expected, strict=True):
            assert list(future.result(timeout=RECOVERY_S).outputs[0].token_ids) == tokens
        assert client.health().num_restarts >= 1


def test_answers_of_one_request_are_alike(implementation: str, engine: Engine, expected: list[list[int]]) -> None:
    """On transformers' layers each computes the prompt for itself."""
    with Client(engine.address) as client:
        prompt = {"prompt_token_ids": PROMPTS[3]}
        (answer,) = client.generate([prompt], GREEDY.replace(n=3, temperature=0), use_tqdm=False)
        assert [list(each.token_ids) for each in answer.outputs] == [expected[3]] * 3
        assert implementation == "native" or not answer.num_cached_tokens
