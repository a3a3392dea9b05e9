"""Commands of engine-launch: the examples of their help parse, errors are one line with the mend."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from tokenloom.frontend import launch
from tokenloom.frontend.cli.bench import BENCHMARKS
from tokenloom.frontend.cli.command import COMMANDS, SERVE, load_command
from tokenloom.frontend.cli.serve import new_serve_parser
from tokenloom.ipc.errors import EngineDead
from tokenloom.scripts.bench import runner

CASES = Path(__file__).parents[3] / "scripts" / "bench" / "cases"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_help_text_is_parsed(name: str) -> None:
    command = load_command(name)
    assert command.name == name and command.examples
    parser = argparse.ArgumentParser()
    command.configure(parser)
    for example in command.examples:
        parser.parse_args(shlex.split(re.split(r"[<>#]", example)[0]))
        assert f"engine-launch {name} {example}".rstrip() in parser.format_help()


def test_the_examples_of_serve_are_parsed() -> None:
    parser = new_serve_parser()
    assert parser.epilog is not None
    examples = re.findall(r"engine-launch(.*)", parser.epilog)
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example)
        parser.parse_args(words[1:] if words[:1] == [SERVE] else words)
    assert all(f"  {name} " in parser.format_help() for name in COMMANDS)


@pytest.mark.parametrize(
    "argument, mend",
    [("statsu", "did you mean status?"), ("./Qwen3-0.6B", "neither a folder, a GGUF file nor a hub id")],
)
def test_an_unknown_command_is_refused_with_a_suggestion(
    argument: str, mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([argument]) == 2
    assert mend in capsys.readouterr().err


def test_bench_lists_every_case() -> None:
    assert BENCHMARKS.keys() == {path.stem for path in CASES.glob("*.py")}


@pytest.mark.parametrize(
    ("words", "name", "rest"),
    [
        ([], "serve", []),
        (["serve", "--rate", "2"], "serve", ["--rate", "2"]),
        (["http://localhost:8000", "--rate", "2"], "serve", ["http://localhost:8000", "--rate", "2"]),
        (["latency", "demo"], "latency", ["demo"]),
    ],
)
def test_a_benchmark_without_a_name_is_serve(
    words: list[str], name: str, rest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, list[str]]] = []

    def run_named(name: str, words: list[str]) -> int:
        ran.append((name, words))
        return 0

    monkeypatch.setattr(runner, "run_named", run_named)
    assert launch.main(["bench", *words]) == 0
    assert ran == [(name, rest)]


def test_an_unknown_benchmark_is_refused_with_the_near_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["bench", "latncy"])
    assert ended.value.code == 2 and "latncy is no benchmark: did you mean latency?" in capsys.readouterr().err


def test_a_benchmark_gets_all_arguments_after_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["bench", "serve", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: engine-launch bench serve [-h]")


@pytest.mark.parametrize(
    "error, code, said",
    [
        (FileNotFoundError(2, "No such file", "in.jsonl"), 2, "in.jsonl: No such file"),
        (EngineDead("the core is gone"), 1, "the core is gone"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    command = load_command("keygen")
    failing = type(command)("keygen", command.description, command.examples, command.add_arguments, fail)
    assert failing.main(["file"]) == code
    assert capsys.readouterr().err == (f"engine-launch keygen: {said}\n" if said else "")
