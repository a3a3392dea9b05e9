"""Holds the import table of docs/architecture.md: which room may import which, which third parties, and that no room
unpickles anything.

Reads the sources; imports nothing. Exit code 1 and one line per offence.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ROOMS = {  # room: (rooms it may import, third parties it may import)
    "ipc": ({"ipc"}, {"msgspec", "zmq", "setproctitle"}),
    "kernels": ({"kernels"}, {"torch", "triton", "numpy"}),
    "core": ({"core", "ipc"}, {"msgspec", "zmq", "numpy", "llguidance", "tokenizers"}),
    "workers": ({"workers", "kernels", "ipc"}, {"msgspec", "zmq", "numpy", "torch", "safetensors", "psutil"}),
    "frontend": (
        {"frontend", "ipc"},
        {"msgspec", "zmq", "numpy", "tokenizers", "transformers", "jinja2", "yaml", "tqdm", "huggingface_hub", "shtab"}
        | {"starlette", "uvicorn", "uvloop"}  # the HTTP server
        | {"opentelemetry"},  # spans
    ),
}
COMPOSERS = {
    "frontend/embedded/in_process.py": {"core", "workers", "kernels"}
}  # puts the rooms together in one process
CLIENT = ("client", "async_client", "connection", "outputs", "prompts")  # a user's program: ipc, pyzmq, msgspec
CLIENT_PARTIES = {"msgspec", "zmq", "tqdm"}


FORBIDDEN = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")  # they run what they read
FORBIDDEN_TEXT = ("torch.load(", "torch.save(", "numpy.load(", "np.load(", "allow_pickle", "send_pyobj", "recv_pyobj")


def imports(path: Path) -> Iterator[tuple[int, str | None, str]]:
    """(line, room or None, third party or "") of every import in a file, those in functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, None, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 0:
                yield node.lineno, None, module.split(".")[0]
            else:
                depth = len(path.relative_to(ROOT).parts) - node.level
                inside = [*path.relative_to(ROOT).parts[: max(depth, 0)], *module.split(".")]
                yield node.lineno, inside[0], ""


def offences() -> Iterator[str]:
    standard = sys.stdlib_module_names
    for room, (rooms, parties) in ROOMS.items():
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            is_client = room == "frontend" and path.stem in CLIENT
            text = path.read_text(encoding="utf-8")
            yield from (f"{name}: {word} may run what it reads" for word in FORBIDDEN_TEXT if word in text)
            for line, to_room, party in imports(path):
                if to_room is not None and to_room not in rooms | COMPOSERS.get(name, set()):
                    yield f"{name}:{line}: {room} may not import {to_room}"
                if party in FORBIDDEN:
                    yield f"{name}:{line}: {party} runs what it reads, and nothing here may"
                allowed = CLIENT_PARTIES if is_client else parties
                if party and party not in standard and party not in allowed:
                    yield f"{name}:{line}: {'the client' if is_client else room} may not import {party}"


if __name__ == "__main__":
    found = list(offences())
    print("\n".join(found) or "imports: as the design says")
    sys.exit(bool(found))
