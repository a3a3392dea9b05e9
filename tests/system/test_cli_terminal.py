"""engine-launch at a terminal: the chat's keys, and shell completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenloom import Client
from tokenloom.frontend.launch import main
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.mounts import needs_mounts, read_only, without_home
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.terminal import DEADLINE_S, Terminal

CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
BRACKET_PASTES = "\x1b[?2004h"
PROMPT = "> "
COMMAND = (sys.executable, "-m", "tokenloom.frontend.launch")
MANY_TOKENS = "/params ignore_eos=true max_tokens=1500\n"


@pytest.fixture
def open_chat(engine: LaunchedEngine, tmp_path: Path) -> Callable[[], Terminal]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "LANG": "C.UTF-8"}
    return lambda: Terminal([*COMMAND, "chat", "--temperature", "0", "--address", engine.address], environment)


def wait_idle(address: str) -> None:
    with Client(address) as client:
        wait_until(lambda: not client.health().num_running)


def test_ctrl_c_stops_the_answer_and_not_the_chat(open_chat: Callable[[], Terminal], engine: LaunchedEngine) -> None:
    with open_chat() as chat:
        chat.read_until(PROMPT)
        chat.type(MANY_TOKENS)
        chat.read_until(PROMPT)
        slow = inject(
            engine.faults, "worker.forward", "delay 0.05 always", rank=0
        )  # slow enough for the key to arrive in time
        chat.type("What is the capital of Peru?\n")
        chat.read_until("Lima")
        chat.type(CTRL_C)
        chat.read_until("[stopped]")
        slow.unlink()
        chat.read_until(PROMPT)
        wait_idle(engine.address)
        chat.type("half a line" + CTRL_C)
        chat.read_until(PROMPT)
        chat.type("/params ignore_eos=false\n")
        chat.read_until(PROMPT)
        chat.type("/reset\n")
        chat.read_until(PROMPT)
        chat.type("What is the capital of Chile?\n")
        chat.read_until("Santiago")
        chat.read_until(PROMPT)
        chat.type(CTRL_D)
        assert chat.process.wait(DEADLINE_S) == 0


def test_pasted_lines_are_one_turn_and_arrow_up_recalls_typed_lines(open_chat: Callable[[], Terminal]) -> None:
    with open_chat() as chat:
        chat.read_until(PROMPT)
        assert BRACKET_PASTES in chat.raw  # requested from the terminal, which would send single lines otherwise
        chat.type("\x1b[200~What is the capital\nof Norway?\x1b[201~\n")
        assert chat.read_until("Oslo").count(PROMPT) == 0
        chat.read_until(PROMPT)
        chat.type("What is the capital of \\\nEgypt?\n")
        chat.read_until("Cairo")
        chat.read_until(PROMPT)
        chat.type("What is the capital of Kenya?\n")
        chat.read_until("Nairobi")
        chat.read_until(PROMPT)
        chat.type("/exit\n")
        assert chat.process.wait(DEADLINE_S) == 0
    with open_chat() as chat:
        chat.read_until(PROMPT)
        chat.type(UP)
        chat.read_until("/exit")
        chat.type(UP)
        chat.read_until("What is the capital of Kenya?")


@needs_mounts
@pytest.mark.parametrize("home", ["read only", "missing"])
def test_a_chat_whose_history_cannot_be_kept_goes_on_and_ends_well(
    home: str, engine: LaunchedEngine, tmp_path: Path
) -> None:
    prefix = read_only(tmp_path) if home == "read only" else without_home()
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    environment |= {"HOME": str(tmp_path), "LANG": "C.UTF-8"}
    with Terminal([*prefix, *COMMAND, "chat", "--temperature", "0", "--address", engine.address], environment) as chat:
        chat.read_until(PROMPT)
        chat.type("What is the capital of Norway?\n")
        chat.read_until("Oslo")
        chat.read_until(PROMPT)
        chat.type("/exit\n")
        assert chat.process.wait(DEADLINE_S) == 0
        assert "Traceback" not in chat.raw


# ── completion ───────────────────────────────────────────────────────────────────────────────────────────────────────


def offered_by_bash(file: Path, words: str) -> str:
    listed = words.split()
    program = f"""
        source {file}
        COMP_WORDS=({words}); COMP_CWORD={len(listed) - 1}
        $(complete -p engine-launch | sed 's/.* -F \\([^ ]*\\) .*/\\1/') engine-launch {listed[-1]} {listed[-2]}
        echo "${{COMPREPLY[@]}}"
    """
    return subprocess.check_output(["bash", "-c", program], text=True, timeout=DEADLINE_S)


def offered_by_fish(file: Path, words: str) -> str:
    return subprocess.check_output(
        ["fish", "--no-config", "-c", f"source {file}; complete -C '{words}'"], text=True, timeout=DEADLINE_S
    )


def offered_by_zsh(file: Path, words: str) -> str:
    file.rename(file.parent / "_engine-launch")
    called = file.parent / "called"  # records the arguments of the stub command
    with Terminal(["zsh", "-f", "-i"], {**os.environ, "HOME": str(file.parent)}) as zsh:
        zsh.type(f"engine-launch() {{ print -r -- $@ > {called} }}\n")
        zsh.type(f"fpath+={file.parent}; autoload -Uz compinit; compinit -u; echo rea''dy\n")
        zsh.read_until("ready")
        zsh.type(f"{words}\t\necho do''ne\n")
        zsh.read_until("done")
    return called.read_text()


@pytest.mark.parametrize(
    "words, wanted", [("engine-launch stat", "status"), ("engine-launch chat --addr", "--address")]
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(
    shell: str, words: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    offer = {"bash": offered_by_bash, "zsh": offered_by_zsh, "fish": offered_by_fish}[shell]
    assert main(["completion", shell]) == 0
    file = tmp_path / f"completion.{shell}"
    file.write_text(capsys.readouterr().out)
    assert wanted in offer(file, words)
