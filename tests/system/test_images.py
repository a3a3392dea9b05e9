"""Images reach a running engine from clients and over HTTP, outlive the loss of the frontend, and leave nothing."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator

import httpx2
import pytest
import torch
from PIL import Image

from tokenloom import BeamSearchParams, Client, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import DEADLINE_S, ask, refusal
from tokenloom.tests.system.launched import LaunchedEngine, client, serve

__all__ = ["client"]  # a fixture

GREEDY = SamplingParams(temperature=0, max_tokens=4)
NUM_EMBEDS = 64  # placeholders of an image of this model, whatever its size


def picture(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.frombytes("RGB", (width, height), pixels.numpy().tobytes())


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def url_of(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = vision_checkpoint(tmp_path_factory.mktemp("model") / "llava", "llava")
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("engine"), "--model", str(folder), "--http", "0"))


def test_n_answers_embeddings_logprobs_and_beams_take_images(client: Client) -> None:
    prompt = {"prompt": "<image> is", "multi_modal_data": {"image": picture(2)}}
    (output,) = client.generate(prompt, GREEDY.replace(n=2, prompt_logprobs=0, temperature=1.0), use_tqdm=False)
    assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
    assert len(output.outputs) == 2 and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    (vector,) = client.embed([prompt], use_tqdm=False)
    assert vector.outputs.embedding
    (beams,) = client.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=4))
    assert len(beams.sequences) == 2 and all(len(beam.logprobs) == 4 for beam in beams.sequences)
    (greedy,) = client.generate(prompt, GREEDY, use_tqdm=False)
    (best,) = client.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))
    assert best.sequences[0].tokens[-4:] == greedy.outputs[0].token_ids


def test_the_apis_count_the_tokens_of_images_and_show_none_of_their_bytes(http: httpx2.Client) -> None:
    counts = set()
    for image in (picture(3), picture(3, 400, 400)):  # an intake process reads the body with the large one
        url, question = url_of(image), {"type": "text", "text": "a"}
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, question]}]}
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        turns = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, question]}]}
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}, question]}]
        counts |= {
            ask(http, "/v1/chat/completions", body, max_tokens=2)["usage"]["prompt_tokens"],
            ask(http, "/tokenize", body)["count"],
            ask(http, "/v1/messages/count_tokens", turns)["input_tokens"],
            ask(http, "/v1/responses", input=items, max_output_tokens=1)["usage"]["input_tokens"],
        }
    assert len(counts) == 1 and counts.pop() > NUM_EMBEDS
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    error = refusal(http, "/v1/chat/completions", {"messages": [{"role": "user", "content": [broken]}]})
    assert (
        error["param"] == "messages" and "AAAA" not in str(error) and "no image of a known format" in error["message"]
    )


def test_a_lost_frontend_loses_no_request_and_no_descriptor(engine: Engine, client: Client) -> None:
    prompts = [{"prompt": "<image> is", "multi_modal_data": {"image": picture(seed)}} for seed in range(10, 14)]
    params = GREEDY.replace(max_tokens=40, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in client.generate(prompts, params, use_tqdm=False)]
    futures = [client.submit(prompt, params) for prompt in prompts]
    frontend = engine.child("frontend")
    os.kill(frontend.pid, signal.SIGKILL)
    assert [future.result(DEADLINE_S).outputs[0].token_ids for future in futures] == expected
    frontend = engine.child("frontend")
    client.generate(prompts, GREEDY, use_tqdm=False)
    wait_until(
        lambda: not any("/media/" in each.path and not each.path.endswith("/lock") for each in frontend.open_files()),
        "images of finished requests are not pinned",
        DEADLINE_S,
    )
