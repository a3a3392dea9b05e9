"""Enforce the import table of docs/architecture.md: the folders and third parties that each folder may import. Also
refuse circles of files and anything that unpickles.

A file may import from its own folder, from the folders that contain it, and from those that FOLDERS lists for it. A
folder's own files may also import from its sub-folders, which they compose. Reads the sources; imports nothing. Exit
code 1 and one line per violation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
IPC = ("ipc", "ipc/adapters", "ipc/blobs", "ipc/config", "ipc/messages", "ipc/models", "ipc/process", "ipc/shortages")


class Folder(NamedTuple):
    """Other folders that the files of a folder may import from, and third parties."""

    folders: tuple[str, ...] = ()
    parties: frozenset[str] = frozenset()


def _parties(names: str) -> frozenset[str]:
    return frozenset(names.split())


_CORE = _parties("msgspec zmq numpy")
_WORKERS = _parties("msgspec numpy torch")
_CLIENT = _parties("msgspec zmq tqdm")  # all that a user's program needs
_ASGI = _parties("msgspec starlette")


def _frontend(names: str) -> tuple[str, ...]:
    """Return all folders of ipc, and these folders of the frontend."""
    return (*IPC, *(f"frontend/{name}" for name in names.split()))


FOLDERS = {
    "ipc": Folder((), _parties("msgspec zmq")),
    "ipc/adapters": Folder(("ipc/config", "ipc/models", "ipc/process", "ipc/shortages"), _parties("msgspec")),
    "ipc/blobs": Folder(("ipc/messages", "ipc/process", "ipc/shortages"), _parties("zmq")),
    "ipc/config": Folder(("ipc/messages", "ipc/models", "ipc/process", "ipc/shortages"), _parties("msgspec zmq")),
    "ipc/messages": Folder(("ipc/process",), _parties("msgspec xxhash")),
    "ipc/models": Folder((), _parties("msgspec")),
    "ipc/process": Folder((), _parties("msgspec setproctitle")),
    "ipc/shortages": Folder(("ipc/process",)),
    "kernels": Folder((), _parties("torch numpy")),
    "kernels/cpu": Folder((), _parties("torch numpy")),
    "kernels/gpu": Folder((), _parties("torch triton")),
    "kernels/gpu/attention": Folder((), _parties("torch triton")),
    "kernels/gpu/linear": Folder((), _parties("torch triton")),
    "kernels/gpu/sampling": Folder((), _parties("torch triton")),
    "core": Folder(IPC, _CORE),
    "core/blobs": Folder((*IPC, "core/scheduling"), _CORE),
    "core/grammar": Folder((*IPC, "core/scheduling"), _CORE | _parties("llguidance tokenizers")),
    "core/kv": Folder(("ipc", "ipc/messages"), _CORE),
    "core/kv/offload": Folder(IPC, _CORE),
    "core/links": Folder((*IPC, "core/blobs"), _CORE),
    "core/scheduling": Folder((*IPC, "core/kv", "core/kv/offload"), _CORE),
    "core/speculation": Folder((*IPC, "core/scheduling"), _CORE),
    "core/tiers": Folder((*IPC, "core/kv"), _CORE | _parties("xxhash")),
    "core/tiers/network": Folder(IPC, _CORE | _parties("redis")),
    "workers": Folder((*IPC, "kernels", "kernels/gpu"), _WORKERS | _parties("zmq psutil")),
    "workers/adapters": Folder((*IPC, "kernels", "workers/weights"), _WORKERS),
    "workers/borrowed": Folder((*IPC, "kernels", "workers/weights"), _WORKERS | _parties("transformers")),
    "workers/device": Folder(
        (*IPC, "kernels", "kernels/gpu", "kernels/gpu/sampling", "workers/models", "workers/sampling"), _WORKERS
    ),
    "workers/encoders": Folder(
        (*IPC, "kernels", "workers/borrowed", "workers/weights"), _WORKERS | _parties("transformers")
    ),
    "workers/encoders/audio": Folder((*IPC, "kernels", "workers/borrowed"), _parties("numpy torch")),
    "workers/encoders/images": Folder((*IPC, "kernels", "workers/borrowed"), _parties("numpy torch transformers")),
    "workers/layers": Folder((*IPC, "kernels", "workers/weights"), _WORKERS),
    "workers/media": Folder((*IPC, "kernels", "workers/encoders", "workers/models"), _WORKERS),
    "workers/models": Folder((*IPC, "kernels", "workers/layers", "workers/weights"), _WORKERS),
    "workers/sampling": Folder((*IPC, "kernels", "kernels/cpu", "kernels/gpu/sampling"), _WORKERS),
    "workers/weights": Folder((*IPC, "kernels"), _WORKERS | _parties("safetensors")),
    "frontend": Folder(IPC, _parties("msgspec zmq")),
    "frontend/adapters": Folder(_frontend("intake"), _parties("msgspec numpy")),
    "frontend/anthropic": Folder(_frontend("anthropic/forms openai openai/forms"), _ASGI),
    "frontend/anthropic/forms": Folder(_frontend("openai/forms openai/parsers"), _ASGI),
    "frontend/cli": Folder(_frontend("client embedded hosts options"), _CLIENT | _parties("shtab")),
    "frontend/client": Folder(("ipc", "ipc/messages", "ipc/process", "ipc/shortages"), _CLIENT),
    "frontend/client/media": Folder(("ipc", "ipc/messages"), _parties("msgspec")),
    "frontend/client/offline": Folder(("ipc", "ipc/messages"), _CLIENT | _parties("transformers")),
    "frontend/client/speech": Folder(
        _frontend("client client/media media/audio openai/forms transcriptions"), _parties("msgspec numpy")
    ),
    "frontend/cores": Folder(_frontend("adapters supervisor/replicas"), _parties("msgspec zmq")),
    "frontend/embedded": Folder(
        (*_frontend("client requests requests/media supervisor text"), "core", "core/grammar", "core/links", "workers"),
        _parties("msgspec zmq"),
    ),
    "frontend/gguf": Folder(IPC, _parties("msgspec")),
    "frontend/hosts": Folder(_frontend("adapters supervisor"), _parties("msgspec zmq")),
    "frontend/http": Folder(
        _frontend(
            "adapters anthropic anthropic/forms client intake listening metrics openai openai/forms openai/parsers "
            "requests transcriptions"
        ),
        _ASGI | _parties("prometheus_client uvicorn uvloop zmq"),
    ),
    "frontend/intake": Folder(
        _frontend("anthropic/forms client client/media media openai/forms openai/parsers text"), _parties("msgspec zmq")
    ),
    "frontend/listening": Folder(IPC, _parties("zmq")),
    "frontend/media": Folder(_frontend("text"), _parties("msgspec")),
    "frontend/media/audio": Folder(IPC, _parties("msgspec numpy soundfile")),
    "frontend/media/images": Folder(IPC, _parties("msgspec PIL")),
    "frontend/metrics": Folder(IPC, _parties("msgspec opentelemetry prometheus_client")),
    "frontend/openai": Folder(
        _frontend("adapters client client/media intake metrics requests requests/media text"), _ASGI
    ),
    "frontend/openai/forms": Folder(_frontend("client client/media openai/parsers text"), _ASGI),
    "frontend/openai/parsers": Folder(_frontend("text"), _parties("msgspec")),
    "frontend/options": Folder(IPC, _parties("msgspec yaml")),
    "frontend/ray": Folder(_frontend("hosts"), _parties("msgspec ray zmq")),
    "frontend/replicas": Folder(),
    "frontend/requests": Folder(
        _frontend("adapters client intake metrics replicas supervisor text"), _parties("msgspec zmq")
    ),
    "frontend/requests/media": Folder(_frontend("client/media intake media sources text")),
    "frontend/sources": Folder(IPC, _parties("httptools")),
    "frontend/supervisor": Folder(
        _frontend("adapters gguf listening media supervisor/replicas"), _parties("msgspec zmq tqdm huggingface_hub")
    ),
    "frontend/supervisor/replicas": Folder(IPC, _parties("msgspec")),
    "frontend/text": Folder(IPC, _parties("msgspec tokenizers transformers jinja2")),
    "frontend/transcriptions": Folder(_frontend("client intake openai openai/forms"), _ASGI),
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
    rooms = sorted({name.split("/")[0] for name in FOLDERS})
    return sorted(path.relative_to(root).as_posix() for room in rooms for path in (root / room).rglob("*.py"))


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


def may_import(folder: str, other: str) -> bool:
    """Return whether files of `folder` may import files of `other`."""
    is_nested = other == folder or folder.startswith(f"{other}/") or other.startswith(f"{folder}/")
    return is_nested or other in FOLDERS[folder].folders


def offences(root: Path = ROOT) -> Iterator[str]:
    """Yield one line for each import that the table forbids, each folder that it lacks, and each circle."""
    targets: dict[str, list[str]] = {}
    for name in sources(root):
        folder = PurePosixPath(name).parent.as_posix()
        if folder not in FOLDERS:
            yield f"{name}: {folder} has no line in scripts/check_imports.py"
            continue
        text = (root / name).read_text(encoding="utf-8")
        yield from (f"{name}: {word} may run code from its input" for word in FORBIDDEN_TEXT if word in text)
        found = list(imports(name, root))
        targets[name] = [each.file for each in found if each.file]
        for line, file, party in found:
            other = PurePosixPath(file).parent.as_posix()
            if file and not may_import(folder, other):
                yield f"{name}:{line}: {folder} may not import {other}"
            if party in FORBIDDEN:
                yield f"{name}:{line}: {party} runs code from its input, which nothing here may do"
            if party and party not in sys.stdlib_module_names and party not in FOLDERS[folder].parties:
                yield f"{name}:{line}: {folder} may not import {party}"
    yield from (f"circle: {' → '.join(circle)}" for circle in circles(targets))
    yield from (f"circle of folders: {' → '.join(circle)}" for circle in circles(_table()))


def _table() -> dict[str, list[str]]:
    return {name: [other for other in folder.folders if other in FOLDERS] for name, folder in FOLDERS.items()}


def circles(targets: dict[str, list[str]]) -> list[list[str]]:
    """Return one path for each circle that a depth-first walk closes, with the first name repeated at its end."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in targets.get(name, ()):
                walk(other, [*path, name])
            done.add(name)

    for name in targets:
        walk(name, [])
    return found


if __name__ == "__main__":
    lines = list(offences())
    print(
        "\n".join(lines) or f"imports: {len(sources())} files in {len(FOLDERS)} folders, as the table says; no circles"
    )
    sys.exit(bool(lines))
