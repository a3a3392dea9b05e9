"""A draft model that cannot guess for the engine's model is refused by name, with numbers and the mend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from tokenloom.frontend.checkpoint.draft_model import draft_on_this_host
from tokenloom.frontend.checkpoint.resolve import resolve
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.eagle_heads import random_head, write_head
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target") / "m")


def resolved(run: Path, model: Path, draft: Path, **options: Any) -> EngineSpec:
    run.mkdir()
    named = {"device": "cpu", "model": str(model), "draft_model": str(draft)}
    config = EngineConfig(**(named | options))
    return resolve(config, RunDirectory(run))


def test_a_draft_model_is_found_and_keeps_its_own_files_options(tmp_path: Path, target: Path) -> None:
    draft = tiny_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    spec = resolved(tmp_path / "run", target, draft, quantization="int8", dtype="bfloat16")
    assert spec.draft is not None
    assert (spec.draft.model.num_layers, spec.draft.model.quantization) == (1, None)
    assert spec.model.quantization is not None and spec.has_integer_products


def test_another_host_finds_the_same_draft_model(tmp_path: Path, target: Path) -> None:
    draft = tiny_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    spec = resolved(tmp_path / "run", target, draft)
    found = draft_on_this_host(spec, tmp_path, target)
    assert found == spec.draft
    there = spec.on_host("10.0.0.2", "run", "model", msgspec.structs.replace(found, folder="elsewhere"))
    assert there.fingerprint == spec.fingerprint
    shutil.rmtree(draft)
    tiny_checkpoint(draft, num_hidden_layers=1, seed=1)
    with pytest.raises(ConfigError, match="is not the head's draft model"):
        draft_on_this_host(spec, tmp_path, target)


def test_pairs_that_cannot_work_are_refused(tmp_path: Path, target: Path) -> None:
    other_tokens = tiny_checkpoint(tmp_path / "tokens")
    path = other_tokens / "tokenizer.json"
    content = json.loads(path.read_bytes())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[7:9]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    windows = tiny_checkpoint(tmp_path / "windows", "mistral", sliding_window=16)
    states = recurrent_checkpoint(tmp_path / "states", "qwen3_5")
    positions = tiny_checkpoint(tmp_path / "positions", "gpt2", n_positions=64)
    two_heads = tiny_checkpoint(tmp_path / "heads", num_attention_heads=2, num_key_value_heads=2)
    cases: list[tuple[Path, Path, dict[str, Any], str]] = [
        (target, other_tokens, {}, "other tokens than the model: 2 of .* differ, the first is token 7"),
        (windows, target, {}, "sees windows of 16 tokens"),
        (target, states, {}, "cannot guess for another model"),
        (target, positions, {}, "has embeddings of 64 positions, requests have up to"),
        (two_heads, target, {"tensor_parallel_size": 2}, "its 3 attention heads and 1 KV heads do not divide"),
        (target, tmp_path / "missing", {}, "--draft-model"),
    ]
    cases += heads_of_others(tmp_path / "of others", target)
    for number, (model, draft, options, words) in enumerate(cases):
        with pytest.raises(ConfigError, match=words):
            resolved(tmp_path / f"run{number}", model, draft, **options)


def heads_of_others(folder: Path, target: Path) -> list[tuple[Path, Path, dict[str, Any], str]]:
    """Return cases of heads that are not the model's, or of another shape."""
    good = random_head(96, 307, 307, 1, own_embedding=False)
    small = random_head(64, 307, 307, 1, own_embedding=False)
    no_norm = {name: each for name, each in good.items() if name != "midlayer.hidden_norm.weight"}
    heads: dict[str, tuple[dict[str, Tensor], int, list[int], dict[str, Any], str]] = {
        "size": (small, 307, [1, 2], {}, "reads hidden states of 64 elements, those of LlamaForCausalLM have 96"),
        "tokens": (good, 300, [1, 2], {"draft_vocab_size": 300}, "with 300 tokens, LlamaForCausalLM has 307"),
        "tensors": (no_norm, 307, [1, 2], {}, "lacks midlayer.hidden_norm.weight"),
        "layers": (good, 307, [1, 2, 40], {}, r"states behind \[1, 2, 40\] layers"),
        "depth": (good, 307, [1, 2], {"num_hidden_layers": 2}, "the head has 2 layers"),
        "shape": (good, 307, [1, 2], {"norm_before_fc": True}, "norm_before_fc true"),
        "map": (good, 307, [1, 2], {"draft_vocab_size": 99}, "guesses 99 of 307 tokens, but has no tensor d2t"),
    }
    cases: list[tuple[Path, Path, dict[str, Any], str]] = []
    for name, (tensors, vocab_size, depths, fields, words) in heads.items():
        cases.append((target, write_head(folder / name, tensors, vocab_size, depths, **fields), {}, words))
    eagle, mtp = ({"method": method, "num_speculative_tokens": 2} for method in ("eagle3", "mtp"))
    given = {"speculation": json.dumps(eagle)}
    return [
        *cases,
        (target, target, given, "is not that of an EAGLE-3 head"),
        (
            target,
            target,
            {"draft_model": None, "speculation": json.dumps(mtp)},
            "none of the tensors mtp.fc, model.layers.2.eh_proj",
        ),
    ]
