"""Reading of EAGLE-3 heads from the config.json of their checkpoints, in the two forms that are published.

- SpecForge and SGLang: LlamaForCausalLMEagle3 with the layer's fields at the top, ids of layers in eagle_config.
- speculators and vLLM: the layer's fields in transformer_layer_config, ids of layers at the top.

An id of the first form is that of a layer whose output the head reads, from 0. An id of the second form counts the
layers before the state, so that 0 means the embeddings. Without ids both mean the states behind 2, n / 2 and n - 3 of n
layers.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from ...errors import ConfigError
from ..models.config_file import ConfigFile, read_json
from ..models.model_config import ModelConfig
from ..models.model_file import parse_native
from .head_config import HeadConfig, HeadNames

NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")  # of architectures
LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # model_type → architecture of the layer
NESTED, IDS = "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"
UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output")  # flags of heads of other shapes


def is_eagle_head(folder: Path) -> bool:
    """Return whether a checkpoint is an EAGLE-3 head."""
    path = folder / "config.json"
    if not path.exists():
        return False
    raw = read_json(path)
    listed = raw.get("architectures")
    named = isinstance(listed, list) and any(each in NAMES for each in listed)
    return named or raw.get("speculators_model_type") == "eagle3"


def read_eagle_head(folder: Path, tensors: Collection[str], target: ModelConfig) -> tuple[ModelConfig, HeadConfig]:
    """Return the config of a head's layer, and that of the head for the model `target`. tensors: names of those in the
    folder's files. ConfigError if it is of another model, lacks tensors or has a shape that is not supported."""
    path = folder / "config.json"
    file = ConfigFile(path, read_json(path))
    layer = file.nested(NESTED) if NESTED in file else file
    family = layer.choice("model_type", LAYERS, "llama")
    own = parse_native(layer.with_fields({"architectures": [family]}), ConfigFile(path, {}), family)
    if own.num_layers != 1:
        file.refuse(f"the head has {own.num_layers} layers, only heads of 1 layer are supported: choose another head")
    flags = [name for name in UNKNOWN if file.flag(name)]
    if flags:
        file.refuse(f"{', '.join(flags)} true: heads of that shape are not supported: choose another head")
    names = _names_in(folder, tensors)
    state_size = file.positive("target_hidden_size", own.hidden_size)
    vocab_size = file.positive("draft_vocab_size", own.vocab_size)
    _check_pair(file, own, state_size, target, names)
    if vocab_size != own.vocab_size and not names.token_map:
        file.refuse(f"it guesses {vocab_size} of {own.vocab_size} tokens, but has no tensor d2t that says which")
    head = HeadConfig(
        kind="eagle3",
        depths=_depths(file, target.num_layers),
        state_size=state_size,
        vocab_size=vocab_size,
        is_residual_normed=file.flag("norm_before_residual"),
        names=names,
    )
    return msgspec.structs.replace(own, architecture=NAMES[0]), head


def _names_in(folder: Path, tensors: Collection[str]) -> HeadNames:
    """Return the names of the tensors in a file. ConfigError if one is missing."""
    layer = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
    names = HeadNames(
        layer=layer,
        projection="fc",
        embedding_norm=f"{layer}input_layernorm",
        state_norm=f"{layer}hidden_norm",
        norm="norm",
        embedding="embed_tokens" if "embed_tokens.weight" in tensors else "",
        head="lm_head" if "lm_head.weight" in tensors else "",
        token_map="d2t" if "d2t" in tensors else "",
    )
    needed = [names.projection, names.embedding_norm, names.state_norm, names.norm, f"{layer}self_attn.q_proj"]
    missing = [f"{name}.weight" for name in needed if f"{name}.weight" not in tensors]
    if missing:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}: an EAGLE-3 head has these tensors: fetch it again, or choose another"
        )
    return names


def _check_pair(file: ConfigFile, own: ModelConfig, state_size: int, target: ModelConfig, names: HeadNames) -> None:
    """Raise ConfigError if the head is of another model."""
    if state_size != target.hidden_size:
        file.refuse(
            f"the head reads hidden states of {state_size} elements, those of {target.architecture} have "
            f"{target.hidden_size}: choose a head of this model"
        )
    if own.vocab_size != target.vocab_size:
        file.refuse(
            f"the head is of a model with {own.vocab_size} tokens, {target.architecture} has {target.vocab_size}: "
            "choose a head of this model"
        )
    shared = [each for each, name in (("embed_tokens", names.embedding), ("lm_head", names.head)) if not name]
    if shared and own.hidden_size != target.hidden_size:
        file.refuse(
            f"the head has no {shared[0]}.weight, and that of the model is for {target.hidden_size} elements, not "
            f"{own.hidden_size}: choose another head"
        )


def _depths(file: ConfigFile, num_layers: int) -> list[int]:
    """Return how many layers each state that the head reads has passed."""
    nested = file.part("eagle_config")
    depths = file.wholes(IDS) or [each + 1 for each in nested.wholes(IDS)]
    if not depths:
        depths = [2, num_layers // 2, num_layers - 3]
    if len(set(depths)) < len(depths) or not all(0 <= depth <= num_layers for depth in depths):
        file.refuse(
            f"the head reads states behind {depths} layers, which must differ and lie within the {num_layers} of the "
            f"model: set {IDS} to layers that exist"
        )
    return depths
