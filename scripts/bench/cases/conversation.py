"""Measure how much of a growing conversation is computed again at each turn.

    engine-launch bench conversation 20m-gemma3 --deterministic --llama-bin FOLDER

Each prompt is the one before, its answer of 60 to 400 tokens, and 100 to 900 new random tokens, as of tools' results.
With --thoughts an answer begins with as many tokens more, which the next prompt leaves out as chat templates do: of
that turn it shares the prompt alone.
Printed for each turn: the prompt's tokens, those that the turn before has computed or sampled, and how many of these
are computed again. Every so many turns the same prompt is computed without the prefix cache: with --deterministic the
tokens and their logprobs have the same bits. With --kill-every, an engine with a disk has the same conversation: after
so many turns all its processes are killed with SIGKILL, and a new one finds the conversation on the disk. Printed: the
share of known tokens that it finds, and how many of its answers have the bits of the engine that lived on. With
--llama-bin, a folder of llama.cpp's programs, and a GGUF file as the model (inputs/random_gguf.py writes 20m-gemma3 as
one), llama-server has conversations of the same lengths, by its own count of computed tokens: as it comes, and with a
cache that keeps what windows have left.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from tokenloom import LLM, Client, SamplingParams
from tokenloom.scripts.bench.cases.compare import gguf_file
from tokenloom.scripts.bench.contestant import ANSWER_TIMEOUT_S
from tokenloom.scripts.bench.engine_process import Engine as Process
from tokenloom.scripts.bench.http_server import HOST
from tokenloom.scripts.bench.llama_cpp import LlamaCpp
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import flags_of
from tokenloom.workers.machine.cpu_threads import num_cpu_threads

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1)
HOST_BYTES = 4 << 30  # of an engine with a disk: more than a conversation
SETTLE_S = 1.0  # without a new object, after which the disk has everything
OPEN_S = 60.0  # longest wait for the disk after a start
LLAMA_SERVERS = {"llama_server": [], "llama_server_swa_full": ["--swa-full", "--cache-reuse", "256"]}


class Turn(NamedTuple):
    """An answer, and the number of tokens of its prompt that were computed."""

    token_ids: list[int]
    num_computed: int


class Talker(Protocol):
    """A contestant with a prefix cache."""

    def answer(self, prompt: list[int], num_tokens: int) -> Turn:
        """Return a greedy answer of exactly `num_tokens`."""
        ...


class Engine:
    """This engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(self, prompt: list[int], num_tokens: int) -> Turn:
        params = PARAMS.replace(max_tokens=num_tokens)
        (output,) = self._llm.generate([prompt], params, use_tqdm=False)
        self.last = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        return Turn(list(output.outputs[0].token_ids), len(prompt) - output.num_cached_tokens)

    def has_equal_bits(self, prompt: list[int], num_tokens: int) -> bool:
        """Return whether the answer has the same tokens and logprobs with and without the prefix cache."""
        found = []
        for is_cold in (False, True):
            params = PARAMS.replace(max_tokens=num_tokens, skip_reading_prefix_cache=is_cold)
            (output,) = self._llm.generate([prompt], params, use_tqdm=False)
            found.append((list(output.outputs[0].token_ids), output.outputs[0].logprobs))
        return found[0] == found[1]


class KilledEngine:
    """This engine with a disk, and all of its processes killed before a turn."""

    def __init__(self, setup: Setup, options: dict[str, object]) -> None:
        self._root = Path(setup.stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-conversation-")))
        self._setup = setup
        self._command = ["serve", str(setup.folder), *flags_of(options)]
        self._command += ["--kv-disk", str(self._root / "kv"), "--kv-host-bytes", str(HOST_BYTES)]
        self.num_known = self.num_found = self.num_kills = 0  # after kills
        self._start()

    def _start(self) -> None:
        runtime = self._root / f"run{self.num_kills}"
        runtime.mkdir()
        self._engine = self._setup.stack.enter_context(Process(runtime, self._command, has_faults=False))
        self._engine.wait_ready()
        self._engine.wait_log("blocks of this model")
        self._client = self._setup.stack.enter_context(Client(self._engine.address))

    def kill(self) -> None:
        """Wait until the disk has everything, kill all processes, and start again."""
        num_objects = -1
        while num_objects != (num_objects := sum(1 for _ in (self._root / "kv").glob("*/??/*"))):
            time.sleep(SETTLE_S)
        for process in self._engine.processes():
            process.kill()
        self._engine.wait_exit()
        self.num_kills += 1
        self._start()

    def answer(self, prompt: list[int], num_tokens: int) -> Turn:
        params = PARAMS.replace(max_tokens=num_tokens)
        (output,) = self._client.generate([prompt], params, use_tqdm=False)
        self.last = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        return Turn(self.last[0], len(prompt) - output.num_cached_tokens)

    def answer_after_kill(self, prompt: list[int], num_tokens: int, num_known: int) -> None:
        """Kill the engine; then answer a prompt of which the turn before has computed `num_known` tokens, once its
        blocks are loaded."""
        self.kill()
        deadline = time.monotonic() + OPEN_S
        while not self._client.prefetch_kv(prompt) and time.monotonic() < deadline:
            time.sleep(0.1)  # the core does not know yet that the disk is open
        turn = self.answer(prompt, num_tokens)
        self.num_known += num_known
        self.num_found += min(len(prompt) - turn.num_computed, num_known)


class LlamaServer:
    """llama-server with one slot."""

    def __init__(self, port: int) -> None:
        self._port = port

    def answer(self, prompt: list[int], num_tokens: int) -> Turn:
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port, timeout=ANSWER_TIMEOUT_S)) as connection:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        return Turn(answer["tokens"], int(answer["timings"]["prompt_n"]))


