"""Kill the frontend repeatedly while HTTP answers are open and new connections arrive: none is cut, refused or lost.

    python scripts/chaos/http_kills.py --streams 100 --kills 10
    python scripts/chaos/http_kills.py --seconds 10 --kills 3 --rate 100

With --streams, so many answers of all kinds (http_answers.py) are open at once, of --tokens tokens each, and compared
with those of a calm run of the same engine (--deterministic, float32). Each kill comes a moment after the next frontend
serves. --way says how a frontend ends: "kill", "hang" until the supervisor kills it, or "reload" by SIGUSR2. Several
--frontends take turns. With --victims all, frontend, core, worker and tier process are killed in a random order, and
each client asks again until the last kill; a tier process that rests after many losses is left alone. --spare keeps a
spare frontend. With --leave the clients of streams leave at random, and read on. After --limit-s no other kill begins,
so that a run on a busy machine ends with its report. Exit code 1 if an answer was cut or is different.

Otherwise it opens --rate connections a second, each of which requests /health once; meanwhile the frontend is killed
--kills times with SIGKILL. Prints the numbers of connections that were refused, cut after a killed frontend may have
accepted them, cut otherwise (opened after its death, or long before the kill) and answered, and the longest wait. Exit
code 1 if any was refused or cut otherwise.
"""

from __future__ import annotations

import asyncio
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.report import print_json
from tokenloom.scripts.bench.runner import read_options
from tokenloom.scripts.chaos.http_answers import Ask, Digest, answer, asks, leaving

ENGINE_FLAGS = ("--http", "0", "--device", "cpu", "--num-threads", "1")
REQUEST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
PATIENCE_S = 60.0  # for an answer
Report: TypeAlias = dict[str, object]
OTHERS = ("core", "worker 0", "tier")  # victims beside the frontends
TIER_BYTES = 16 << 20
WAYS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
TAKEN_WITHIN_S = 2.0  # before the kill: an older connection would have been answered


class Storm(NamedTuple):
    """Answers that are open at once, and the ends of frontends meanwhile."""

    streams: int
    kills: int
    tokens: int  # of each answer
    frontends: int = 1
    way: str = "kill"  # in which a frontend ends: one of WAYS, or "reload"
    victims: str = "frontend"  # or "all"
    has_spare: bool = False
    seed: int = 0  # of victims and pauses
    limit_s: float = math.inf  # after the first request: no kill begins later
    has_leavers: bool = False  # clients leave their streams at random, and read on


@dataclass
class Knocks:
    """The outcomes of the connections; times are monotonic seconds."""

    refused: int = 0
    answered: int = 0
    longest_wait_s: float = 0.0
    cut_opened_at: list[float] = field(default_factory=list)
    killed_at: list[tuple[float, float]] = field(default_factory=list)  # before the signal, after the exit

    @property
    def taken(self) -> int:
        """Count the cut connections that a killed frontend may have accepted."""
        return sum(
            any(before - TAKEN_WITHIN_S < opened_at < dead for before, dead in self.killed_at)
            for opened_at in self.cut_opened_at
        )

    async def knock(self, port: int) -> None:
        opened_at = time.monotonic()
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), PATIENCE_S)
        except OSError:
            self.refused += 1
            return
        try:
            writer.write(REQUEST)
            answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        except OSError:
            answer = b""
        finally:
            writer.close()
        if answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"}"):
            self.answered += 1
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - opened_at)
        else:
            self.cut_opened_at.append(opened_at)

    def kill(self, engine: Engine) -> None:
        """Kill the current frontend and wait for its exit."""
        process = engine.child("frontend")
        before = time.monotonic()
        process.kill()
        process.wait(PATIENCE_S)
        self.killed_at.append((before, time.monotonic()))


async def load(engine: Engine, seconds: float, num_kills: int, rate: float) -> Knocks:
    knocks, port, begun = Knocks(), urlsplit(engine.url).port or 80, time.monotonic()
    tasks: list[asyncio.Task[None]] = []
    kills: list[asyncio.Future[None]] = []
    while (now := time.monotonic() - begun) < seconds:
        if len(kills) < num_kills and now > seconds * (len(kills) + 0.5) / num_kills and all(k.done() for k in kills):
            kills.append(asyncio.ensure_future(asyncio.to_thread(knocks.kill, engine)))
        while len(tasks) < now * rate:
            tasks.append(asyncio.ensure_future(knocks.knock(port)))
        await asyncio.sleep(1 / rate)
    await asyncio.gather(*tasks, *kills)
    return knocks


