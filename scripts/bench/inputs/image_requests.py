"""Requests with images for benchmarks: a checkpoint of medium size, image files, and calls of one engine.

The checkpoint has the shape of Qwen2.5-VL with a language model of 135 M parameters and random weights. It is written
once to the user's cache, which needs a checkout with its tests.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from tokenloom import AsyncClient, SamplingParams
from tokenloom.ipc.messages.metrics import Counter
from tokenloom.scripts.bench.processes import title
from tokenloom.scripts.bench.workload import kept_checkpoint

WORDS = ("the", "capital", "of", "France", "Japan", "is", "a", "city", "and", "12", "+", "7", "What", "see", "you")
MAX_PIXELS = 1 << 20
REPORT_S = 1.0  # the core reports at least twice a second
TEXT_SHAPE = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}
TOWER_SHAPE = {
    "depth": 12,
    "hidden_size": 256,
    "intermediate_size": 684,
    "out_hidden_size": 576,
    "num_heads": 4,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [2, 5, 8, 11],
}


def find_vision_checkpoint() -> Path:
    """Return the folder of the checkpoint; write it if it does not exist yet."""

    def write(folder: Path) -> None:
        import torch

        from tokenloom.tests.support.vision_checkpoints import write_vision_checkpoint
        from tokenloom.tests.support.vision_configs import QWEN2_5_VL

        tower = {**QWEN2_5_VL.config["vision_config"], **TOWER_SHAPE}
        config = {**QWEN2_5_VL.config, **TEXT_SHAPE, "vision_config": tower}
        pixels = {"patch_size": 14, "min_pixels": 56 * 56, "max_pixels": MAX_PIXELS}
        model = replace(QWEN2_5_VL, config=config, preprocessor={**QWEN2_5_VL.preprocessor, **pixels})
        write_vision_checkpoint(folder, model, torch.bfloat16)

    return kept_checkpoint("vision-135m-bfloat16", write)


def image_file(seed: object, width: int, height: int) -> bytes:
    """Return a PNG or, above a quarter of a megapixel, a JPEG file of random shades, as large as one of a photo."""
    rng = np.random.default_rng(random.Random(str(seed)).getrandbits(64))
    small = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG" if width * height > 1 << 18 else "PNG")
    return file.getvalue()


def words(seed: object, count: int) -> str:
    return " ".join(random.Random(str(seed)).choices(WORDS, k=count))


@dataclass
class Call:
    """A request and the arrival times of its tokens, by time.perf_counter."""

    prompt: str
    images: Sequence[bytes] = ()
    num_out: int = 1
    sent_at: float = 0.0
    times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A chat of one turn: the images, then the prompt."""
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in self.images]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.prompt}]}]

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.sent_at

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return the seconds between tokens of which the later one arrived between `begin` and `end`."""
        return [after - before for before, after in itertools.pairwise(self.times) if begin < after <= end]

    async def run(self, client: AsyncClient) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self.num_out, ignore_eos=True)
        self.sent_at = time.perf_counter()
        async for output in client.chat(self.messages, params):
            now = time.perf_counter()
            self.times += [now] * (len(output.outputs[0].token_ids) - len(self.times))
            self.num_prompt_tokens, self.num_cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens


async def run_all(client: AsyncClient, calls: Sequence[Call]) -> float:
    """Run calls at once; return the seconds that they took."""
    begun = time.perf_counter()
    await asyncio.gather(*(call.run(client) for call in calls))
    return time.perf_counter() - begun


async def encodes(client: AsyncClient) -> int:
    """Return how many images the engine has encoded, once its core has reported."""
    await asyncio.sleep(REPORT_S)
    (found,) = (each for each in await client.get_metrics() if each.name == "tokenloom_encoder_encodes_total")
    assert isinstance(found, Counter)
    return found.value


def resident_bytes(processes: Sequence[psutil.Process]) -> dict[str, int]:
    """Return the resident bytes of each process by its title."""
    found: dict[str, int] = {}
    for process in processes:
        try:
            found[title(process)] = found.get(title(process), 0) + process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder, some of which may vanish meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total
