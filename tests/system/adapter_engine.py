"""The engines of the tests of adapters: a tiny random model, adapters of six kinds, requests that take them in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenloom import LLM, LoRARequest, RequestOutput, SamplingParams
from tokenloom.frontend.client.client import Client
from tokenloom.tests.support.adapters import KINDS, write_adapters
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.adapter_oracle import BASE, AdapterOracle, check_each_differs

VOCAB_SIZE = 300
BLOCK_SIZE = 8
MAX_TOKENS = 20
OPTIONS: dict[str, object] = {
    "num_threads": 1,
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 160,
    "block_size": BLOCK_SIZE,
    "enable_lora": True,
    "max_lora_rank": 16,
}


@dataclass(frozen=True)
class Models:
    """A checkpoint with its adapters by name, and the oracle for both."""

    checkpoint: Path
    adapters: dict[str, Path]
    oracle: AdapterOracle

    @property
    def modules(self) -> list[str]:
        """Return the adapters in the form of --lora-modules."""
        return [f"{name}={path}" for name, path in self.adapters.items()]

    @property
    def names(self) -> list[str]:
        return [BASE, *self.adapters]


def make_models(root: Path, family: str, count: int = len(KINDS), **fields: object) -> Models:
    checkpoint = tiny_checkpoint(root / "model", family, vocab_size=VOCAB_SIZE, **fields)
    adapters = {path.name: path for path in write_adapters(root / "adapters", checkpoint, count)}
    return Models(checkpoint, adapters, AdapterOracle(checkpoint, adapters))


def open_llm(models: Models, **options: object) -> LLM:
    """Start an engine in this process that serves all adapters of the models."""
    fixed: dict[str, object] = {"in_process": True, "lora_modules": models.modules}
    return LLM(models.checkpoint, **(OPTIONS | fixed | options))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Requests:
    """Prompts with their adapters and parameters; request i uses adapter i modulo their number, the base included."""

    prompts: list[list[int]]
    adapters: list[str]
    params: list[SamplingParams]

    def run(self, client: Client) -> list[RequestOutput]:
        """Run all requests at once."""
        loras = [lora(name) for name in self.adapters]
        return client.generate(self.prompts, self.params, use_tqdm=False, lora_request=loras)

    def check(self, oracle: AdapterOracle, outputs: Sequence[RequestOutput]) -> None:
        for adapter, output, params in zip(self.adapters, outputs, self.params, strict=True):
            oracle.check(adapter, output, params)


def lora(name: str) -> LoRARequest | None:
    return LoRARequest(name) if name != BASE else None


def make_requests(names: Sequence[str], count: int, seed: int, max_tokens: int = MAX_TOKENS) -> Requests:
    """Return requests with prompts that begin alike. Every third is seeded with n = 2, the others are greedy."""
    rng = random.Random(seed)
    stem = [rng.randrange(256) for _ in range(40)]
    prompts = [
        stem[: rng.randrange(41)] + [rng.randrange(256) for _ in range(rng.randrange(1, 30))] for _ in range(count)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    seeded = greedy.replace(temperature=1.5, n=2)
    params = [seeded.replace(seed=i) if i % 3 == 2 else greedy for i in range(count)]
    return Requests(prompts, [names[i % len(names)] for i in range(count)], params)


def check_strength(client: Client, names: Sequence[str]) -> None:
    """Check that every adapter changes the greedy answer to one prompt in a way of its own."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompt = list(range(60, 90))
    outputs = client.generate(
        [prompt] * len(names), params, use_tqdm=False, lora_request=[lora(name) for name in names]
    )
    check_each_differs({name: each.outputs[0].token_ids for name, each in zip(names, outputs, strict=True)})