def start_and_measure(seconds: float, num_kills: int, rate: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as runtime, Engine(Path(runtime), ENGINE_FLAGS) as engine:
        engine.wait_ready()
        report = measure(engine, seconds, num_kills, rate)
        return report | {"exit code": engine.stop()}


def measure(engine: Engine, seconds: float, num_kills: int, rate: float) -> dict[str, object]:
    """Measure the outcomes of connections to a running engine."""
    knocks = asyncio.run(load(engine, seconds, num_kills, rate))
    return {
        "kills": len(knocks.killed_at),
        "refused": knocks.refused,
        "cut, taken by a dead frontend": knocks.taken,
        "cut otherwise": len(knocks.cut_opened_at) - knocks.taken,
        "answered": knocks.answered,
        "longest wait in s": round(knocks.longest_wait_s, 3),
    }


def is_clean(report: dict[str, object]) -> bool:
    return report["refused"] == report["cut otherwise"] == report.get("exit code", 0) == 0


async def compare(engine: Engine, storm: Storm) -> Report:
    """Ask for each kind of answer once in peace, and for many at once under kills."""
    kinds = asks("tokenloom-demo", storm.tokens)
    calm = {ask.kind: await answer(ask, engine.url) for ask in kinds}
    if storm.has_leavers:
        kinds = leaving(kinds)
    is_over = asyncio.Event()
    if storm.victims == "frontend":  # each client asks once
        is_over.set()
    clients = [_ask(kinds[i % len(kinds)], engine.url, calm, is_over) for i in range(storm.streams)]
    tasks = [asyncio.ensure_future(client) for client in clients]
    pauses = await _kill(engine, storm, lambda: all(task.done() for task in tasks))
    is_over.set()
    outcomes = [outcome for task in tasks for outcome in await task]
    bad = [each for each in outcomes if each]
    return {
        "answers": len(outcomes),
        "kills": {victim: len(each) for victim, each in pauses.items()},
        "cut": sum("cut" in each for each in bad),
        "different": sum("different" in each for each in bad),
        "longest pause in s": {victim: round(max(each), 3) for victim, each in pauses.items()},
        "median pause in s": {victim: round(statistics.median(each), 3) for victim, each in pauses.items()},
        "first": bad[:5],
    }


async def _kill(engine: Engine, storm: Storm, are_done: Callable[[], bool]) -> dict[str, list[float]]:
    """Kill one process after the other while there are answers. Return the pauses by victim."""
    draw, begun = random.Random(storm.seed), time.monotonic()
    pauses: dict[str, list[float]] = {}
    for number in range(storm.kills):
        await asyncio.sleep(draw.uniform(0.5, 2.5))
        if are_done() or time.monotonic() - begun > storm.limit_s:
            break
        victim = _frontend_name(number % storm.frontends)
        if storm.victims == "all":
            victim = draw.choice((victim, *(name for name in OTHERS if engine.find(name))))
        pauses.setdefault(victim, []).append(await asyncio.to_thread(_replace, engine, storm.way, victim))
    return pauses


async def _ask(ask: Ask, url: str, calm: Mapping[str, Digest], is_over: asyncio.Event) -> list[str]:
    """Ask again until it is over, at least once. Return the outcomes."""
    outcomes = [await _outcome(ask, url, calm)]
    while not is_over.is_set():
        outcomes.append(await _outcome(ask, url, calm))
    return outcomes


async def _outcome(ask: Ask, url: str, calm: Mapping[str, Digest]) -> str:
    """Return "" if an answer equals the calm one."""
    try:
        found = await answer(ask, url)
    except Exception as error:
        return f"cut: {ask.kind}: {error!r:.300} {error.__cause__!r:.300}"
    expected = calm[ask.kind]
    places = [place for place in expected | found if expected.get(place) != found.get(place)]
    if not places:
        return ""
    return f"different: {ask.kind}: {places}: {_first_difference(expected.get(places[0]), found.get(places[0]))}"


def _first_difference(expected: object, found: object) -> str:
    """Return the first elements of two values that differ."""
    if isinstance(expected, str | list) and isinstance(found, str | list):
        pairs = zip(expected, found, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), -1)
        at = same if same >= 0 else min(len(expected), len(found))
        return (
            f"of {len(expected)} and {len(found)}, at {at}: {expected[at : at + 2]!r:.400} {found[at : at + 2]!r:.400}"
        )
    return f"{expected!r:.400} {found!r:.400}"


def _frontend_name(index: int) -> str:
    return f"frontend {index}" if index else "frontend"


def _replace(engine: Engine, way: str, name: str) -> float:
    """End a process in one of WAYS. Return the seconds until its successor is back."""
    begun, process = time.monotonic(), engine.child(name)
    num_back = engine.log().count(f"supervisor: {name} is back")
    if way == "reload":
        engine.signal(signal.SIGUSR2)
    else:
        process.send_signal(WAYS[way])
    process.wait(PATIENCE_S)
    if name != "tier":  # which nobody waits for, and which rests after many losses
        engine.wait_log(f"supervisor: {name} is back", num_back + 1, PATIENCE_S)
    return time.monotonic() - begun


def start_and_compare(storm: Storm) -> Report:
    flags = (*ENGINE_FLAGS, "--deterministic", "--dtype", "float32", "--frontends", str(storm.frontends))
    if storm.has_spare:
        flags = (*flags, "--spare-frontend")
    if storm.victims == "all":  # so that there is a tier process
        flags = (*flags, "--kv-host-bytes", str(TIER_BYTES))
    with tempfile.TemporaryDirectory() as runtime, Engine(Path(runtime), flags) as engine:
        engine.wait_ready()
        report = asyncio.run(compare(engine, storm))
        return report | {"exit code": engine.stop()}


OPTIONS = {
    "--seconds": (10.0,),
    "--kills": (3,),
    "--rate": (100.0,),
    "--streams": (0,),
    "--tokens": (300,),
    "--frontends": (1,),
    "--way": ("kill",),
    "--victims": ("frontend",),
    "--spare": (False,),
    "--seed": (0,),
    "--limit-s": (math.inf,),
    "--leave": (False,),
}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    if arguments.streams:
        counts = arguments.streams, arguments.kills, arguments.tokens, arguments.frontends
        how = arguments.way, arguments.victims, arguments.spare, arguments.seed, arguments.limit_s, arguments.leave
        compared = start_and_compare(Storm(*counts, *how))
        print_json(compared, arguments.json)
        return 1 if compared["cut"] or compared["different"] or compared["exit code"] else 0
    report = start_and_measure(arguments.seconds, arguments.kills, arguments.rate)
    print_json(report, arguments.json)
    return 0 if is_clean(report) else 1


if __name__ == "__main__":
    sys.exit(main())
