"""Measure lookup speculation, on and off in turn within one run.

    engine-launch bench speculation 135m --rounds 3
    engine-launch bench speculation 135m --rounds 20 --cases many
    engine-launch bench speculation FILE.gguf --cases own,own-many --draft-model HEAD

Two engines stay open, one with --speculation lookup, or the --speculation and --draft-model that are given, and one
with off. Answers are real texts, of this repository, and
forced token by token (trace_decode_token_ids): the answers of random weights repeat themselves, which makes every
lookup look better than it is. Token ids are those of the demo model's tokenizer, whose tokens are shorter than those of
a large vocabulary. Cases, one request at a time but for `many`:

    rewrite   the next version of a file that is in the prompt
    code      the rest of a file whose first two thirds, at most 1,500 tokens, are in the prompt
    prose     the same with documentation
    random    random ids
    loops     answers of random weights by themselves
    many      --many requests at once, of code, prose and random ids in turn
    own       20 prompts of chat, code and prose, which a real model answers by itself
    own-many  --many of these at once

With --vllm and --llama-cpp, Pythons that have them, these engines answer the prompts of `loops`, too, with their lookup
and without it; they do not support forced answers.

Printed: tokens per second after the first token; the median over the rounds of on / off, and the interval of that
median (95 %); for `many` also of the 99th percentile between tokens; drafts, accepted drafts, and drafts that the
engine expected to be accepted.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice, pairwise
from pathlib import Path

from tokenloom import LLM, SamplingParams
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.client.transport import Transport
from tokenloom.frontend.forms.prompts import new_submit
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.messages.client import Delta, RequestMetrics
from tokenloom.ipc.messages.metrics import Counter
from tokenloom.scripts.bench.cases.compare import llama_cpp_peer
from tokenloom.scripts.bench.cases.mixed import Load
from tokenloom.scripts.bench.contestant import ANSWER_TIMEOUT_S, PEERS, Peer, median_ratio
from tokenloom.scripts.bench.inputs.own_answers import PROMPTS
from tokenloom.scripts.bench.report import ROOT, median, percentile
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.vllm_setup import check_vllm, tuned_environment
from tokenloom.workers.machine.cpu_threads import num_cpu_threads

CODE = ("core/scheduling/step/rows.py", "workers/sampling/sampler.py", "core/kv/block_pool.py", "frontend/llm.py")
PROSE = ("docs/operate/tiers.md", "docs/learn/lora.md", "docs/operate/operations.md", "docs/design/request.md")
REWRITTEN = ("core/scheduling/scheduler.py", "workers/step/input_batch.py", "core/engine.py", "ipc/messages/workers.py")
NUM_RANDOM = 4  # requests of the case
MAX_PROMPT = 1500  # tokens
CASES = ("rewrite", "code", "prose", "random", "loops", "many")
OWN_CASES = ("own", "own-many")
MANY = ("many", "own-many")  # cases of many requests at once
WARM_UP_TOKENS = 8
DRAFT_OPTIONS = ("speculation", "draft_model", "num_speculative_tokens")  # of the engine with speculation
PEER_DRAFTS = 10  # tokens at a time; the usual choice of llama.cpp's lookup
REPORT_S = 1.2  # until the core has reported all that it has counted
_numbers = count()


@dataclass(frozen=True)
class Task:
    """A prompt and its forced answer; if that is None, the model chooses the answer, up to its own end if `has_end`."""

    prompt: list[int]
    answer: list[int] | None
    has_end: bool = False


@dataclass
class Outcome:
    """Arrival times of the tokens of each answer, and the metrics of their ends."""

    times: list[list[float]]
    metrics: list[RequestMetrics] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second: of a single answer after its first token; of several answers while all of them decode."""
        if len(self.times) == 1:
            return (len(self.times[0]) - 1) / (self.times[0][-1] - self.times[0][0])
        begun, ended = max(each[0] for each in self.times), min(each[-1] for each in self.times)
        return sum(begun < when <= ended for each in self.times for when in each) / (ended - begun)

    @property
    def p99_s(self) -> float:
        """The 99th percentile of the seconds between arrivals of one answer."""
        gaps = [later - when for each in self.times for when, later in pairwise(each)]
        return percentile([gap for gap in gaps if gap > 0], 99)


