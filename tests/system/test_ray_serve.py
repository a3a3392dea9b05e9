"""The deployment of docs/operate/deploy for Ray Serve answers over HTTP and as a stream; its engine ends with it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tokenloom.tests.support.ray_network import RayNetwork, obstacle

FOLDER = Path(__file__).resolve().parents[2] / "docs/operate/deploy"
PROGRAM = """
import sys, urllib.parse, urllib.request
import ray
from ray import serve
sys.path.append(sys.argv[2])
import ray_serve

ray.cloudpickle.register_pickle_by_value(ray_serve)  # the nodes have it not
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
options = {"tensor_parallel_size": "2", "hosts": "2", "num_threads": "1", "dtype": "float32", "device": "cpu"}
try:
    handle = serve.run(ray_serve.new_app(options))
except RuntimeError:
    sys.exit(str(serve.status().applications))
query = urllib.parse.urlencode({"prompt": "The capital of Peru is", "max_tokens": "6"})
with urllib.request.urlopen(f"http://127.0.0.1:8000/?{query}", timeout=60) as reply:
    print("answer:", reply.read().decode())
pieces = list(handle.options(stream=True).stream.remote("The capital of Peru is", 6))
print("stream:", len(pieces), "".join(pieces))
serve.shutdown()
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(280),
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be a cluster"),
    pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="ray[serve] is not installed"),
]


def test_the_deployment_answers_over_two_nodes() -> None:
    with RayNetwork(2) as network:
        said = network.run_program(PROGRAM, str(FOLDER), timeout_s=240)
        (answer,) = re.findall(r"^answer: (.*)", said, re.MULTILINE)
        (stream,) = re.findall(r"^stream: (\d+) (.*)", said, re.MULTILINE)
        assert "Lima" in answer and int(stream[0]) > 1 and stream[1] == answer
        for number in (0, 1):
            network.wait_none(number, "tokenloom", 10.0)
