"""Cluster: this process's connection to Ray, as the driver of a job. Everything the job has placed ends with it.

Reports each fault of a cluster as one line. Knows nothing of engines.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import AuthenticationError, RayError

from ....ipc.errors import ConfigError
from ....ipc.sockets.endpoints import split_tcp
from ....ipc.spec.config.host_places import ray_address

CONNECT_S = 3.0
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")


class Cluster:
    """Ray cluster of which this host is a node. `node`: this host's id in the cluster."""

    def __init__(self) -> None:
        """Connect to the cluster; ConfigError if that is impossible."""
        address = reach_cluster()
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, RuntimeError, OSError, ValueError) as error:
            ray.shutdown()  # otherwise the next attempt finds half a connection
            raise ConfigError(refusal(address, error)) from None
        self.node = ray.get_runtime_context().get_node_id()

    def free(self, kind: str) -> str:
        """Return, as text, how much of a resource is free on each node."""
        free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        return ", ".join(f"{free.get(node, {}).get(kind, 0):g} on {address}" for node, address in nodes.items())


def reach_cluster() -> str:
    """Return the address of the cluster; ConfigError if nothing listens there."""
    address = ray_address()
    try:
        socket.create_connection(split_tcp(f"tcp://{address}"), CONNECT_S).close()
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address} ({error}): set RAY_ADDRESS to the HOST:PORT that its "
            "`ray start --head` printed"
        ) from None
    return address


def refusal(address: str, error: Exception) -> str:
    """Return why Ray has refused this host, and the remedy."""
    text = " ".join(str(error).split())
    if isinstance(error, AuthenticationError):
        return (
            f"the Ray cluster at {address} has another token: set RAY_AUTH_MODE=token and give its token in "
            f"~/.ray/auth_token or RAY_AUTH_TOKEN ({text:.200})"
        )
    if len(versions := _VERSIONS.findall(text)) == 2:
        (theirs, their_python), (ours, our_python) = versions
        mend = f"use that Python {their_python}" if theirs == ours else f"pip install ray=={theirs}"
        return (
            f"the Ray cluster at {address} runs Ray {theirs} on Python {their_python}, this host Ray {ours} on Python "
            f"{our_python}: they must be equal: {mend}"
        )
    return (
        f"Ray does not let this host into its cluster at {address}: it must be a node (`ray start --address "
        f"{address}` here), and a cluster with tokens needs RAY_AUTH_MODE=token and ~/.ray/auth_token "
        f"({text:.300})"
    )


def when_done(ref: Any, call: Callable[[object, Exception | None], None]) -> None:
    """Call `call(result, error)` when a remote call has ended, in a thread of Ray; one of the two is None."""

    def done(future: Any) -> None:
        error = future.exception()
        call(None if error is not None else future.result(), error)

    ref.future().add_done_callback(done)
