"""Workload: the requests of a benchmark, their model and the engine's options. Nothing here imports torch.

A model is a folder, a GGUF file, `demo`, or a name of make_checkpoint.py (135m, 0.6b, …), which is written once to the
user's cache. Prompts are random token ids, new for each round and for the warm-up, so that the prefix cache never hits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenloom.frontend.checkpoint.gguf.folder import REMEDY, SUFFIX, checkpoint_folder
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.cache_folder import private_cache
from tokenloom.ipc.spec.config.engine_config import EngineConfig

FIRST_ID = 10  # many vocabularies have special tokens below
MAKE_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Workload:
    """`num_requests` requests of `num_in` random prompt tokens and exactly `num_out` answer tokens each."""

    num_requests: int
    num_in: int
    num_out: int
    vocab_size: int

    def prompts(self, name: int | str) -> list[list[int]]:
        """Return the prompts of `name` (a round's number, "warm-up"): equal for equal names, different for others."""
        draw = random.Random(str(name))  # random.Random ignores the sign of an int seed: -1 and 1 would be one seed
        ids = range(min(FIRST_ID, self.vocab_size - 1), self.vocab_size)
        return [draw.choices(ids, k=self.num_in) for _ in range(self.num_requests)]


def engine_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the given engine flags as keywords of LLM. Speculation is off unless it is given: the answers of random
    weights repeat themselves, which makes it look better than it is."""
    names = {field.name for field in msgspec.structs.fields(EngineConfig)}
    options = {"speculation": "off"} | {name: value for name, value in vars(arguments).items() if name in names}
    if "model" in options or arguments.config:
        parser.error("the model is the first argument; --model and --config are not for benchmarks")
    return options


def flags_of(options: dict[str, object]) -> list[str]:
    """Format keywords of LLM as flags of engine-launch."""
    flags = []
    for field in msgspec.structs.fields(EngineConfig):
        if field.name in options:
            value, flag = options[field.name], field.name.replace("_", "-")
            flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def device_of(options: Mapping[str, object]) -> str:
    """Return the device of an engine with these options, cpu or cuda, as frontend/checkpoint/resolve.py chooses it."""
    device = str(options.get("device", "auto"))
    return device if device != "auto" else "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"


def find_checkpoint(name: str, dtype: str = "bfloat16") -> Path:
    """Return a model's folder; write a checkpoint that is known by name if it does not exist yet."""
    if name == "demo":
        return DEMO_FOLDER
    if os.path.isdir(name):
        return Path(name).resolve()
    if name.endswith(SUFFIX):
        return checkpoint_folder(Path(name))

    def write(folder: Path) -> None:
        program = [sys.executable, "-P", "-m", "tokenloom.scripts.bench.inputs.make_checkpoint"]
        command = [*program, name, str(folder), "--dtype", dtype]
        subprocess.run(command, check=True, timeout=MAKE_TIMEOUT_S, cwd="/", stdout=sys.stderr)

    return kept_checkpoint(f"{name}-{dtype}", write)


def kept_checkpoint(name: str, write: Callable[[Path], object]) -> Path:
    """Return the folder of a checkpoint in the user's cache; `write` it if it does not exist yet. ConfigError if it
    cannot be kept there."""
    try:
        cache = private_cache("checkpoints")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise ConfigError(f"the checkpoint {name} cannot be kept in the cache folder ({error}): {REMEDY}") from None
    folder, unfinished = cache / name, cache / f".{name}.{os.getpid()}"
    if not folder.exists():
        try:
            write(unfinished)
            unfinished.rename(folder)
        except (OSError, subprocess.CalledProcessError) as error:  # a writer in a process of its own has said why
            why = error if isinstance(error, OSError) else f"exit code {error.returncode}"
            raise ConfigError(f"the checkpoint {name} could not be written to {cache} ({why}): {REMEDY}") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def vocab_size(folder: Path) -> int:
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    assert isinstance(size, int)
    return size
