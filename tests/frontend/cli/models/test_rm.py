"""`rm` removes from the cache, after a question, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.downloads.hub_name import HubName
from tokenloom.frontend.checkpoint.downloads.listing import CachedModel
from tokenloom.frontend.cli.models.rm import check_unused, confirmed
from tokenloom.frontend.launcher.engine_record import EngineRecord
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.tests.frontend.cli.models.hub_commands import Run
from tokenloom.tests.frontend.cli.test_engines import Typist
from tokenloom.tests.support.fake_hub import FakeHub


def test_a_repository_or_one_file_of_it_is_removed(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    for name in ("org/tiny", "org/gguf:Q8_0", "org/gguf:F16"):
        assert run("pull", name)[0] == 0
    assert run("rm", "org/gguf:q8_0", "--yes")[1].startswith("removed org/gguf:q8_0: ")
    assert [line.split()[0] for line in run("ls")[1].splitlines()[1:-1]] == ["org/gguf:F16", "org/tiny"]
    assert run("rm", "hf.co/org/tiny", "-y")[0] == 0
    assert run("rm", "org/gguf:F16", "-y")[0] == 0, "the last file takes the repository along"
    assert not list((tmp_path / "hub").glob("models--*"))
    assert run("rm", "org/tiny", "-y")[2] == (
        f"engine-launch rm: org/tiny is not in {tmp_path / 'hub'}: engine-launch ls shows what is\n"
    )


def test_without_a_person_or_yes_nothing_is_removed(hub: FakeHub, run: Run) -> None:
    assert run("pull", "org/tiny")[0] == 0
    code, _, said = run("rm", "org/tiny")
    assert code == 2 and "nobody to ask whether org/tiny (" in said and "give --yes" in said
    assert "org/tiny" in run("ls")[1]


def test_a_path_is_never_removed_and_the_command_that_would_is_said(run: Run, hub: FakeHub, tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.touch()
    for path, command in ((file, f"rm '{file}'"), (tmp_path, f"rm -r {tmp_path}")):
        code, _, said = run("rm", str(path), "--yes")
        assert code == 2 and f"is not in the hub's cache, so it stays: {command} removes it" in said
        assert path.exists()


@pytest.mark.parametrize(
    ("answer", "is_meant"), [("y\n", True), ("Yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_only_a_yes_removes(answer: str, is_meant: bool) -> None:
    terminal = Typist(answer)
    assert confirmed([CachedModel(HubName("o/n", "Q4_0"), 5 << 30, 0.0)], terminal) is is_meant
    assert terminal.shown == "remove o/n:Q4_0 (5.00 GiB) from the cache? [y/N] "


def test_a_model_that_an_engine_serves_stays() -> None:
    engine = EngineRecord(pid=77, model="m", addresses=["ipc:///a"], started_at=0.0, given_model="hf.co/o/n:Q4_0")
    with pytest.raises(ConfigError, match=r"the engine with pid 77 serves hf.co/o/n:Q4_0: stop it first"):
        check_unused(HubName("o/n"), [engine])
    check_unused(HubName("o/other"), [engine])


def test_the_engines_of_this_user_are_looked_at_before_anything_is_removed(hub: FakeHub, run: Run) -> None:
    assert run("pull", "org/tiny")[0] == 0
    directory = RunDirectory.create()
    engine = EngineRecord(pid=77, model="m", addresses=["ipc:///a"], started_at=0.0, given_model="org/tiny")
    engine.write(directory.path)
    try:
        assert run("rm", "org/tiny", "--yes")[2] == (
            "engine-launch rm: the engine with pid 77 serves org/tiny: stop it first\n"
        )
    finally:
        directory.remove()
    assert run("rm", "org/tiny", "--yes")[0] == 0
