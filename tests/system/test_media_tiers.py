"""Blocks of media leave the pool for host memory and come back: nothing is encoded again, and no answer changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom import Client
from tokenloom.tests.support.faults import inject
from tokenloom.tests.system.media_engine import MAX_TOKENS, Checker, MediaRequest, make_requests, num_encodes, run
from tokenloom.tests.system.media_families import BLOCK_SIZE, HEARING, WHISPER, Models, make_models
from tokenloom.tests.system.tier_engine import TierEngine

NUM_REQUESTS = 4  # with media
LESSON_S = 2.0


def length(models: Models, request: MediaRequest) -> int:
    """Return the tokens of a request's prompt."""
    return len(models.oracle.expand(request.prompt, request.media).token_ids)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_deterministic", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == WHISPER else pytest.mark.nightly) for each in ("llava", *HEARING)]
)
def test_blocks_of_media_come_back_from_host_memory(name: str, is_deterministic: bool, tmp_path: Path) -> None:
    models = make_models(tmp_path / "model", name)
    requests = [request for request in make_requests(models, 3, 8) if request.media][:NUM_REQUESTS]
    others = [request for request in make_requests(models, 4, 12) if request.media]
    longest = max(length(models, request) for request in [*requests, *others]) + MAX_TOKENS
    options = {
        "--model": models.checkpoint,
        "--block-size": BLOCK_SIZE,
        "--max-model-len": longest - models.num_clip_tokens,
        "--num-kv-blocks": -(-longest // BLOCK_SIZE) + 2,
        "--kv-host-bytes": "64M",
    }
    flags = [f"{name}={value}" for name, value in options.items()] + ["--deterministic"] * is_deterministic
    turns, counts = [], []
    with TierEngine(tmp_path, None, *flags) as engine:
        engine.wait_ready()
        with Client(engine.address) as client:
            inject(engine.faults, "worker.forward", f"delay {LESSON_S}", 0)  # a step that lasts: loads are faster
            run(client, models, others[:1])
            for _ in range(2):
                before = num_encodes(client, at_least=1)
                turns.append([output for request in requests for output in run(client, models, [request])])
                counts.append(num_encodes(client, at_least=before + 1 - len(counts)) - before)
                for other in others:  # they take the place of the requests' blocks in the pool
                    run(client, models, [other])
        engine.end()
    for outputs in turns:
        Checker(models).check(requests, outputs)
    ends = [models.oracle.span(request.prompt, request.media)[1] for request in requests]
    whole = [end // BLOCK_SIZE * BLOCK_SIZE for end in ends]
    loaded = [output.metrics.num_loaded_tokens.get("host", 0) for output in turns[1]]
    assert loaded[0] >= whole[0] and sum(map(bool, loaded)) > 1, (whole, loaded)
    assert all(output.num_cached_tokens >= count for output, count in zip(turns[1], whole, strict=True))
    num_cut = sum(
        length(models, request) // BLOCK_SIZE * BLOCK_SIZE < end for request, end in zip(requests, ends, strict=True)
    )
    assert counts[0] > 0 and counts[1] <= num_cut, "a medium with all its blocks was encoded again"
