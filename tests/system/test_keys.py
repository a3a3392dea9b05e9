"""A tcp endpoint admits only the client key of its key file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tokenloom import Client, ConfigError, EngineDead, SamplingParams
from tokenloom.frontend.launch import main
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.tests.system.equipped_engine import EquippedEngine

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_only_the_key_files_client_key_is_admitted(equipped: EquippedEngine, tmp_path: Path) -> None:
    other, stranger = tmp_path / "other", tmp_path / "stranger"
    assert main(["keygen", str(other)]) == 0
    mine, theirs = Keys.load(equipped.key_file), Keys.load(other)
    knows_server = Keys(mine.server_public, theirs.server_secret, theirs.client_public, theirs.client_secret)
    knows_server.save(stranger)
    for key_file in (None, other, stranger):
        with pytest.raises(EngineDead):
            Client(equipped.address, key_file=key_file, connect_timeout_s=0.7)
    with Client(equipped.address, key_file=equipped.key_file) as client:
        assert client.generate("The capital of Italy is", GREEDY, use_tqdm=False)[0].outputs[0].text == " Rome."


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert main(["keygen", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_bytes()
    assert main(["keygen", str(file)]) == 2 and file.read_bytes() == before
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        Keys.load(file)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"server_public": 1}', "\x00\x01"])
def test_an_invalid_key_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="not a key file"):
        Keys.load(file)
