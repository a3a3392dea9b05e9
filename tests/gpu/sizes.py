"""Sizes of the tests for a GPU: on a device, and in a rehearsal on a faked one with interpreted kernels.

A rehearsal runs the same code on less. SIZES are those of this process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sizes:
    """`limits` are options of engines that have no need of others."""

    limits: dict[str, object] = field(default_factory=dict)
    # ── kernels
    num_tokens: tuple[int, ...] = (1, 7, 300)
    num_schedules: int = 8  # each compiles kernels for some seconds
    longest_context: int = 700
    longest_chunk: int = 260
    sampled: tuple[int, int] = (32, 151_936)  # rows, tokens of the vocabulary
    # ── products
    products: tuple[tuple[int, int, int], ...] = (  # rows, outputs, inputs
        *((1, 200, 512), (16, 1536, 4096)),
        *((40, 64, 300), (700, 256, 1024)),
    )
    experts: tuple[int, int, int] = (32, 512, 192)  # number, hidden and inner size
    expert_tokens: tuple[int, ...] = (1, 30, 600)
    # ── adapters
    adapted: tuple[tuple[int, int], ...] = ((4096, 6144), (576, 200), (300, 130), (1024, 700))  # inputs, outputs
    adapted_tokens: tuple[int, ...] = (1, 7, 300, 1500)
    mixed: tuple[int, int] = (512, 4096)  # outputs, inputs
    num_mixed_tokens: int = 1500
    filled: tuple[int, int, int] = (8192, 4096, 512)  # outputs, inputs, rank
    num_launches: int = 50
    refused: tuple[int, int] = (1024, 4096)  # slots, rank: too much memory
    # ── graphs
    vocab_sizes: tuple[int, ...] = (2, 1000, 8193, 151_936)
    num_draws: int = 8
    decode_lengths: tuple[int, ...] = (1, 300, 8000, 64, 4097, 0, 1023)
    prompt_length: int = 300
    num_neighbours: int = 63
    num_rows: int = 24
    num_steps: int = 150
    # ── engines
    num_media_prompts: int = 6  # of which the last has most media
    num_prompts: int = 24
    longest_prompt: int = 700
    num_answered: int = 24  # tokens of an answer
    num_continued: int = 48  # of one that outlives a worker
    process_limits: dict[str, object] = field(default_factory=dict)  # of the demo
    max_model_len: int = 800
    largest_block: int = 32
    num_spare_blocks: int = 3  # of a pool for preemptions, beyond one request
    memory_bytes: int = 6 << 30  # at most, of the test that fills its share
    pool_model_len: int = 16384
    pool_steps: tuple[tuple[int, int], ...] = ((1, 16_380), (64, 64), (64, 1), (96, 300), (3, 5000), (17, 1025))
    pool_limits: tuple[int, int] = (64, 4096)  # rows, tokens of a step
    lengths: tuple[int, ...] = (310, 1, 77, 33)  # of the requests of a model


DEVICE = Sizes()
REHEARSAL = Sizes(
    limits={"max_num_seqs": 8, "max_num_batched_tokens": 64},
    num_tokens=(1, 7, 40),
    num_schedules=3,
    longest_context=80,
    longest_chunk=40,
    sampled=(6, 3000),
    products=((1, 200, 512), (16, 160, 256), (40, 64, 300)),
    experts=(8, 64, 32),
    expert_tokens=(1, 30),
    adapted=((512, 300), (96, 200), (300, 130), (128, 70)),
    adapted_tokens=(1, 7, 60),
    mixed=(64, 256),
    num_mixed_tokens=200,
    filled=(512, 256, 64),
    num_launches=3,
    refused=(256, 1024),
    vocab_sizes=(2, 1000, 8193),
    num_draws=2,
    decode_lengths=(1, 300, 1200, 64, 700, 0, 1023),
    prompt_length=70,
    num_neighbours=9,
    num_rows=6,
    num_steps=20,
    num_media_prompts=2,
    num_prompts=4,
    longest_prompt=24,
    num_answered=24,
    num_continued=6,
    process_limits={"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128},
    max_model_len=48,
    largest_block=8,
    num_spare_blocks=2,
    memory_bytes=256 << 20,
    pool_model_len=512,
    pool_steps=((1, 500), (8, 20), (3, 150)),
    pool_limits=(8, 128),
    lengths=(61, 1, 22, 9),
)
SIZES = REHEARSAL if int(os.environ.get("TOKENLOOM_FAKE_CUDA") or 0) else DEVICE
