"""An adversary in the core of a real engine: drafts made from a recorded run, or wrong on purpose.

`use` gives them to an engine in this process, `drafting_engine` starts one in separate processes with them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.core.request import Request
from tokenloom.core.scheduling.drafting import Proposer
from tokenloom.ipc.params.sampling_params import child_seed
from tokenloom.tests.core.adversary import Adversary

RECORD = "TOKENLOOM_TEST_RECORD"  # names the file for the processes of a drafting_engine
MODES = {"wrong": 0.0, "mixed": 0.8, "right": 1.0}  # how often a draft is right


def record(
    path: Path, mode: str, vocab_size: int, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> None:
    """Write the answers of a run for `proposer_of`. Greedy answers need no seed."""
    answers = {
        _name(output.prompt_token_ids, None if each.seed is None else child_seed(each.seed, answer.index)): list(
            answer.token_ids
        )
        for output, each in zip(outputs, params, strict=True)
        for answer in output.outputs
    }
    path.write_text(json.dumps({"accuracy": MODES[mode], "vocab_size": vocab_size, "answers": answers}))


def use(llm: LLM, path: Path) -> None:
    """Replace the drafts of an engine in this process by those of a record."""
    engine: Any = llm._transport
    engine._engine._core.scheduler.batches.drafting.proposer = proposer_of(path)


def _name(prompt: Sequence[int], seed: int | None) -> str:
    number = "" if seed is None else str(seed & 0xFFFFFFFFFFFFFFFF)
    return number + ":" + ",".join(map(str, prompt))


def proposer_of(path: Path) -> Proposer:
    found = json.loads(path.read_text())
    rng, answers, vocab_size = random.Random(7), found["answers"], found["vocab_size"]

    def right(request: Request, tokens: list[int], count: int) -> list[int]:
        """The recorded tokens; behind the end of an answer, any."""
        prompt = tokens[: request.num_prompt_tokens]
        answer = answers.get(_name(prompt, request.seed)) or answers.get(_name(prompt, None), [])
        known: list[int] = answer[len(tokens) - request.num_prompt_tokens :][:count]
        return known + [rng.randrange(vocab_size) for _ in range(count - len(known))]

    return Adversary(rng, found["accuracy"], right, vocab_size)
