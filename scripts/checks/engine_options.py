"""Write frontend/launcher/options/engine_options.py: the keywords of LLM and AsyncLLM as a TypedDict, for editors.

    python scripts/checks/engine_options.py            compare the file with the options; exit code 1 if it differs
    python scripts/checks/engine_options.py --write    write it

It is made from EngineConfig, whose fields are the options, and from their aliases. Options of vLLM that have no effect
here are left out: LLM takes them, and a type checker reports them.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tokenloom.frontend.launcher.options.options import KINDS, LIBRARY_LOG_LEVEL, Kind
from tokenloom.frontend.launcher.options.synonyms import NAMES
from tokenloom.ipc.spec.config.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "frontend/launcher/options/engine_options.py"
POSITIONAL = "model"  # a parameter of its own
SHORT = 3  # aliases up to this length are flags
WIDTH = 116
HEAD = '''"""EngineOptions: the keywords of LLM and AsyncLLM besides `model`, for editors and type checkers.

scripts/checks/engine_options.py writes this file from the fields of EngineConfig: change those. None selects the
default. Options of vLLM that have no effect here are accepted, but are not among these.
"""

from __future__ import annotations

import os
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

Text: TypeAlias = str | os.PathLike[str]


class TorchDtype(Protocol):
    """torch.dtype, without the import."""

    @property
    def is_floating_point(self) -> bool: ...

    @property
    def is_complex(self) -> bool: ...


class EngineOptions(TypedDict, total=False):
    """Options of the engine; `engine-launch serve --help` shows them with their defaults."""

'''
MORE = {"dtype": " | TorchDtype", "speculation": " | dict[str, Any]"}  # accepted beside the type of the Kind
_TYPES = {bool: "bool", int: "int", float: "float", str: "Text", list: "list[str] | Text", dict: "dict[str, Any] | str"}


def written() -> str:
    """Return the text of the file, before ruff has formatted it."""
    return HEAD + "\n".join(_lines())


def _lines() -> Iterator[str]:
    for name, kind in KINDS.items():
        if name == POSITIONAL:
            continue
        yield f"    {name}: {_type_of(name, kind)} | None"
        yield _docstring(f"{kind.description}{_default(name)}")
        for alias in (alias for alias, option in NAMES.items() if option == name and len(alias) > SHORT):
            yield f"    {alias}: {_type_of(name, kind)} | None"
            yield _docstring(f"the same as {name}")


def _default(name: str) -> str:
    """Return the default of an option for its docstring, "" if the description says it."""
    default = LIBRARY_LOG_LEVEL if name == "log_level" else getattr(EngineConfig(), name)
    return "" if default is None else f" (default: {default})"


def _type_of(name: str, kind: Kind) -> str:
    """Return the type of the values that an option takes, without None."""
    others = [each for each, value in kind.other_values.items() if value is not None]
    if kind.choices:
        found = f"Literal[{', '.join(map(repr, [*kind.choices, *others]))}]"
    else:
        found = _TYPES[kind.type] if not kind.has_commas else "Text | list[str]"
        found += f" | Literal[{', '.join(map(repr, others))}]" if others and kind.type is not str else ""
    if any(value is None for value in kind.other_values.values()):
        found += " | bool"
    return f"{found}{MORE.get(name, '')}"


def _docstring(text: str) -> str:
    lines = textwrap.wrap(f'"""{text}"""', WIDTH, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), "    ")


def formatted(text: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", check=True, cwd=ROOT)
    return done.stdout


def main() -> int:
    text = formatted(written())
    if "--write" in sys.argv[1:]:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") != text:
        print(f"{FILE.relative_to(ROOT)} differs from EngineConfig: python scripts/checks/engine_options.py --write")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
