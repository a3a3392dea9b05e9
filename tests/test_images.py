"""The images can be built from a checkout and scripts/release, and run as their files promise.

The tests parse the files; no container engine is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from tokenloom.frontend.launcher.options.arguments import add_engine_arguments

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ("Dockerfile.cpu", "Dockerfile.cuda")
ALLOWED = {"FROM", "ARG", "COPY", "RUN", "ENV", "USER", "WORKDIR", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
BUILT = {"dist/*.whl"}  # built by scripts/release
COMPILERS = ("gcc", "clang", "build-essential", "apt-get")


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def instructions(image: str) -> list[tuple[str, str]]:
    """Return each instruction with its arguments, in order; a trailing backslash continues a line."""
    text = (ROOT / "docs/operate/deploy" / image).read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    parts = [line.partition(" ") for line in lines if line.strip()]
    return [(name, rest.strip()) for name, _, rest in parts]


def arguments(image: str, name: str) -> list[str]:
    return [rest for each, rest in instructions(image) if each == name]


def environment(image: str) -> dict[str, str]:
    return dict(word.split("=", 1) for rest in arguments(image, "ENV") for word in shlex.split(rest))


def test_every_instruction_is_known_and_the_base_is_slim(image: str) -> None:
    found = instructions(image)
    assert {name for name, _ in found} <= ALLOWED
    (base,) = arguments(image, "FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim", base)
    assert found[0][0] == "FROM" and version is not None
    assert f"Python :: {version[1]}" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_copied_files_exist_and_are_in_the_build_context(image: str) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"}
    for rest in arguments(image, "COPY"):
        *sources, _ = rest.split()
        assert all(source in BUILT or (ROOT / source).is_file() for source in sources) and set(sources) <= sent


def test_commands_are_valid_shell(image: str) -> None:
    for rest in arguments(image, "RUN"):
        words = shlex.split(rest)
        assert words.count("if") == words.count("fi") and "&&" not in (words[0], words[-1])


def test_the_engine_runs_as_an_unprivileged_user_with_private_folders(image: str) -> None:
    order = [name for name, _ in instructions(image)]
    (user,) = arguments(image, "USER")
    assert user.isdigit() and int(user) > 0 and f"useradd --uid {user} " in " ".join(arguments(image, "RUN"))
    assert max(index for index, name in enumerate(order) if name == "RUN") < order.index("USER")
    made = re.findall(r"install -d -m 0700 -o tokenloom -g tokenloom ([\w/ ]+)", " ".join(arguments(image, "RUN")))
    folders = made[0].split()
    written = [value for name, value in environment(image).items() if name.startswith(("XDG_", "HF_", "TRITON_"))]
    assert written and all(any(f"{value}/".startswith(f"{folder}/") for folder in folders) for value in written)


def test_the_image_reports_its_health(image: str) -> None:
    (check,) = arguments(image, "HEALTHCHECK")
    command = json.loads(check.partition(" CMD ")[2])
    compile(command[-1], "HEALTHCHECK", "exec")
    path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)'", command[-1])
    assert path is not None and arguments(image, "EXPOSE") == [path[1]]
    assert f'Endpoint("{path[2]}"' in (ROOT / "frontend/server/http/admin.py").read_text(encoding="utf-8")
    (entry,) = arguments(image, "ENTRYPOINT")
    name, *options = json.loads(entry)
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert name == "engine-launch" and parser.parse_args(options).http == f"0.0.0.0:{path[1]}"
    assert arguments(image, "STOPSIGNAL") == ["SIGTERM"]


def test_only_the_gpu_image_has_a_compiler() -> None:
    has_compiler = {
        image: any(word in COMPILERS for rest in arguments(image, "RUN") for word in rest.split()) for image in IMAGES
    }
    assert has_compiler == {"Dockerfile.cpu": False, "Dockerfile.cuda": True}
