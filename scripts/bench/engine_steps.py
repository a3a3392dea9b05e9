"""Run the core or the frontend alone, one step at a time, with N answers that grow by one token a step.

cases/engine.py times these steps, profile_engine.py profiles them and tests count their calls: real objects and real
messages, without sockets or other processes.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from tokenloom.core.engine import EngineCore
from tokenloom.core.features.grammar.local_helper import LocalGrammarHelper
from tokenloom.core.features.new import Surroundings
from tokenloom.frontend.checkpoint.resolve import resolve
from tokenloom.frontend.server.requests.frontend import Frontend
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.codec import encode, encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Welcome
from tokenloom.ipc.messages.client import Credit, Submit
from tokenloom.ipc.messages.core import CoreChild, EngineCoreOutputs, EngineCoreRequest
from tokenloom.ipc.messages.workers import ModelRunnerOutput, SchedulerOutput, TokenMask
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.scripts.bench.null_worker import FIRST_BYTE, NUM_BYTES, NullWorker

STEPS_AHEAD = 16  # decode steps before the first that counts
CLIENT = b"client of the test"


def new_spec(config: EngineConfig) -> EngineSpec:
    """Return the specification of an engine that is never started."""
    run_directory = RunDirectory.create()
    try:
        return resolve(config, run_directory)
    finally:
        run_directory.remove()


class Calls:
    """Counter of the calls of Python and C functions in this thread, as a context. No garbage is collected meanwhile:
    others' callbacks of the collector would count."""

    def __init__(self) -> None:
        self.count = 0
        self._collects = gc.isenabled()

    def __enter__(self) -> Calls:
        gc.disable()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


class Executor:
    """Executor that keeps the core's newest step for the null worker."""

    def __init__(self) -> None:
        self.step: SchedulerOutput | None = None

    def send(self, message: SchedulerOutput | TokenMask) -> None:
        assert isinstance(message, SchedulerOutput)
        self.step = message


class CoreSteps:
    """A core whose `num_rows` rows decode for `num_steps` steps, one step in flight. Call `schedule`, `execute` and
    `update` in turn."""

    def __init__(self, config: EngineConfig, num_rows: int, num_steps: int) -> None:
        config = msgspec.structs.replace(config, steps_in_flight=1)
        spec = new_spec(config)
        max_tokens = STEPS_AHEAD + num_steps + 4
        num_blocks = num_rows * (-(-(max_tokens + 4) // config.block_size) + 1) + 2
        self._worker, self._executor = NullWorker(spec), Executor()
        pool = PoolShape(num_blocks, 1, (1,))
        self.core = EngineCore(spec, pool, self._executor, Surroundings(LocalGrammarHelper(spec)))
        for key in range(num_rows):
            self.core.add_request(0, _decode_request(key, max_tokens))
        for _ in range(STEPS_AHEAD):
            self.schedule()
            self.update(self.execute())

    def schedule(self) -> bytes:
        """Schedule the next step and return its encoded message to the workers."""
        self.core.step()
        assert self._executor.step is not None, "rows are left"
        return encode(self._executor.step)

    def execute(self) -> ModelRunnerOutput:
        assert self._executor.step is not None
        return self._worker.execute(self._executor.step)

    def update(self, result: ModelRunnerOutput) -> list[bytes]:
        """Apply a step's result and return the encoded messages to frontends."""
        self.core.on_result(result)
        return [encode(outputs) for _, outputs in self.core.take_outputs()]


def _decode_request(key: int, max_tokens: int) -> EngineCoreRequest:
    """Return a request with one prompt token, so that all steps but the first decode."""
    return EngineCoreRequest(
        children=[CoreChild(key=key, seed=key)],
        prompt_token_ids=encode_ids([key]),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        max_tokens=max_tokens,
        stop_token_ids=[],
        arrival_time=time.time(),
    )


def new_frontend(config: EngineConfig) -> tuple[Frontend, EngineSpec]:
    """Return a frontend in the state after a core's Welcome, though there is no core, and its spec."""
    spec = new_spec(config)
    folder = Path(spec.tokenizer_folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    template = ChatTemplate.load(folder, tokenizer)
    frontend = Frontend(spec, tokenizer, template, lambda: None)
    frontend.connect()
    frontend.on_core_message(Welcome(protocol_version=PROTOCOL_VERSION, run_id=spec.run_id))
    frontend.outbox.to_cores[0].clear()
    return frontend, spec


def submitted_keys(frontend: Frontend) -> list[int]:
    """Remove the requests waiting for the core and return their keys."""
    messages = [each for each in frontend.outbox.to_cores[0] if isinstance(each, EngineCoreRequest)]
    frontend.outbox.to_cores[0].clear()
    return [child.key for message in messages for child in message.children]


def one_token_each(keys: list[int], start: int) -> EngineCoreOutputs:
    """Return the core's message that gives each request the token with output index `start`."""
    token_ids = [(start + key) % NUM_BYTES + FIRST_BYTE for key in keys]
    counts = encode_ids([1] * len(keys))
    starts = encode_ids([start] * len(keys))
    return EngineCoreOutputs(
        keys=encode_ids(keys),
        starts=starts,
        counts=counts,
        token_ids=encode_ids(token_ids),
        accepted=keys if start == 0 else [],
    )


class FrontendSteps:
    """A frontend with one client, whose `num_answers` requests get one token each in every `turn`."""

    def __init__(self, config: EngineConfig, num_answers: int, stop: Sequence[str] = ()) -> None:
        self.frontend, _ = new_frontend(config)
        self._tell(Hello(protocol_version=PROTOCOL_VERSION))
        params = SamplingParams(max_tokens=4096, ignore_eos=True, stop=list(stop))
        for number in range(num_answers):
            self._tell(Submit(request_id=f"request-{number}", params=params, prompt_token_ids=encode_ids([number])))
        self._keys = submitted_keys(self.frontend)
        assert len(self._keys) == num_answers
        self._num_turns = 0
        for _ in range(STEPS_AHEAD):
            self.turn(self.message())

    def _tell(self, message: Hello | Submit | Credit) -> None:
        self.frontend.on_client_frame(CLIENT, encode(message))

    def message(self) -> EngineCoreOutputs:
        """Return the message that a core would send next: one token for each request."""
        return one_token_each(self._keys, self._num_turns)

    def turn(self, outputs: EngineCoreOutputs) -> list[tuple[bytes, bytes]]:
        """Apply the core's message; return the identity and frame of each message to clients."""
        self._num_turns += 1
        self.frontend.on_core_message(outputs)
        self.frontend.tick(time.monotonic())
        frames = self.frontend.outbox.to_clients.copy()
        self.frontend.outbox.to_clients.clear()
        self._tell(Credit(count=1))
        return frames


class FrontendSubmits:
    """A frontend with one client, whose requests are opened and then dropped before they have a token."""

    def __init__(self, config: EngineConfig) -> None:
        self._frontend, _ = new_frontend(config)

    def open(self, frames: Sequence[bytes]) -> float:
        """Open a request for each frame of a Submit; return the CPU seconds of one."""
        self._frontend.on_client_frame(CLIENT, encode(Hello(protocol_version=PROTOCOL_VERSION)))
        gc.collect()
        begun = time.thread_time()
        for frame in frames:
            self._frontend.on_client_frame(CLIENT, frame)
        used = time.thread_time() - begun
        assert len(submitted_keys(self._frontend)) == len(frames), "all are opened at once"
        self._frontend.on_client_lost(CLIENT, "gone", "the benchmark goes on")
        self._frontend.outbox.to_cores[0].clear()
        return used / len(frames)
