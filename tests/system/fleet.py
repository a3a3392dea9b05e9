"""A gateway and engines behind it, each with run directory, cache and files of its own, as on several machines."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from tokenloom import Client
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 60.0
MODEL = ["--dtype", "float32"]
OPTIONS = ["--device", "cpu", "--num-threads", "1", "--num-kv-blocks", "256", *MODEL]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Fleet:
    """A gateway and the engines behind it, which tests end and start again."""

    def __init__(
        self,
        folder: Path,
        key_file: Path,
        places: Sequence[str],
        prefixes: Sequence[Sequence[str]] = ((), (), ()),
        *,
        options: Sequence[str] = (),
        of_gateway: Sequence[str] = (),
    ) -> None:
        """`prefixes`: before the commands of the engines and, last, of the gateway. `options`: of all; `of_gateway`: of
        the gateway alone."""
        self._options = [*options]
        self._folder, self._keys, self.places = folder, ["--hosts-key-file", str(key_file)], places
        self._prefixes = prefixes
        self.engines: list[Engine | None] = [None for _ in places]
        command = ["gateway", "--cores", ",".join(places), *self._keys, "--http", "0", *MODEL, *options, *of_gateway]
        self.gateway = self._open("gateway", command, prefixes[-1])
        try:
            engines = [self.start(number) for number in range(len(places))]
            for each in (self.gateway, *engines):
                each.wait_ready()
            for number in range(len(places)):
                self.wait_used(number, 1)
        except BaseException:
            self.close()
            raise

    def start(self, number: int) -> Engine:
        options = [*OPTIONS, "--core-listen", self.places[number], *self._keys, *self._options]
        options += ["--hang-timeout-s", str(2 * DEADLINE_S)]  # else an engine replaces its stopped core
        engine = self.engines[number] = self._open(f"engine-{number}", options, self._prefixes[number])
        return engine

    def _open(self, name: str, options: Sequence[str], prefix: Sequence[str]) -> Engine:
        runtime, cache = self._folder / name, self._folder / f"{name}-cache"
        runtime.mkdir(exist_ok=True)
        if not cache.exists():
            linked_cache(cache)
        return Engine(runtime, options, {"XDG_CACHE_HOME": str(cache)}, prefix=prefix)

    def engine(self, number: int) -> Engine:
        engine = self.engines[number]
        assert engine is not None
        return engine

    def kill(self, *numbers: int) -> None:
        """Kill the supervisors of engines, and wait until their cores are gone, too."""
        cores = [self.engine(number).child("core") for number in numbers]
        for number in numbers:
            self.engine(number).process.kill()
        psutil.wait_procs(cores, DEADLINE_S)
        for number in numbers:
            self.engine(number).process.wait()

    def restart(self) -> None:
        """Start the engines that do not run, and wait until the gateway uses them."""
        for number, engine in enumerate(self.engines):
            if engine is None or engine.process.poll() is not None:
                count = self.num_uses(number)
                self.start(number).wait_ready()
                self.wait_used(number, count + 1)

    def lines(self, text: str) -> list[str]:
        return [line for line in self.gateway.log().splitlines() if text in line]

    def num_uses(self, number: int) -> int:
        return len(self.lines(f"the core at {self.places[number]} is used"))

    def wait_used(self, number: int, count: int) -> None:
        self.gateway.wait_log(f"the core at {self.places[number]} is used", count)

    def blobs(self, number: int, store: str) -> set[str]:
        """Return the names of the blobs in a store of an engine."""
        folders = self._folder.glob(f"engine-{number}*/**/{store}")
        return {path.name for folder in folders for path in folder.iterdir() if len(path.name) == 64}

    def close(self) -> None:
        for engine in (self.gateway, *self.engines):
            if engine is not None:
                engine.__exit__(None, None, None)


def wait_running(client: Client, num_steps: int) -> None:
    """Wait until the engine has done so many steps more."""
    step = client.health().step
    wait_until(lambda: client.health().step >= step + num_steps, client.health, DEADLINE_S)
