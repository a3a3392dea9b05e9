"""EngineSpec: the resolved configuration that every process of an engine gets at its start; it never changes.

The supervisor builds it (`frontend/checkpoint/resolve.py`) and passes it as JSON in the environment: unlike a command
line, other users of the machine cannot read it, and it may contain an API key.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from ...kv.pool_shape import PoolShape
from ...messages.base import PROTOCOL_VERSION, Hello, Rank, Welcome
from ...messages.core import GatewayHello, ModelDigest
from ...sockets.endpoints import Endpoints
from ...sockets.keys import Keys
from ..kv.kv_groups import KVGroup, is_grouped, kv_groups, num_held
from ..models.model_config import ModelConfig
from .cache_folder import triton_environment
from .engine_config import EngineConfig
from .gateway_places import core_addresses
from .option_ranges import AUTO_LENGTH
from .speculation import MAX_DRAFTS, DraftSpec

VARIABLE = "TOKENLOOM_SPEC"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration with the values that follow from checkpoint and machine, such as dtype and device. `config` is
    the given one: its automatic values stay `auto`. Workers measure the KV pool's size later; if config.max_model_len
    is auto, the length follows from that size (`fitted_model_len`), and max_model_len here is its upper limit."""

    run_id: str  # 16 hex characters, new for each engine
    run_directory: str
    endpoints: Endpoints
    config: EngineConfig
    model: ModelConfig
    model_folder: str
    tokenizer_folder: str
    served_model_name: str  # the name in responses
    model_aliases: list[str] = []  # other names that requests may use
    takes_any_name: bool = False  # requests with unknown names get the model
    default_sampling_params: dict[str, int | float] = {}  # for fields of SamplingParams that a request leaves out
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    has_integer_products: bool = False  # quantized weights are multiplied as integers
    draft: DraftSpec | None = None  # None: there is no draft model
    max_model_len: int
    max_item_embeds: int = 0  # embeddings of the largest medium that the model takes; 0: it takes text alone
    encoder_cache_tokens: int = 0  # embeddings of media that each worker keeps
    host_address: str = ""  # IP address of this host, for others; empty: all ranks are on one host
    replica: int = 0  # number of this process's replica; 0 also in processes that serve all replicas
    digest: ModelDigest | None = None  # digest of the model at the start, made by `resolve`
    group_keys: Keys | None = None  # keys of the sockets between the head and ranks on other hosts

    @property
    def fingerprint(self) -> str:
        """A hash that is equal in all processes of one engine, on all hosts, and differs between engines."""
        shared = msgspec.structs.replace(
            self,
            run_directory="",
            model_folder="",
            tokenizer_folder="",
            host_address="",
            replica=0,
            draft=self.draft and msgspec.structs.replace(self.draft, folder=""),
            endpoints=Endpoints.in_folder(""),
        )
        return hashlib.sha256(msgspec.json.encode(shared, order="deterministic")).hexdigest()[:16]

    def on_host(
        self, host_address: str, run_directory: str, model_folder: str, draft: DraftSpec | None = None
    ) -> EngineSpec:
        """Return the specification for the ranks on another host, where files have other paths. draft: the draft model
        there. `endpoints.control` and `endpoints.blobs` stay: these ranks can reach the head at them."""
        endpoints = Endpoints.in_folder(run_directory)
        return msgspec.structs.replace(
            self,
            host_address=host_address,
            run_directory=run_directory,
            model_folder=model_folder,
            tokenizer_folder=model_folder,
            draft=draft,
            endpoints=msgspec.structs.replace(endpoints, control=self.endpoints.control, blobs=self.endpoints.blobs),
        )

    def of_replica(self, replica: int) -> EngineSpec:
        """Return the specification for the core and the workers of a replica, which have their own sockets and files
        in the same run directory."""
        return msgspec.structs.replace(self, replica=replica, endpoints=self.endpoints.of_replica(replica))

    @property
    def client_addresses(self) -> list[str]:
        """The addresses for clients: one for each frontend."""
        return [self.endpoints.clients_of(index) for index in range(self.config.api_server_count)]

    @property
    def remote_cores(self) -> list[str]:
        """The addresses of a gateway's cores; none for an engine."""
        return [] if self.config.cores is None else core_addresses(self.config.cores)

    @property
    def num_cores(self) -> int:
        return len(self.remote_cores) or self.config.data_parallel_size

    @property
    def core_listen(self) -> str | None:
        """The address of this replica's core for gateways; None if it has none."""
        if self.config.core_listen is None:
            return None
        host, _, port = self.config.core_listen.rpartition(":")
        return f"{host}:{int(port) + self.replica}"

    def own_file(self, name: str) -> Path:
        """Return the path, in the run directory, of a file or folder that each replica has for itself."""
        return Path(self.run_directory) / (f"replica-{self.replica}-{name}" if self.replica else name)

    def identity(self, name: str, number: int) -> bytes:
        """Return the identity of a process of this replica on the socket of the supervisor."""
        return identity_of(process_name(name, self.replica), number)

    def secure_to_head(self, socket: zmq.Socket[bytes]) -> None:
        """Set on a socket the keys with which ranks on other hosts connect to the head; do nothing on the head."""
        if self.group_keys is not None and not self.is_on_head:
            self.group_keys.secure_client(socket)

    @property
    def is_on_head(self) -> bool:
        """Whether this process runs on the host of the supervisor, which it reaches without a network."""
        return self.endpoints.control.startswith("ipc://")

    @property
    def hello_to_core(self) -> Hello | GatewayHello:
        """The first message of a frontend to a core."""
        if not self.remote_cores:
            return self.hello
        assert self.digest is not None
        return GatewayHello(protocol_version=PROTOCOL_VERSION, model=self.digest)

    @property
    def welcome(self) -> Welcome:
        """The reply to the Hello of a client."""
        digest = "" if self.digest is None else self.digest.text
        return Welcome(protocol_version=PROTOCOL_VERSION, run_id=self.run_id, model_digest=digest)

    @property
    def hello(self) -> Hello:
        """The first message on each connection between processes of this engine."""
        return Hello(protocol_version=PROTOCOL_VERSION, run_id=self.run_id, fingerprint=self.fingerprint)

    def mismatch(self, hello: Hello) -> str:
        """Return the reason why the sender of a Hello does not belong to this engine, or ""."""
        if (hello.protocol_version, hello.fingerprint) == (PROTOCOL_VERSION, self.fingerprint):
            return ""
        return (
            f"speaks protocol {hello.protocol_version} of run {hello.run_id}, "
            f"this is protocol {PROTOCOL_VERSION} of run {self.run_id}"
        )

    @property
    def model_names(self) -> list[str]:
        """All names that requests may use; the first is the one in responses."""
        return [self.served_model_name, *self.model_aliases]

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests share the KV blocks of equal prefixes; False if layers also keep a recurrent state, or if
        tokens see those behind them."""
        return self.config.enable_prefix_caching and not (self.model.has_state or self.model.is_encoder)

    @property
    def uses_tiers(self) -> bool:
        """Whether KV blocks are also kept outside the pool: an option asks for it, and requests share prefixes."""
        return self.config.has_tiers and self.shares_prefixes

    @property
    def numbers(self) -> str:
        """Description of the numbers that layers compute with; see `numbers_of`."""
        return numbers_of(self.dtype, has_integer_products=self.has_integer_products)

    @property
    def max_num_batched_tokens(self) -> int:
        """Token budget of one step: as configured, else 512 on a CPU and 2048 elsewhere, at least max_num_seqs. A CPU
        needs only a few hundred tokens for full throughput; more would only delay other requests. If the tokens of an
        image attend to later ones, the budget is enough for the largest image and a token of each other request. An
        encoder, whose prompts are computed as a whole, has room for the longest by default."""
        default = 512 if self.device == "cpu" else 2048
        if self.model.is_encoder:
            default = max(2048, self.max_model_len)
        budget = self.config.max_num_batched_tokens or max(default, self.config.max_num_seqs)
        is_bidirectional = self.model.encoder is not None and self.model.encoder.is_bidirectional
        return max(budget, self.max_item_embeds + self.config.max_num_seqs) if is_bidirectional else budget

    @property
    def max_text_len(self) -> int:
        """Most tokens of a request that go through the model's layers: all but those of a clip at its start."""
        return self.max_model_len - self.model.num_clip_tokens

    @property
    def max_logprobs(self) -> int:
        """The largest `logprobs` that a request may ask for."""
        limit, vocab_size = self.config.max_logprobs, self.model.vocab_size
        return vocab_size if limit == -1 else min(limit, vocab_size)

    @property
    def max_request_tokens(self) -> int:
        """Most prompt tokens × n of one request: a quarter of the queue or, if more, max_model_len (cut to the
        queue)."""
        return max(self.config.max_waiting_tokens // 4, min(self.max_model_len, self.config.max_waiting_tokens))

    @property
    def max_step_blocks(self) -> int:
        """The most KV blocks of an encoder's step, whose prompts begin in blocks of their own."""
        budget, size = self.max_num_batched_tokens, self.config.block_size
        return -(-budget // size) + min(self.config.max_num_seqs, budget)

    @property
    def max_blocks_per_row(self) -> int:
        """KV blocks of a request of max_model_len tokens."""
        return -(-self.max_model_len // self.config.block_size)

    @property
    def kv_groups(self) -> list[KVGroup]:
        """The KV groups of the model's layers. ConfigError if there are too many."""
        return self.kv_groups_of(self.model)

    def kv_groups_of(self, layers: ModelConfig) -> list[KVGroup]:
        """Return the KV groups of `layers`, the model or some of its layers. ConfigError if there are too many."""
        return kv_groups(layers, self.max_model_len, is_grouped=is_grouped(self.model))

    @property
    def step_tokens(self) -> int:
        """The most tokens of a row in one step, and those that steps in flight sample."""
        return self.max_num_batched_tokens + self.config.steps_in_flight * (1 + MAX_DRAFTS)

    def num_held(self, num_tokens: int) -> list[int]:
        """Return the most KV blocks of each group that a request of `num_tokens` holds at a time."""
        return num_held(self.kv_groups, num_tokens, self.step_tokens, self.config.block_size)

    def fitted_model_len(self, pool: PoolShape) -> int:
        """Return max_model_len; if it is `auto`, cut to the longest request, in whole blocks, that the pool has room
        for."""
        if self.config.max_model_len != AUTO_LENGTH:
            return self.max_model_len
        size = self.config.block_size
        counts = range(1, self.max_blocks_per_row + 1)
        num_blocks = bisect_right(counts, pool.num_slabs, key=lambda n: pool.num_slabs_for(self.num_held(n * size)))
        return min(self.max_model_len, num_blocks * size)

    @property
    def ranks(self) -> list[Rank]:
        """The workers of a group; all are in one pipeline stage."""
        return [Rank(pp=0, tp=tp) for tp in range(self.config.tensor_parallel_size)]

    def host_of(self, rank: Rank) -> int:
        """Return the number of the host of a rank of this replica: 0 is the head."""
        return self._host_of(self._place_of(rank))

    def local_workers(self, rank: Rank) -> range:
        """Return the numbers, among the workers of all replicas, of those that share CPUs, GPUs and memory with a rank
        of this replica."""
        host = self.host_of(rank)
        places = range(self.config.data_parallel_size * self.config.tensor_parallel_size)
        first = next(place for place in places if self._host_of(place) == host)
        return range(first, first + sum(self._host_of(place) == host for place in places))

    def local_number(self, rank: Rank) -> int:
        """Return the number of a rank of this replica among the workers of its host, which is its GPU's number."""
        return self._place_of(rank) - self.local_workers(rank).start

    def num_workers_on(self, host: int) -> int:
        """Return how many workers, of all replicas, run on a host."""
        places = range(self.config.data_parallel_size * self.config.tensor_parallel_size)
        return sum(self._host_of(place) == host for place in places)

    def _place_of(self, rank: Rank) -> int:
        """Return the number of a rank of this replica among the workers of all replicas."""
        return self.replica * self.config.tensor_parallel_size + rank.tp

    def _host_of(self, place: int) -> int:
        """Return the host of the worker with number `place`. Workers are spread evenly, neighbours on one host."""
        return place * self.config.hosts // (self.config.data_parallel_size * self.config.tensor_parallel_size)

    @property
    def hosts_key_file(self) -> Path:
        """The file with the agents' keys: the given file, or the one that this engine made for agents placed by Ray."""
        return Path(self.config.hosts_key_file or Path(self.run_directory) / "hosts.key")

    @property
    def hosts(self) -> list[int]:
        """The numbers of the hosts with ranks of this replica."""
        return sorted({self.host_of(rank) for rank in self.ranks})

    def ranks_on(self, host: int) -> list[Rank]:
        """Return the ranks of this replica on a host."""
        return [rank for rank in self.ranks if self.host_of(rank) == host]

    @property
    def profile_folder(self) -> Path:
        """The folder for the traces of start_profile."""
        return Path(self.config.profile_dir or Path(self.run_directory) / "profiles").absolute()

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the spec, for a child that calls `from_environment`."""
        # One tokenizer thread: more would compete for CPUs with the threads that compute.
        defaults = {"TOKENIZERS_PARALLELISM": "false"}
        if self.device == "cuda":
            defaults |= triton_environment(self.run_directory)
        return {**defaults, **os.environ, "PYTHONUTF8": "1", VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> EngineSpec:
        return msgspec.json.decode(os.environ[VARIABLE], type=cls)


def process_name(name: str, replica: int) -> str:
    """Return the name of a process in logs and errors: "core", "worker 0"; after the first replica "core of replica
    1"."""
    return f"{name} of replica {replica}" if replica else name


def frontend_name(index: int) -> str:
    """Return the name of a frontend in logs and errors: "frontend"; after the first "frontend 1"."""
    return f"frontend {index}" if index else "frontend"


def host_process_name(name: str, host: int) -> str:
    """Return the name of a process of which each host has one: "tier"; on other hosts "tier of host 1"."""
    return f"{name} of host {host}" if host else name


def identity_of(process: str, number: int) -> bytes:
    """Return the identity of a process, by its name and number, on its sockets to the supervisor and the core."""
    return f"{process.replace(' ', '-')}-{number}".encode()


def numbers_of(dtype: str, *, has_integer_products: bool) -> str:
    """Return a description of the numbers that layers of `dtype` compute with. Engines with different numbers compute
    different answers and KV blocks."""
    return f"{dtype}, integer products" if has_integer_products else dtype
