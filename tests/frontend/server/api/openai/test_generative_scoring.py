"""GenerativeScoring yields to the event loop, and scores labels of probability 0."""

from __future__ import annotations

import asyncio
import math
from array import array

import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.forms.openai.embedding_body import GenerativeScoringRequest
from tokenloom.frontend.server.api.openai.generative_scoring import GenerativeScoring
from tokenloom.frontend.server.api.openai.local_engine import LocalEngine
from tokenloom.frontend.server.bodies.body_parser import ParsedBody
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.client import Logprobs
from tokenloom.ipc.messages.intake import BodyInput
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import new_frontend

BODY = GenerativeScoringRequest(query="a", items=["b"], label_token_ids=[5, 6])


def new_engine() -> LocalEngine:
    return LocalEngine(new_frontend(EngineConfig(model=str(DEMO_FOLDER)))[0], lambda: None)


def test_the_event_loop_runs_between_tokenized_items() -> None:
    async def run() -> int:
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await GenerativeScoring.start(new_engine(), ParsedBody(BODY, [BodyInput(text="a")] * 41), "demo")
        counting.cancel()
        return num_turns

    assert asyncio.run(asyncio.wait_for(run(), 20)) >= 40


@pytest.mark.parametrize(
    ("logprobs", "score"), [((-math.inf, -math.inf), 0.5), ((-1.0, -math.inf), 1.0), ((-math.inf, -1.0), 0.0)]
)
def test_impossible_labels_have_a_score(logprobs: tuple[float, float], score: float) -> None:
    scoring = GenerativeScoring(new_engine(), BODY, [BodyInput(token_ids=encode_ids([1]))], "demo")
    columns = {"token_ids": encode_ids([9, 5, 6]), "logprobs": array("f", [-1.0, *logprobs]).tobytes()}
    assert scoring._score(Logprobs(num_top=2, ranks=encode_ids([1]), texts={}, are_named=True, **columns)) == score
