"""--help fits on one screen, and --help=WORD finds every option."""

from __future__ import annotations

import pytest

from tokenloom.frontend import launch
from tokenloom.frontend.cli.command import COMMANDS
from tokenloom.frontend.launcher.options.options import KINDS
from tokenloom.ipc.spec.config.option_groups import GROUPS

SCREEN = (51, 120)  # lines and columns


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        launch.main(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_plain_help_names_every_option_and_command_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "-h", "help"):
        text = help_of(capsys, word)
        assert len(text.splitlines()) <= SCREEN[0] and max(map(len, text.splitlines())) <= SCREEN[1]
        assert all(f"--{name.replace('_', '-')} " in text.replace("\n", " ") for name in KINDS)
        assert all(f"  {name} " in text for name in ("serve", *COMMANDS)) and "swap" not in text
    for word in ("--version", "-v", "version"):
        assert help_of(capsys, word).startswith("tokenloom ")


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_group_explains_only_its_options(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, f"--help={group}")
    flags = {name: f"--{name.replace('_', '-')}" for name in KINDS}
    listed = {line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")}
    assert {flag for name, flag in flags.items() if KINDS[name].group == group} <= listed
    assert not listed & {flag for name, flag in flags.items() if KINDS[name].group != group}


def test_help_finds_a_word_in_names_descriptions_and_vllms_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "--help=prefix")
    assert "--enable-prefix-caching" in text and "--block-size" not in text
    assert "--metrics-names" in text, "its text has the word"
    assert "--prefix-caching-hash-algo is accepted without effect: " in text
    assert "--swap-space is accepted" in help_of(capsys, "--help", "swap-space")
    assert "--default-mm-loras is not served: adapters" in help_of(capsys, "--help=lora")
    everything = help_of(capsys, "--help=all")
    assert all(KINDS[name].description.split()[0] in everything for name in KINDS)


def test_help_of_an_unknown_word_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["--help=memry"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean memory?" in line
