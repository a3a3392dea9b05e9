"""EngineSpec: what every process of one engine is told at its start; it never changes while the engine lives.

Made by the supervisor (`frontend/supervisor/resolve.py` resolves paths, model and defaults), carried as JSON in the
environment: a command line is for all users of a machine to read, and the configuration can hold a key.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from ..messages.base import PROTOCOL_VERSION, Hello
from .engine_config import EngineConfig
from .model_config import ModelConfig

VARIABLE = "TOKENLOOM_SPEC"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved configuration: nothing in here is automatic any more except what a worker measures."""

    run_id: str  # 16 hex characters, new for each engine
    run_directory: str
    client_address: str  # where the frontend listens for clients
    config: EngineConfig
    model: ModelConfig
    model_folder: str
    tokenizer_folder: str
    served_model_name: str  # that of answers
    model_aliases: list[str] = []  # further names that requests may give
    default_sampling_params: dict[str, int | float] = {}  # of requests that say nothing, by the names of SamplingParams
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    max_model_len: int

    @property
    def fingerprint(self) -> str:
        """Equal in all processes of one engine and in no other engine."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]

    @property
    def hello(self) -> Hello:
        """What each process says first to another of this engine."""
        return Hello(protocol_version=PROTOCOL_VERSION, run_id=self.run_id, fingerprint=self.fingerprint)

    @property
    def model_names(self) -> list[str]:
        """All that requests may give, the one of answers first."""
        return [self.served_model_name, *self.model_aliases]

    @property
    def max_num_batched_tokens(self) -> int:
        """Token budget of one step. A CPU is as fast with few hundred tokens as with thousands, and then nobody waits
        longer than that for a turn."""
        default = 512 if self.device == "cpu" else 2048
        return self.config.max_num_batched_tokens or max(default, self.config.max_num_seqs)

    @property
    def max_logprobs(self) -> int:
        """Most tokens that a request may ask logprobs of beside each token."""
        limit, vocab_size = self.config.max_logprobs, self.model.vocab_size
        return vocab_size if limit == -1 else min(limit, vocab_size)

    @property
    def max_request_tokens(self) -> int:
        """Prompt tokens of one request, counted for each answer: a quarter of the queue, or one longest prompt."""
        return max(self.config.max_waiting_tokens // 4, min(self.max_model_len, self.config.max_waiting_tokens))

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks that a request of max_model_len needs."""
        return -(-self.max_model_len // self.config.block_size)

    def address(self, name: str) -> str:
        """The ipc endpoint `name` in the run directory: control, core, workers-G, results-G."""
        return f"ipc://{self.run_directory}/{name}.sock"

    @property
    def profile_folder(self) -> Path:
        """Where traces are written."""
        return Path(self.config.profile_dir or Path(self.run_directory) / "profiles").absolute()

    def environment(self) -> dict[str, str]:
        """This process's environment for a child that calls `from_environment`. Names of files are UTF-8 to the child,
        and its tokenizer takes one thread for a text: more would take the CPUs of the threads that compute."""
        parallelism = {"TOKENIZERS_PARALLELISM": "false"}
        return {**parallelism, **os.environ, "PYTHONUTF8": "1", VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> EngineSpec:
        return msgspec.json.decode(os.environ[VARIABLE], type=cls)
