"""AdapterConfig: the fields of PEFT's adapter_config.json that change how the tensors are applied.

Fields that select modules for training (target_modules, layers_to_transform …) are not read: the tensors of the file
name their modules. Adapters with more than A, B and DoRA magnitudes are refused; the error names the field.
"""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import RequestError
from ...shortages.failure import shortage_of
from .tensor_header import shown

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_RANK = 1 << 20
MAX_ALPHA = 1e9

Rank = Annotated[int, Meta(ge=1, le=MAX_RANK)]
Alpha = Annotated[float, Meta(ge=-MAX_ALPHA, le=MAX_ALPHA)]

PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")  # init_lora_weights that do not change the base
MERGE = "merge it into the base with PEFT's merge_and_unload, or train without it"
REFUSED = {  # field: the reason; null, false and empty values are not refused
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it changes the number of layers",
    "lora_bias": "it adds biases to B",
    "alora_invocation_tokens": "aLoRA is active for a part of the tokens only",
    "megatron_config": "its tensors are shards",
    "ensure_weight_tying": "embedding and head share an adapter",
    "use_qalora": "its A reads averaged inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "arrow_config": "it mixes several adapters",
    "kasa_config": "it changes the base",
    "monteclora_config": "it adds samplers",
    "velora_config": "it adds projections",
}
HARMLESS = frozenset(
    ("use_rslora", "use_dora", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config")
)


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that say how an adapter's tensors are applied. The keys of both patterns are in the file's order."""

    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, Alpha] = {}
    target_parameters: list[str] = []

    def canonical_bytes(self) -> bytes:
        """Return the fields as bytes that are equal for equal configs."""
        return msgspec.json.encode(self)

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor by which B @ A is multiplied."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Return the AdapterConfig in `folder`. RequestError if the file is missing, damaged, or asks for more than A, B
    and magnitudes; Overloaded if no descriptor or memory is free."""
    path = folder / CONFIG_NAME
    fields = _read_fields(path)
    _refuse_other_kinds(path, fields)
    known = {name: fields[name] for name in AdapterConfig.__struct_fields__ if fields.get(name) is not None}
    try:
        return msgspec.convert(known, AdapterConfig)
    except msgspec.ValidationError as error:
        raise RequestError(f"{path} has an invalid value ({error}): save the adapter again with PEFT") from None


def _read_fields(path: Path) -> dict[str, Any]:
    if not path.is_file():  # a pipe or a device would block
        raise RequestError(f"{path} cannot be read, it does not exist or is no file: give the folder of a PEFT adapter")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        refusal = RequestError(f"{path} cannot be read ({error.strerror}): check its permissions")
        raise shortage_of(error, f"{path} cannot be read") or refusal from None
    if len(content) > MAX_CONFIG_BYTES:
        raise RequestError(f"{path} has more than {MAX_CONFIG_BYTES} bytes: it is no config of a LoRA adapter")
    try:
        return msgspec.json.decode(content.removeprefix(BOM_UTF8), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{path} is damaged ({error}): copy the adapter again") from None


def _refuse_other_kinds(path: Path, fields: dict[str, Any]) -> None:
    """Raise RequestError if a field asks for more than A, B and magnitudes."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise RequestError(f"{path}: peft_type {shown(kind)} is not supported, LORA is: {MERGE}")
    start = fields.get("init_lora_weights", True)
    if not any(start is plain or start == plain for plain in PLAIN_STARTS):
        raise RequestError(
            f"{path}: init_lora_weights {shown(start)} changes the base's weights: save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    bias = fields.get("bias")
    if bias not in (None, "none"):
        raise RequestError(f"{path}: bias {shown(bias)} is not supported, it trains the base's biases: {MERGE}")
    for name, value in fields.items():
        if not value:
            continue
        if name in REFUSED:
            raise RequestError(f"{path}: {name} {shown(value)} is not supported, {REFUSED[name]}: {MERGE}")
        if (name.startswith("use_") or name.endswith("_config")) and name not in HARMLESS:  # of a newer PEFT
            raise RequestError(f"{path}: {shown(name)} is unknown and may change the adapter's meaning: {MERGE}")
