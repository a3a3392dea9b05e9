"""--help fits on a screen and leads to everything."""

from __future__ import annotations

import pytest

from tokenloom.frontend import launch
from tokenloom.frontend.cli.command import COMMANDS
from tokenloom.frontend.options.options import KINDS
from tokenloom.ipc.config.engine_config import GROUPS

SCREEN = (50, 120)  # lines and columns


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        launch.main(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_plain_help_names_every_option_and_command_on_one_screen(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, word)
    assert len(text.splitlines()) <= SCREEN[0] and max(map(len, text.splitlines())) <= SCREEN[1]
    assert all(f"--{name.replace('_', '-')} " in text.replace("\n", " ") for name in KINDS)
    assert all(f"  {name} " in text for name in ("serve", *COMMANDS)) and "swap" not in text


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_explains_its_options_alone(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, f"--help={group}")
    flags = {name: f"--{name.replace('_', '-')}" for name in KINDS}
    listed = {line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")}
    assert {flag for name, flag in flags.items() if KINDS[name].group == group} <= listed
    assert not listed & {flag for name, flag in flags.items() if KINDS[name].group != group}


def test_a_word_is_searched_in_names_and_texts_and_in_vllms_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--help=prefix")
    assert "--enable-prefix-caching" in text and "--block-size" not in text
    assert "--metrics-names" in text, "its text has the word"
    assert "--prefix-caching-hash-algo is taken and means nothing here" in text
    assert "--swap-space is taken" in said(capsys, "--help", "swap-space")
    assert "--lora-modules asks for what is not there: adapters" in said(capsys, "--help=lora")
    everything = said(capsys, "--help=all")
    assert all(KINDS[name].description.split()[0] in everything for name in KINDS)


def test_a_word_that_is_nowhere_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["--help=memry"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean memory?" in line


@pytest.mark.parametrize("word", ["--version", "-v", "version"])
def test_the_version_is_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, word).startswith("tokenloom ")
