"""The unit and the manifest for several hosts parse, and every command in them is one that the engine accepts."""

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
from tokenloom.frontend.cli.serve import new_serve_parser
from tokenloom.frontend.launcher.hosts.head_link import HeadAddress
from tokenloom.frontend.launcher.options.arguments import given_options
from tokenloom.frontend.launcher.options.options import new_config
from tokenloom.ipc.spec.config.engine_config import EngineConfig

DEPLOY = Path(__file__).resolve().parent.parent / "docs/operate/deploy"
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
