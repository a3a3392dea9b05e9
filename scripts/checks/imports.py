"""Enforce the walls of docs/design/processes.md, by one rule and two tables.

The rule: in every folder, its sub-folders, each with all that it contains, and its own files form no circle. WALLS
lists the rooms that each room may import, PARTIES the third parties of each folder. Nothing may unpickle. Reads the
sources; imports nothing. Exit code 1 and one line per violation.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

WALLS = {  # the rooms that a room, with all it contains, may import
    "ipc": (),
    "kernels": (),
    "core": ("ipc",),
    "workers": ("ipc", "kernels"),
    "frontend/forms": ("ipc",),
    "frontend/sound": ("ipc",),
    "frontend/listening": ("ipc",),
    "frontend/state": ("ipc", "frontend/forms"),
    "frontend/checkpoint": ("ipc", "frontend/listening"),
    "frontend/client": ("ipc", "frontend/forms", "frontend/sound"),
    "frontend/launcher": ("ipc", "frontend/checkpoint", "frontend/listening"),
    "frontend/server": (
        *("ipc", "frontend/checkpoint", "frontend/forms", "frontend/listening", "frontend/sound"),
        "frontend/state",
    ),
    "frontend/embedded": (
        *("ipc", "core", "workers"),
        *("frontend/checkpoint", "frontend/client", "frontend/launcher", "frontend/server"),
    ),
    "frontend/cli": (
        *("ipc", "frontend", "frontend/checkpoint", "frontend/client", "frontend/embedded", "frontend/forms"),
        "frontend/launcher",
        "frontend/server",
    ),
    "frontend": (
        *("ipc", "frontend/checkpoint", "frontend/cli", "frontend/client", "frontend/embedded"),
        *("frontend/launcher", "frontend/listening", "frontend/server", "frontend/state"),
    ),
}

PARTIES = {  # of a folder and all it contains, but for those that have a line of their own
    "ipc": "msgspec zmq",
    "ipc/notes": "msgspec xxhash",
    "ipc/process": "msgspec setproctitle",
    "ipc/spec/adapters": "msgspec re2",
    "kernels": "numpy torch",
    "kernels/gpu": "torch triton",
    "core": "msgspec numpy zmq",
    "core/features/grammar": "llguidance msgspec numpy tokenizers",
    "core/tiers": "msgspec xxhash zmq",
    "core/tiers/network": "msgspec redis zmq",
    "workers": "msgspec numpy torch zmq",
    "workers/borrowed": "numpy torch transformers",
    "workers/encoders": "numpy torch transformers",
    "workers/machine": "numpy psutil torch",
    "workers/weights": "numpy safetensors torch",
    "frontend": "msgspec zmq",
    "frontend/checkpoint": "huggingface_hub msgspec tqdm",
    "frontend/cli": "msgspec shtab tqdm",
    "frontend/client": "msgspec tqdm zmq",
    "frontend/client/offline": "msgspec transformers",
    "frontend/forms": "msgspec starlette",
    "frontend/forms/parsers/response_templates": "msgspec transformers",
    "frontend/launcher/options": "msgspec yaml",
    "frontend/launcher/ray": "msgspec ray zmq",
    "frontend/server/adapters": "msgspec numpy",
    "frontend/server/api": "msgspec starlette",
    "frontend/server/http": "msgspec prometheus_client starlette uvicorn uvloop zmq",
    "frontend/server/media": "msgspec numpy",
    "frontend/server/media/images": "PIL msgspec",
    "frontend/server/metrics": "msgspec opentelemetry prometheus_client",
    "frontend/server/sources": "httptools",
    "frontend/server/text": "jinja2 msgspec tokenizers transformers",
    "frontend/sound": "numpy soundfile soxr",
    "frontend/state": "msgspec",
}

FORBIDDEN = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")  # reading their input runs code
FORBIDDEN_TEXT = ("torch.load(", "torch.save(", "numpy.load(", "np.load(", "allow_pickle", "send_pyobj", "recv_pyobj")


class Import(NamedTuple):
    """One import statement's target: a file of ours, or a third party."""

    line: int
    file: str  # a path below the root, "" for a third party
    party: str


def sources(root: Path = ROOT) -> list[str]:
    """Return the rooms' Python files, as paths below the root."""
    tops = sorted({name.split("/")[0] for name in WALLS})
    return sorted(path.relative_to(root).as_posix() for top in tops for path in (root / top).rglob("*.py"))


def imports(name: str, root: Path = ROOT) -> Iterator[Import]:
    """Yield every import in a file, also those in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse((root / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, "", alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Import(node.lineno, "", (node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            parents = PurePosixPath(name).parts[: -node.level]
            module = "/".join([*parents, *(node.module.split(".") if node.module else [])])
            if (root / f"{module}.py").exists():
                yield Import(node.lineno, f"{module}.py", "")
            else:  # modules imported from a folder
                for alias in node.names:
                    yield Import(node.lineno, f"{module}/{alias.name}.py", "")


def nearest(folder: str, table: Mapping[str, object]) -> str:
    """Return the folder, or the nearest one around it, that a table has."""
    while folder not in table:
        folder = folder.rpartition("/")[0]
    return folder


def offences(root: Path = ROOT) -> Iterator[str]:
    """Yield one line for each import that a table forbids, each word that unpickles, and each circle."""
    targets: dict[str, set[str]] = {}
    for name in sources(root):
        folder = PurePosixPath(name).parent.as_posix()
        room, parties = nearest(folder, WALLS), PARTIES[nearest(folder, PARTIES)].split()
        text = (root / name).read_text(encoding="utf-8")
        yield from (f"{name}: {word} may run code from its input" for word in FORBIDDEN_TEXT if word in text)
        found = list(imports(name, root))
        targets[name] = {each.file for each in found if each.file}
        for line, file, party in found:
            other = nearest(PurePosixPath(file).parent.as_posix(), WALLS) if file else room
            if other != room and other not in WALLS[room]:
                yield f"{name}:{line}: {room} may not import {other}"
            if party in FORBIDDEN:
                yield f"{name}:{line}: {party} runs code from its input, which nothing here may do"
            if party and party not in sys.stdlib_module_names and party not in parties:
                yield f"{name}:{line}: {folder} may not import {party}"
    for folder, graph in sorted(graphs(targets).items()):
        yield from (f"circle in {folder}: {' → '.join(circle)}" for circle in circles(graph))


def graphs(targets: Mapping[str, Set[str]]) -> dict[str, dict[str, set[str]]]:
    """Return, for each folder, which of its files and sub-folders import from which others."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, files in targets.items():
        for file in files:
            mine, theirs = PurePosixPath(name).parts, PurePosixPath(file).parts
            depth = 0
            while depth + 1 < min(len(mine), len(theirs)) and mine[depth] == theirs[depth]:
                depth += 1
            if mine[depth] != theirs[depth] or name == file:
                found["/".join(mine[:depth]) or "."][mine[depth]].add(theirs[depth])
    return found


def circles(targets: Mapping[str, Set[str]]) -> list[list[str]]:
    """Return one path for each circle that a depth-first walk closes, with the first name repeated at its end."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(targets.get(name, ())):
                walk(other, [*path, name])
            done.add(name)

    for name in list(targets):
        walk(name, [])
    return found


if __name__ == "__main__":
    lines = list(offences())
    print("\n".join(lines) or f"imports: {len(sources())} files in {len(WALLS)} rooms, as the tables say; no circles")
    sys.exit(bool(lines))