class Conversation:
    """A conversation of random tokens with a contestant. All have the same lengths."""

    def __init__(self, talker: Talker, setup: Setup) -> None:
        self._talker, self._vocab_size, self._asked = talker, setup.workload.vocab_size, setup.arguments
        self._draw = random.Random(0)
        self.prompt = self._tokens(self._asked.first)
        self.num_known = self.num_again = self.num_answered = self.num_thoughts = 0  # of the turn
        self.num_known_of_all = self.num_again_of_all = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(count)]

    def turn(self) -> None:
        """Run a turn on the current prompt."""
        self.num_thoughts = self._draw.randint(*self._asked.thoughts)
        self.num_answered = self.num_thoughts + self._draw.randint(*self._asked.answer)
        answer = self._talker.answer(self.prompt, self.num_answered)
        self.num_again = max(answer.num_computed - (len(self.prompt) - self.num_known), 0)
        self.num_known_of_all += self.num_known
        self.num_again_of_all += self.num_again
        self._answer = answer.token_ids

    def extend(self) -> None:
        """Put the last answer, without its thoughts, and new tokens behind the prompt."""
        said = self._answer[self.num_thoughts :]
        self.num_known = len(self.prompt) + (0 if self.num_thoughts else len(said))
        self.prompt = [*self.prompt, *said, *self._tokens(self._draw.randint(*self._asked.result))]


def length_of(setup: Setup) -> int:
    """Return the largest number of tokens that the conversation may have."""
    asked = setup.arguments
    return int(asked.first + asked.turns * (asked.answer[1] + asked.result[1]) + asked.thoughts[1])


def talkers(setup: Setup) -> dict[str, Talker]:
    """Start the contestants; they end with the setup's stack."""
    asked, length = setup.arguments, length_of(setup)
    options = {"max_model_len": length, **setup.options}
    found: dict[str, Talker] = {"tokenloom": Engine(setup.stack.enter_context(LLM(setup.folder, **options)))}
    if asked.llama_bin is not None:
        programs = LlamaCpp(asked.llama_bin, num_cpu_threads(None, 1))
        file = gguf_file(sys.executable, setup.folder, "BF16")
        for name, more in LLAMA_SERVERS.items():
            server = programs.server(file, length, options=more)
            setup.stack.callback(server.stop)
            server.wait_ready()
            found[name] = LlamaServer(server.port)
    return found


def measure(setup: Setup) -> None:
    asked, report, equal = setup.arguments, setup.report, list[bool]()
    contestants = talkers(setup)
    ours = contestants["tokenloom"]
    assert isinstance(ours, Engine)
    conversations = {name: Conversation(each, setup) for name, each in contestants.items()}
    killed, equal_after_kills = None, list[bool]()
    if asked.kill_every:
        killed = KilledEngine(setup, {"max_model_len": length_of(setup), **setup.options})
    for number in range(asked.turns):
        for each in conversations.values():
            each.turn()
        first = conversations["tokenloom"]
        if killed is not None and number % asked.kill_every == asked.kill_every - 1:
            killed.answer_after_kill(first.prompt, first.num_answered, first.num_known)
            equal_after_kills.append(killed.last == ours.last)
        elif killed is not None:
            killed.answer(first.prompt, first.num_answered)
        again = {f"again_{name}": each.num_again for name, each in conversations.items()}
        report.add(turn=number + 1, prompt=len(first.prompt), known=first.num_known, **again)
        if asked.cold_every and number % asked.cold_every == asked.cold_every - 1:
            equal.append(ours.has_equal_bits(first.prompt, first.num_answered))
        for each in conversations.values():
            each.extend()
    for name, each in conversations.items():
        report.note(f"known tokens found by {name}", 1 - each.num_again_of_all / each.num_known_of_all)
    if killed is not None and killed.num_known:
        report.note("known tokens found on the disk after kills", killed.num_found / killed.num_known)
        report.note("answers after kills with equal bits", f"{sum(equal_after_kills)} of {len(equal_after_kills)}")
    if equal:
        report.note("answers with the bits of a cold prompt", f"{sum(equal)} of {len(equal)}")


OPTIONS = {
    "--first": (1500, "tokens of the first prompt"),
    "--answer": ([60, 400], "the fewest and the most tokens of an answer"),
    "--thoughts": ([0, 0], "the same of its tokens before, which the next prompt leaves out"),
    "--result": ([100, 900], "the same of what follows it"),
    "--turns": (43, "of the conversation"),
    "--cold-every": (8, "turns between prompts that are computed again without the prefix cache; 0: none"),
    "--kill-every": (0, "turns between kills of all processes of an engine with a disk; 0: there is none"),
    "--llama-bin": (None, "the folder of llama.cpp's programs", Path),
}
CASE = Case("conversation", measure, OPTIONS, rounds=0)
