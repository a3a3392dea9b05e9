"""Processes are killed while a GGUF file's codes are multiplied as integers, the default: nothing is lost, and with
--deterministic no bit of an answer or a logprob changes. A new worker packs the file's blocks again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.frontend.checkpoint.hub import DEMO_FOLDER
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.chaos_work import answers, make_work, submit
from tokenloom.tests.support.today import at_night
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, client, serve
from tokenloom.tests.system.loss_turns import turn_of

__all__ = ["client"]  # fixtures

pytestmark = [
    *turn_of("codes"),
    pytest.mark.skipif(not instruction_levels(), reason="the processor has no AVX2"),
]

WORK = make_work(random.Random(0))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    convert(DEMO_FOLDER, folder / "demo-Q4_1.gguf", "Q4_1", pre="gpt-2")
    more = {"XDG_CACHE_HOME": str(linked_cache(folder / "cache"))}
    options = ["--model", str(folder / "demo-Q4_1.gguf"), "--deterministic"]
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("run"), *options, more=more))


@pytest.fixture(scope="module")
def calm(engine: Engine) -> list[RequestOutput]:
    """The answers of an engine that loses nothing."""
    with Client(engine.address) as client:
        assert "integer products" in client.info().kernels
        return answers(client, WORK)


def bits(output: RequestOutput) -> object:
    """Return all values that must be equal; floats compare exactly."""
    found = [(each.token_ids, each.text, each.logprobs, each.finish_reason) for each in output.outputs]
    return output.prompt_token_ids, found, output.prompt_logprobs


@pytest.mark.parametrize("role", ["worker 0", *at_night("core", "frontend", "grammar")])
def test_a_killed_process_changes_no_bit(engine: Engine, client: Client, calm: list[RequestOutput], role: str) -> None:
    num_restarts = client.health().num_restarts
    futures = submit(client, WORK * 2)
    for _ in zip(range(4), client.stream(WORK[0].prompt, WORK[0].params), strict=False):
        pass  # the others have begun too
    engine.child(role).kill()
    assert not all(future.done() for future in futures), "the requests ended before the process"
    found = [future.result(RECOVERY_S) for future in futures]
    assert list(map(bits, found)) == list(map(bits, calm * 2))
    assert role in ("frontend", "grammar") or client.health().num_restarts > num_restarts
