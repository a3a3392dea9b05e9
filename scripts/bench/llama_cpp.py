"""llama.cpp's own programs as its users run them: llama-bench for one request, llama-batched-bench for many in one
batch, llama-server. All of one build in one folder, with its libraries.

Each of the first two loads the file anew, measures after a warm-up, and ends; the times that it reports are without
the load. They compute the next tokens of random ids and sample none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenloom.scripts.bench.contestant import ANSWER_TIMEOUT_S
from tokenloom.scripts.bench.http_server import HOST, Server, free_port

BENCH, BATCHED, SERVER, LIBRARY = "llama-bench", "llama-batched-bench", "llama-server", "libllama.so"
BUILD = (
    "build it on this machine: cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON && "
    "cmake --build build --target llama-bench llama-batched-bench llama-server, and give build/bin"
)
SYSTEM_NAMES = {  # in llama.cpp's system line, by the flag in /proc/cpuinfo
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
}
PRINT_SYSTEM = (
    "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.llama_backend_init(); "
    "line = library.llama_print_system_info; line.restype = ctypes.c_char_p; print(line().decode())"
)
CHECK_TIMEOUT_S = 60.0
UNUSED = {  # an option: on some virtual machines a build with all instructions does not run
    "--llama-unused": (
        [],
        f"instructions of this processor that the build may leave unused: {', '.join(SYSTEM_NAMES.values())}",
        str,
    )
}


@dataclass(frozen=True)
class LlamaCpp:
    """A build of llama.cpp: the folder of its programs, and the threads that they are given."""

    folder: Path
    threads: int

    def check(self, cpu_flags: set[str], allowed: Sequence[str] = ()) -> str:
        """Return the system line of the build. SystemExit with the mend if a program is missing, or if the build leaves
        instructions of this processor unused that are not `allowed` to be; `cpu_flags`: those of /proc/cpuinfo."""
        missing = [name for name in (BENCH, BATCHED, SERVER, LIBRARY) if not (self.folder / name).exists()]
        if missing:
            raise SystemExit(f"{self.folder} has no {', '.join(missing)} of llama.cpp: {BUILD}")
        command = [sys.executable, "-c", PRINT_SYSTEM, str((self.folder / LIBRARY).resolve())]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=CHECK_TIMEOUT_S)
        if done.returncode:
            *_, why = done.stderr.splitlines()
            raise SystemExit(f"{self.folder / LIBRARY} does not load ({why}): {BUILD}")
        line = done.stdout.strip()
        unused = [name for name in unused_instructions(line, cpu_flags) if name not in allowed]
        if unused:
            raise SystemExit(f"this build of llama.cpp leaves {', '.join(unused)} unused ({line}): {BUILD}")
        return line

    def prompt_rate(self, file: Path, length: int) -> float:
        """Return the tokens/s with which a prompt of `length` tokens is computed."""
        return self._bench(file, "-p", str(length), "-n", "0")

    def decode_rate(self, file: Path, num_in: int, num_out: int) -> float:
        """Return the tokens/s of `num_out` answer tokens behind a context of `num_in`."""
        return self._bench(file, "-p", "0", "-n", str(num_out), "-d", str(num_in))

    def _bench(self, file: Path, *what: str) -> float:
        (test,) = json.loads(self._run(BENCH, file, *what, "-r", "1", "-o", "json", "-t", str(self.threads)))
        return float(test["avg_ts"])

    def batch_seconds(self, file: Path, num_requests: int, num_in: int, num_out: int) -> float:
        """Return the seconds of all prompts and the further answer tokens of `num_requests` requests in one batch; the
        first token of each comes with its prompt."""
        steps = max(num_out - 1, 1)
        shape = ["-npp", str(num_in), "-ntg", str(steps), "-npl", str(num_requests)]
        context = ["-c", str(num_requests * (num_in + steps))]
        threads = ["-t", str(self.threads), "-tb", str(self.threads)]
        printed = self._run(BATCHED, file, *shape, *context, *threads, "--output-format", "jsonl")
        figures = next((json.loads(line) for line in printed.splitlines() if line.startswith("{")), None)
        if figures is None:
            raise SystemExit(f"{BATCHED} measured nothing: {printed[-2000:]}")
        return float(figures["t_pp"]) + (float(figures["t_tg"]) if num_out > 1 else 0.0)

    def server(self, file: Path, context: int | None = None, slots: int = 1, options: Sequence[str] = ()) -> Server:
        """Start llama-server. `context`: tokens of all slots; None: as it chooses. options: further ones of its own."""
        port = free_port()
        command = [str(self.folder / SERVER), "-m", str(file), "--host", HOST, "--port", str(port)]
        command += ["-t", str(self.threads), "-tb", str(self.threads), "-np", str(slots)]
        command += [*([] if context is None else ["-c", str(context)]), *options]
        return Server("llama-server", command, port)

    def _run(self, program: str, file: Path, *arguments: str) -> str:
        command = [str(self.folder / program), "-m", str(file), *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=ANSWER_TIMEOUT_S, cwd="/")
        if done.returncode:
            raise SystemExit(f"{program} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout


class LlamaBatch:
    """llama.cpp as a contestant: all requests in one batch. Only the number and length of the prompts count."""

    def __init__(self, programs: LlamaCpp, file: Path) -> None:
        self.name = "llama.cpp, one batch"
        self._programs, self._file = programs, file

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        return self._programs.batch_seconds(self._file, len(prompts), len(prompts[0]), max_tokens)

    def close(self) -> None:
        """Nothing: the program has ended."""


def unused_instructions(system_line: str, cpu_flags: set[str]) -> list[str]:
    """Return those names of SYSTEM_NAMES that this processor has and llama.cpp's system line lacks."""
    used = {part.rpartition(":")[2].split("=")[0].strip() for part in system_line.split("|") if "= 1" in part}
    return [name for flag, name in SYSTEM_NAMES.items() if flag in cpu_flags and name not in used]
