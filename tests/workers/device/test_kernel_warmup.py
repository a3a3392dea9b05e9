"""The warm-up compiles the kernels that steps of any size launch; tested without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from tokenloom.ipc.spec.models.model_config import LayerConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.quantized_checkpoints import quantized_pair
from tokenloom.workers.device.kernel_warmup import distinct_layers

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MOST_FORMS = {  # of kernels that are compiled for more than three shapes or kinds of steps
    "matmul_kernel": 12,  # three numbers of rows, for each of four products of a layer
    "gemv_kernel": 5,  # four products and the head
    "linear_kernel": 5,
    "prefill_kernel": 4,  # with and without a window, with and without spans
}
MOST_FORMS_WITH_ADAPTERS = {
    "matmul_kernel": 24,  # the same in float32
    "gemv_kernel": 10,
    "shrink_kernel": 10,  # few rows and many, for each of four products and the head
    "expand_kernel": 18,  # one row, few and many, for each of these and for look-ups
}
ALL_WAYS = ("alone", "hanging")  # once more, in the process of the usual one
Found: TypeAlias = tuple[dict[str, object], str]  # result and log


def run_warmup(folder: Path, *options: str) -> Found:
    """Run the warm-up in its own process, because this one interprets; return its result and its log."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-P", "-m", "tokenloom.tests.workers.device.kernel_warmup_run", str(folder), *options]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not ahead" not in done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found, done.stderr


@pytest.fixture(scope="module")
def warm_up(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """Warm-ups of a family with options, one run of each. Runs of a checkpoint share the folder of compiled kernels."""

    @cache
    def checkpoint(family: str, form: str | None) -> Path:
        folder = tmp_path_factory.mktemp("warmup")
        if form is None:
            return tiny_checkpoint(folder, family, **SHAPE)
        return quantized_pair(folder, form, family, **{**SHAPE, "intermediate_size": 512})[0]

    return cache(lambda *options, family, form: run_warmup(checkpoint(family, form), *options))


@pytest.mark.parametrize(
    ("family", "form", "options"),
    [
        ("qwen3", None, ALL_WAYS),
        *(
            pytest.param(family, form, options, marks=pytest.mark.nightly)
            for family, form, options in (
                ("mistral", None, []),
                ("gemma3", None, []),
                ("qwen3_moe", None, []),
                ("qwen3_moe", None, ["short"]),
                ("qwen3_moe", None, ["deterministic"]),
                ("qwen3", None, ["shared"]),
                ("llama", "awq", []),
                ("qwen3_moe", "fp8, blocks", []),
                ("qwen3", None, ["adapters"]),
                ("qwen3_moe", "fp8, blocks", ["adapters"]),
            )
        ),
    ],
)
def test_steps_launch_only_kernels_that_the_warmup_compiled(
    family: str, form: str | None, options: Sequence[str], warm_up: Callable[..., Found]
) -> None:
    found, _ = warm_up(*options, family=family, form=form)
    assert found["missing"] == []
    num_kernels, forms = found["num_kernels"], found["forms"]
    assert isinstance(num_kernels, int) and isinstance(forms, dict)
    assert len(forms) >= 10 and sum(forms.values()) == num_kernels
    has_adapters = "adapters" in options
    most = MOST_FORMS_WITH_ADAPTERS if has_adapters else MOST_FORMS
    assert {name: count for name, count in forms.items() if count > most.get(name, 3)} == {}
    assert ("shrink_kernel" in forms) == has_adapters
    assert found["num_loaded"] == num_kernels and found["loaders"] == ["ThreadPoolExecutor-0"]


def test_without_threaded_compilation_the_same_kernels_compile_one_by_one(warm_up: Callable[..., Found]) -> None:
    found, log = warm_up(*ALL_WAYS, family="qwen3", form=None)
    alone = found["alone"]
    assert isinstance(alone, dict) and alone["missing"] == []
    assert (alone["num_kernels"], alone["forms"]) == (found["num_kernels"], found["forms"])
    assert log.count("kernels are compiled one by one") == 2  # at the warm-up and for the missing kernels


def test_a_hanging_compilation_is_reported_with_its_kernel(warm_up: Callable[..., Found]) -> None:
    found, _ = warm_up(*ALL_WAYS, family="qwen3", form=None)
    named = re.search(r"kernels are still compiling after 0.1 s \((.*)\): raise --start-timeout-s", str(found["error"]))
    assert named is not None and "begin_decode_kernel" in named[1], found


def test_distinct_layers_include_each_kind_of_layer(tmp_path: Path) -> None:
    config = load_model_config(tiny_checkpoint(tmp_path, "mixtral", num_hidden_layers=4))
    for windows, expert_layers, num_layers in (
        ([None] * 4, [0, 1, 2, 3], 1),
        ([None, None, 8, None], [0, 1, 2, 3], 3),
        ([8, None, 8, None], [3], 4),
    ):
        layers = [LayerConfig(window=window, has_experts=i in expert_layers) for i, window in enumerate(windows)]
        mixed = msgspec.structs.replace(config, layers=layers)
        assert distinct_layers(mixed).num_layers == num_layers
