"""The units, the file of options and the manifest for several hosts parse, every command in them is one that the engine
accepts, and the commands of docs/operate/install.md put files where the unit expects them."""

from __future__ import annotations

import argparse
import re
import shlex
import string
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenloom.frontend.cli import join
from tokenloom.frontend.cli.command import ALL_COMMANDS
from tokenloom.frontend.cli.serve import new_serve_parser
from tokenloom.frontend.launcher.hosts.head_link import HeadAddress
from tokenloom.frontend.launcher.options.arguments import given_options
from tokenloom.frontend.launcher.options.options import new_config
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "docs/operate/deploy"
INSTALL = (ROOT / "docs/operate/install.md").read_text(encoding="utf-8")
VARIABLES = {
    "POD_IP": "10.0.0.1",
    "LWS_LEADER_ADDRESS": "tokenloom-hosts-0.tokenloom-hosts",
    "HEAD": "tcp://10.0.0.1:7100",
    "KEY_FILE": "/etc/tokenloom/hosts.key",
}


def commands(text: str) -> list[list[str]]:
    """Return the words of each engine-launch in a shell command, with the variables of its environment."""
    filled = string.Template(text).substitute(VARIABLES)
    parts = [shlex.split(part) for part in re.split(r"&&|;|\|\|", filled)]
    words = [part[1:] if part[0] == "exec" else part for part in parts]
    return [part[1:] for part in words if part[0].endswith("engine-launch")]


def accept(words: list[str]) -> EngineConfig | HeadAddress:
    """Parse the words as the command does: the configuration of an engine, or the head that a host joins."""
    if words[0] == "join":
        parser = argparse.ArgumentParser(exit_on_error=False)
        join.add_arguments(parser)
        return HeadAddress(parser.parse_args(words[1:]).address, None)
    return new_config(given_options(new_serve_parser().parse(words)))


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "leader-worker-set.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    assert by_kind.keys() == {"Service", "NetworkPolicy", "LeaderWorkerSet"}
    return by_kind


def container(manifest: dict[str, Any], role: str) -> dict[str, Any]:
    template = manifest["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"][f"{role}Template"]
    (found,) = template["spec"]["containers"]
    assert {each["name"] for each in found["volumeMounts"]} == {each["name"] for each in template["spec"]["volumes"]}
    return dict(found)


def test_the_leader_of_a_set_is_the_head_of_as_many_hosts_and_its_workers_join_it(manifest: dict[str, Any]) -> None:
    ((words,), (joining,)) = (commands(container(manifest, role)["command"][-1]) for role in ("leader", "worker"))
    config, head = accept(words), accept(joining)
    assert isinstance(config, EngineConfig) and isinstance(head, HeadAddress)
    assert config.hosts == manifest["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    assert head.port == int(str(config.listen_hosts).rpartition(":")[2])
    gpus = container(manifest, "leader")["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus * config.hosts == config.tensor_parallel_size
    assert manifest["Service"]["spec"]["ports"][0]["targetPort"] == container(manifest, "leader")["ports"][0]["name"]
    port = container(manifest, "leader")["ports"][0]["containerPort"]
    assert str(config.http_address).endswith(f":{port}")


def test_the_unit_of_a_host_joins_a_head() -> None:
    lines = (DEPLOY / "tokenloom-host.service").read_text().splitlines()
    settings = [line.partition("=")[::2] for line in lines if re.match(r"\w+=", line)]
    assert not [line for line in lines if line and not re.match(r"#|\[\w+\]$|\w+=", line)]
    (words,) = (commands(value)[0] for name, value in settings if name == "ExecStart")
    assert isinstance(accept(words), HeadAddress)
    variables = [line for line in lines if line.startswith("# HEAD=")]
    assert variables and all(name in variables[0] for name in ("HEAD", "KEY_FILE"))


@pytest.mark.parametrize("words", ["join tcp://a:1", "join tcp://a --key-file k", "--hosts 2 --listen-host tcp://a:1"])
def test_a_command_that_the_engine_refuses_is_found(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, Exception)):
        accept(words.split())


def blocks(section: str) -> list[str]:
    """Return the lines of all code blocks in a section of install.md."""
    text = INSTALL.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [
        line for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for line in block.splitlines()
    ]


def unit() -> dict[str, str]:
    lines = (DEPLOY / "tokenloom.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line) and not line.startswith("Environment="))


def test_the_file_of_options_is_read_as_it_stands() -> None:
    config = accept(["--config", str(DEPLOY / "engine.yaml")])
    assert isinstance(config, EngineConfig)
    written = yaml.safe_load((DEPLOY / "engine.yaml").read_text())
    assert config.http_address == f"{written.pop('host')}:{written.pop('port')}"
    assert {name: getattr(config, name.replace("-", "_")) for name in written} == written
    assert len(written) > 5 and "api-key" not in written, "keys stand in a file that the engine's user cannot read"
    assert config.drain_timeout_s < int(unit()["TimeoutStopSec"])


@pytest.mark.parametrize("wrong", ["max-modell-len: 8", "max-model-len: many", "port: 8001"])
def test_a_wrong_line_of_the_file_is_refused_by_its_name(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text((DEPLOY / "engine.yaml").read_text() + f"{wrong}\n")
    with pytest.raises((SystemExit, ConfigError)) as caught:
        accept(["--config", str(path)])
    assert wrong.partition(":")[0] in str(caught.value) and str(path) in str(caught.value)


def test_the_installation_puts_its_files_where_the_unit_expects_them() -> None:
    lines, settings = blocks("Install"), unit()
    text = "\n".join(lines)
    command, _, config = settings["ExecStart"].partition(" --config ")
    environment = command.removesuffix("/bin/engine-launch")
    assert re.search(rf"^ln -sfn (\S+) {environment}$", text, re.MULTILINE)
    assert f"install -m 644 docs/operate/deploy/engine.yaml {config}\n" in text
    assert f"> {settings['EnvironmentFile'].removeprefix('-')})" in text
    (home,) = (
        line.partition("HOME=")[2]
        for line in (DEPLOY / "tokenloom.service").read_text().splitlines()
        if "=HOME=" in line
    )
    assert f"--home-dir {home} " in text and text.splitlines()[0].endswith(f" {settings['User']}")
    (torch,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"torch=={torch} " in text
    assert all((ROOT / path).is_file() for path in re.findall(r"(?<= )docs/\S+", text))
    folders = {path for line in lines if line.startswith("mkdir -p ") for path in line.split()[2:]}
    assert {str(Path(config).parent), str(Path(environment).parent)} <= folders
    written = yaml.safe_load((DEPLOY / "engine.yaml").read_text())
    assert str(Path(written["model"]).parent) in folders


def test_each_command_of_the_installation_is_one_that_the_engine_has() -> None:
    lines = [line for section in ("Install", "See whether it serves", "Upgrade") for line in blocks(section)]
    found = [words for line in lines if "engine-launch" in line for words in commands(line[line.index("/opt/") :])]
    assert len(found) == 3
    for words in found:
        if words[0] in ALL_COMMANDS:
            continue
        local = [str(DEPLOY / "engine.yaml") if word == "/etc/tokenloom/engine.yaml" else word for word in words]
        assert isinstance(accept(local), EngineConfig)


def test_an_upgrade_and_the_way_back_move_the_link_of_the_unit() -> None:
    environment = unit()["ExecStart"].partition("/bin/")[0]
    for section, version in (("Upgrade", "0.2.0"), ("Roll back", "0.1.0")):
        *_, link, restart = blocks(section)
        assert link == f"ln -sfn {version} {environment}" and restart == "systemctl restart tokenloom"
