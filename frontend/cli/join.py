"""`engine-launch join ADDRESS`: serves an engine of another machine as one of its hosts."""

from __future__ import annotations

import argparse

from ...ipc.process import log
from ...ipc.process.descriptors import raise_descriptor_limit
from ...ipc.process.title import set_title
from ...ipc.sockets.keys import Keys
from ..launcher.hosts.agent import HostAgent
from ..launcher.hosts.head_link import HeadAddress

DESCRIPTION = (
    "Lend this machine to an engine that was started with --hosts on another one. It waits for the engine, starts its "
    "workers here, and waits for the next one when it ends. Exit code 2: the engine refuses this machine."
)
EXAMPLES = ["tcp://10.0.0.1:7100 --key-file hosts.key"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", help="--listen-hosts of the engine: tcp://HOST:PORT")
    parser.add_argument("--key-file", metavar="FILE", required=True, help="--hosts-key-file of the engine")
    parser.add_argument(
        "--own-address", metavar="IP", help="address of this machine; none: that of the way to the engine"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(info)")


def run(arguments: argparse.Namespace) -> int:
    set_title("tokenloom host")
    log.configure("host", arguments.log_level)
    raise_descriptor_limit()
    address, keys = HeadAddress(arguments.address, arguments.own_address), Keys.load(arguments.key_file)
    HostAgent(address, keys).run()
    return 0