class ForcedLoad(Load):
    """Requests with forced answers."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.metrics: list[RequestMetrics] = []

    def force(self, task: Task, num_out: int) -> None:
        index = len(self.times)
        self.times.append([])
        self._ids.append(f"forced-{next(_numbers)}")
        answer = None if task.answer is None else task.answer[:num_out]
        num_out = num_out if answer is None else len(answer)
        params = SamplingParams(
            temperature=0.0, max_tokens=num_out, ignore_eos=not task.has_end, trace_decode_token_ids=answer
        )
        submit = new_submit(self._ids[-1], {"prompt_token_ids": task.prompt}, params)
        self._transport.submit(submit, lambda update: self._arrivals.put((time.perf_counter(), index, update)))

    def run(self) -> Outcome:
        num_open = len(self.times)
        while num_open:
            when, index, update = self._transport.wait(self._arrivals, ANSWER_TIMEOUT_S)
            if isinstance(update, Exception):
                raise update
            if isinstance(update, Delta):
                self.times[index] += [when] * (len(update.token_ids) // 4)
                if update.finish_reason is not None:
                    num_open -= 1
                    self.metrics.append(update.metrics or RequestMetrics())
        return Outcome(self.times, self.metrics)


def run(transport: Transport, tasks: Sequence[Task], num_out: int) -> Outcome:
    load = ForcedLoad(transport)
    for task in tasks:
        load.force(task, num_out)
    return load.run()


def tasks_of(case: str, tokenizer: Tokenizer, vocab_size: int, num_many: int) -> list[Task]:
    """Return the tasks of a case."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def rest_of(path: str) -> Task:
        tokens = ids((ROOT / path).read_text(encoding="utf-8"))
        start = min(len(tokens) * 2 // 3, MAX_PROMPT)
        return Task(tokens[:start], tokens[start:])

    if case == "rewrite":
        return [Task(ids(old)[:MAX_PROMPT], ids(new)) for old, new in map(versions_of, REWRITTEN)]
    if case in ("code", "prose"):
        return [rest_of(path) for path in (CODE if case == "code" else PROSE)]
    draw = random.Random(case)
    at_random = [
        Task(draw.choices(range(vocab_size), k=256), draw.choices(range(vocab_size), k=600)) for _ in range(NUM_RANDOM)
    ]
    if case == "random":
        return at_random
    if case == "loops":
        return [Task(task.prompt, None) for task in at_random]
    kinds = [[rest_of(path) for path in CODE], [rest_of(path) for path in PROSE], at_random]
    return [kinds[number % 3][number // 3 % 4] for number in range(num_many)]


def own_tasks(engine: LLM, count: int, has_end: bool) -> list[Task]:
    """Return tasks of PROMPTS, each as a chat of one message."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [Task(engine.tokenize(chat), None, has_end) for chat in islice(cycle(chats), count)]


def versions_of(path: str) -> tuple[str, str]:
    """Return a file as it was up to three changes ago, and as it was committed last."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, encoding="utf-8").stdout

    commits = git("log", "-4", "--format=%H", "--", path).split()
    return git("show", f"{commits[-1]}:{path}"), git("show", f"{commits[0]}:{path}")


def measure_tasks(setup: Setup, case: str, tasks: list[Task], transports: dict[str, Transport], num_out: int) -> None:
    """Run a case on both engines in turn and add its row to the report."""
    rates: dict[str, list[float]] = {name: [] for name in transports}
    p99s: dict[str, list[float]] = {name: [] for name in transports}
    metrics: list[RequestMetrics] = []
    num_tokens = 0
    groups = [tasks] if case in MANY else [[task] for task in tasks]
    for number in range(setup.arguments.rounds):
        for group in groups:
            names = list(transports) if (number + len(rates["on"])) % 2 else list(transports)[::-1]
            for name in names:
                outcome = run(transports[name], group, num_out)
                rates[name].append(outcome.tokens_per_s)
                p99s[name].append(outcome.p99_s)
                if name == "on":
                    metrics += outcome.metrics
                    num_tokens += sum(map(len, outcome.times))
    accepted = sum(each.num_accepted_drafts for each in metrics)
    setup.report.add(
        case=case,
        off_tokens_per_s=median(rates["off"]),
        on_tokens_per_s=median(rates["on"]),
        on_of_off=median_ratio(rates["on"], rates["off"]),
        drafts=sum(each.num_drafts for each in metrics),
        accepted=accepted,
        tokens=num_tokens,
        tokens_per_row_step=num_tokens / max(num_tokens - accepted, 1),
    )
    setup.report.note_ratios(f"{case}: on / off, median and its interval", rates["on"], rates["off"])
    if case in MANY:
        setup.report.note_ratios(f"{case}: p99 on / off, median and its interval", p99s["on"], p99s["off"])


def measure_peer(setup: Setup, name: str, peers: dict[str, Peer], tasks: list[Task], num_out: int) -> None:
    """Let a peer answer the tasks with drafts and without, in turn, and add its row to the report."""
    rates: dict[str, list[float]] = {each: [] for each in peers}
    for peer in peers.values():
        peer.generate([tasks[0].prompt], WARM_UP_TOKENS)
    for _ in range(setup.arguments.rounds):
        for task in tasks:
            for each, peer in peers.items():
                first_s = peer.generate([task.prompt], 1)
                rates[each].append((num_out - 1) / (peer.generate([task.prompt], num_out) - first_s))
    on, off = median(rates["on"]), median(rates["off"])
    gain = median_ratio(rates["on"], rates["off"])
    setup.report.add(case=f"loops, {name}", off_tokens_per_s=off, on_tokens_per_s=on, on_of_off=gain)


def measure_peers(setup: Setup, tasks: list[Task], num_out: int) -> None:
    """Measure the peers that the command line names, one after the other."""
    arguments, folder = setup.arguments, setup.folder
    drafts = {"off": (), "on": ("--drafts", str(PEER_DRAFTS))}
    with contextlib.ExitStack() as stack:
        if arguments.vllm:
            command = [arguments.vllm, str(PEERS / "vllm_peer.py"), str(folder)]
            check_vllm(arguments.vllm)
            tuned = tuned_environment(arguments.vllm)
            peers = {name: Peer(f"vLLM, {name}", [*command, *more], tuned) for name, more in drafts.items()}
            for peer in peers.values():
                stack.callback(peer.close)
            measure_peer(setup, "vLLM tuned", peers, tasks, num_out)
    with contextlib.ExitStack() as stack:
        if arguments.llama_cpp:
            place = (arguments.llama_cpp, folder, num_cpu_threads(None, 1))
            peers = {name: llama_cpp_peer(*place, *more, name=f"llama.cpp, {name}") for name, more in drafts.items()}
            for peer in peers.values():
                stack.callback(peer.close)
            measure_peer(setup, "llama.cpp", peers, tasks, num_out)


def expected(engine: LLM) -> float:
    """Return the engine's total of expected accepted drafts so far."""
    time.sleep(REPORT_S)
    found = [each for each in engine.get_metrics() if each.name == "tokenloom_spec_expected_total"]
    return sum(each.value for each in found if isinstance(each, Counter))


def measure(setup: Setup) -> None:
    asked = setup.arguments
    tokenizer = Tokenizer.load(Path(DEMO_FOLDER), False)
    lengths = {"max_model_len": MAX_PROMPT + asked.num_out + 16, "max_num_seqs": asked.many}
    with contextlib.ExitStack() as stack:
        engines: dict[str, LLM] = {}
        given = {name: setup.options.pop(name) for name in DRAFT_OPTIONS if name in setup.options}
        if given.get("speculation") == "off":
            given["speculation"] = "lookup"
        for name, added in (("off", {"speculation": "off"}), ("on", given)):
            options = {**lengths, **setup.options, **added}
            engines[name] = stack.enter_context(LLM(setup.folder, **options))
        transports = {name: engine._transport for name, engine in engines.items()}
        for case in asked.cases.split(","):
            if case in OWN_CASES:
                tasks = own_tasks(engines["off"], asked.many if case in MANY else len(PROMPTS), case not in MANY)
            else:
                tasks = tasks_of(case, tokenizer, setup.workload.vocab_size, asked.many)
            for transport in transports.values():
                run(transport, tasks[:1], WARM_UP_TOKENS)
            before = expected(engines["on"])
            measure_tasks(setup, case, tasks, transports, asked.num_out_many if case in MANY else asked.num_out)
            setup.report.note(f"{case}: accepted that were expected", expected(engines["on"]) - before)
    measure_peers(setup, tasks_of("loops", tokenizer, setup.workload.vocab_size, 0), asked.num_out)


OPTIONS = {
    "--cases": (",".join(CASES), "cases, with commas between"),
    "--num-out": (300, "most tokens of an answer"),
    "--many": (32, "requests of the case many"),
    "--num-out-many": (96, "tokens of each of them"),
    "--vllm": (None, "the Python of an environment with vLLM"),
    "--llama-cpp": (None, "the Python of one with llama-cpp-python and gguf"),
}
CASE = Case("speculation", measure, OPTIONS)
