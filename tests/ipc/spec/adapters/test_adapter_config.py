"""AdapterConfig holds the fields that change an adapter's meaning; an adapter of another kind is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from codecs import BOM_UTF8
from pathlib import Path

import peft
import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.spec.adapters.adapter_config import HARMLESS, PLAIN_STARTS, REFUSED, AdapterConfig, read_config
from tokenloom.tests.support.hostile_fields import Hostile, faults, hostile_changes


def read(folder: Path, **fields: object) -> AdapterConfig:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_config(folder)


def test_fields_of_a_saved_config_are_read(tmp_path: Path) -> None:
    peft.LoraConfig(
        r=4, lora_alpha=10, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 7}, target_modules="x"
    ).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert (config.r, config.lora_alpha, config.use_rslora, config.use_dora) == (4, 10.0, True, False)
    assert (config.rank_pattern, config.alpha_pattern) == ({"q_proj": 2}, {"k_proj": 7.0})
    assert config.scale(4, 10.0) == 5.0
    assert read(tmp_path).scale(8, 16.0) == 2.0


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    expected, path = read(tmp_path), tmp_path / "adapter_config.json"
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert read_config(tmp_path) == expected


WITHOUT_EFFECT = {  # on a trained adapter: they choose modules and chances of training, or describe the file
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "runtime_config"),
    "fan_in_fan_out",  # of the base's matrices, which the engine knows
    *("megatron_core", "qalora_group_size"),  # of megatron_config and use_qalora, which are refused
}


def test_every_field_of_peft_is_read_or_refused_or_known_to_have_no_effect() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    checked = {"peft_type", "init_lora_weights", "bias"}
    assert fields <= WITHOUT_EFFECT | checked | REFUSED.keys() | HARMLESS | set(AdapterConfig.__struct_fields__)


OTHER_KINDS: dict[str, object] = json.loads("""{
  "modules_to_save": ["lm_head"], "trainable_token_indices": [5], "layer_replication": [[0, 2]],
  "lora_bias": true, "alora_invocation_tokens": [1, 2], "megatron_config": {"a": 1},
  "ensure_weight_tying": true, "use_qalora": true, "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 1},
  "kasa_config": {"beta": 1}, "monteclora_config": {"num_samples": 1}, "velora_config": {"scale": 1},
  "use_something_new": true, "something_new_config": {"a": 1}, "bias": "all",
  "init_lora_weights": "pissa_niter_4", "peft_type": "LOHA"
}""")


@pytest.mark.parametrize("field", OTHER_KINDS)
def test_another_kind_is_refused_by_the_field(tmp_path: Path, field: str) -> None:
    with pytest.raises(RequestError, match=rf"adapter_config\.json: .*{field}.*: ") as caught:
        read(tmp_path, **{field: OTHER_KINDS[field]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("start", ["pissa", "olora", "corda", "loftq", "lora_ga", "other", 3])
def test_starts_that_change_the_base_are_refused(tmp_path: Path, start: object) -> None:
    with pytest.raises(RequestError, match=f"init_lora_weights {start!r} changes the base"):
        read(tmp_path, init_lora_weights=start)


def test_plain_starts_and_empty_fields_are_read(tmp_path: Path) -> None:
    for start in PLAIN_STARTS:
        assert read(tmp_path, init_lora_weights=start).r == 8
    empty: dict[str, object] = {"modules_to_save": [], "layer_replication": None, "use_qalora": False}
    assert read(tmp_path, **empty, rank_pattern=None, auto_mapping={"unsloth_fixed": True}).rank_pattern == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"r": 0}, r"`int` >= 1 - at `\$\.r`"),
        ({"r": "8"}, r"Expected `int`, got `str` - at `\$\.r`"),
        ({"lora_alpha": None}, "missing required field `lora_alpha`"),
        ({"lora_alpha": math.inf}, "damaged"),
        ({"lora_alpha": 10**400}, "Number out of range"),
        ({"alpha_pattern": {"q_proj": 1e10}}, r"`float` <= 1000000000.0"),
    ],
)
def test_invalid_values_are_refused(tmp_path: Path, fields: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read(tmp_path, **fields)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"r": ' + b"[" * 100_000, b'{"a": "' + b"x" * (5 << 20)]
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"adapter_config\.json (is damaged|has more than)"):
        read_config(tmp_path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"gone/adapter_config\.json cannot be read"):
        read_config(tmp_path / "gone")
    with pytest.raises(RequestError, match="cannot be read, it does not exist or is no file"):
        read_config(tmp_path)
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(RequestError, match="cannot be read, it does not exist or is no file"):
        read_config(tmp_path)


def test_equal_configs_are_equal_bytes(tmp_path: Path) -> None:
    plain = read(tmp_path).canonical_bytes()
    assert (
        read(tmp_path, lora_alpha=16.0, lora_dropout=0.1, target_modules=["a"], inference_mode=True).canonical_bytes()
        == plain
    )
    changes: list[dict[str, object]] = [
        {"r": 9}, {"lora_alpha": 17}, {"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"a": 1}},
        {"alpha_pattern": {"a": 1}}, {"alpha_pattern": {"a": 1, "b": 2}}, {"alpha_pattern": {"b": 2, "a": 1}},
        {"target_parameters": ["a"]},
    ]  # fmt: skip
    assert len({read(tmp_path, **change).canonical_bytes() for change in changes} | {plain}) == len(changes) + 1


CONFIG = json.loads("""{
  "peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_rslora": false, "use_dora": true,
  "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 8.0}, "target_parameters": ["mlp.experts"],
  "init_lora_weights": true, "bias": "none", "modules_to_save": null, "eva_config": null
}""")


def test_hostile_values_are_refused_by_their_fields(tmp_path: Path) -> None:
    def read(change: Hostile) -> None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(change.of(CONFIG)))
        read_config(tmp_path).canonical_bytes()

    assert not faults(hostile_changes(CONFIG), read)
