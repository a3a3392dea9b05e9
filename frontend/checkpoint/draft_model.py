"""The draft model of an engine: finds its checkpoint, and refuses one that cannot guess the tokens of the model."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.spec.config.checkpoint_digest import checkpoint_digest, tokenizer_digest
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.config.engine_spec import EngineSpec
from ...ipc.spec.config.served_model import has_integer_products, served_model, with_floats
from ...ipc.spec.config.speculation import EAGLE, MTP, DraftSpec, SpeculationOptions
from ...ipc.spec.config.weight_files import file_by_tensor, weight_paths
from ...ipc.spec.drafts.eagle_file import is_eagle_head, read_eagle_head
from ...ipc.spec.drafts.mtp_layers import mtp_head
from ...ipc.spec.models.model_config import ModelConfig
from .gguf.folder import add_tokenizer
from .hub import find_checkpoint

_OPTION = "--draft-model"


def with_draft_model(spec: EngineSpec, spare: Path) -> EngineSpec:
    """Return the spec with the draft model that its options name, if any. spare: as for `find_checkpoint`. ConfigError
    if it is not found, or does not suit the model."""
    options = spec.config.speculation_options
    if options is None or not options.has_drafter or spec.config.cores is not None:
        return spec
    if options.method == MTP:
        return msgspec.structs.replace(spec, draft=_mtp_head(spec, options))
    folder = find_checkpoint(options.model, options.revision, _OPTION, spec.config, spare)
    config = _config_of(spec.config, options)
    what = f"{_OPTION} {options.model}"
    if is_eagle_head(folder):
        _check_target(spec, what)
        return msgspec.structs.replace(spec, draft=_eagle_head(spec, folder, what))
    if options.method == EAGLE:
        raise ConfigError(
            f"{what}: its config.json is not that of an EAGLE-3 head: leave the method out for a draft model, or "
            "choose a head"
        )
    model = served_model(config, folder)
    _check_target(spec, what)
    _check_model(spec, model, what)
    _check_tokens(Path(spec.tokenizer_folder), add_tokenizer(folder, spare), model.vocab_size, what)
    has_integers = has_integer_products(config, model, spec.dtype, spec.device)
    draft = DraftSpec(
        folder=str(folder),
        model=model if has_integers else with_floats(model),
        has_integer_products=has_integers,
        weights=_digest(folder),
    )
    return msgspec.structs.replace(spec, draft=draft)


def draft_on_this_host(spec: EngineSpec, spare: Path, model_folder: Path) -> DraftSpec | None:
    """Return the draft model of a head's spec with its folder on this host; None if there is none. spare: as for
    `find_checkpoint`. model_folder: that of the model here. ConfigError if it is not found, or is another one."""
    options = spec.config.speculation_options
    if spec.draft is None or options is None:
        return None
    if options.method == MTP:
        return msgspec.structs.replace(spec.draft, folder=str(model_folder))
    folder = find_checkpoint(options.model, options.revision, _OPTION, spec.config, spare)
    found = msgspec.structs.replace(spec.draft, folder=str(folder), weights=_digest(folder))
    if found.weights != spec.draft.weights:
        raise ConfigError(f"{_OPTION} {options.model}: {folder} is not the head's draft model: copy that here")
    return found


def _mtp_head(spec: EngineSpec, options: SpeculationOptions) -> DraftSpec:
    what, folder = f"--speculation {MTP}", Path(spec.model_folder)
    if options.model not in (None, spec.config.model):
        raise ConfigError(
            f"{what} uses layers of the model itself, but {options.model} is given as draft model: leave it out"
        )
    _check_target(spec, what)
    _check_native(spec, what)
    layer, head = mtp_head(folder, file_by_tensor(folder), spec.model)
    return DraftSpec(folder=str(folder), model=layer, head=head, weights=_digest(folder))


def _check_native(spec: EngineSpec, what: str) -> None:
    if spec.model.implementation != "native":
        raise ConfigError(
            f"{what}: a head reads hidden states of native layers, {spec.model.architecture} runs on transformers' "
            "layers: leave it out"
        )


def _eagle_head(spec: EngineSpec, folder: Path, what: str) -> DraftSpec:
    _check_native(spec, what)
    layer, head = read_eagle_head(folder, file_by_tensor(folder), spec.model)
    _check_heads(spec, layer, what)
    return DraftSpec(folder=str(folder), model=layer, head=head, weights=_digest(folder))


def _digest(folder: Path) -> str:
    return checkpoint_digest(folder) if weight_paths(folder) else ""


def _config_of(config: EngineConfig, options: SpeculationOptions) -> EngineConfig:
    """Return the engine's options with those left out that are about its model's own files."""
    return msgspec.structs.replace(
        config, model=options.model, hf_overrides=None, quantization="none", language_model_only=True
    )


def _check_target(spec: EngineSpec, what: str) -> None:
    """Raise ConfigError if the engine's model takes no drafts of another."""
    model = spec.model
    if not model.is_generative or model.has_state or model.cross is not None:
        raise ConfigError(f"{what}: {model.architecture} takes no drafts: leave it out")
    if not spec.kv_groups[0].is_full:
        raise ConfigError(
            f"{what}: {model.architecture} sees windows of {spec.kv_groups[0].window} tokens or fewer, and "
            "the draft model's keys lie in the blocks of layers that see all tokens: leave it out"
        )


def _check_model(spec: EngineSpec, draft: ModelConfig, what: str) -> None:
    """Raise ConfigError if the engine cannot run a draft model."""
    is_plain = draft.is_generative and draft.implementation == "native" and draft.encoder is None
    if not is_plain or draft.state is not None or draft.has_state or draft.cross is not None:
        raise ConfigError(
            f"{what}: {draft.architecture} cannot guess for another model, since it keeps states, takes media or runs "
            "on transformers' layers: choose a decoder of text with attention alone"
        )
    longest = draft.num_learned_positions - draft.first_position
    if draft.num_learned_positions and longest < spec.max_model_len:
        raise ConfigError(
            f"{what} has embeddings of {longest} positions, requests have up to {spec.max_model_len} tokens: "
            f"give --max-model-len {longest} or another draft model"
        )
    _check_heads(spec, draft, what)


def _check_heads(spec: EngineSpec, draft: ModelConfig, what: str) -> None:
    """Raise ConfigError if a draft model's attention cannot be divided among the ranks."""
    size = spec.config.tensor_parallel_size
    if draft.num_heads % size or (draft.num_kv_heads % size and size % draft.num_kv_heads):
        raise ConfigError(
            f"{what}: its {draft.num_heads} attention heads and {draft.num_kv_heads} KV heads do not divide among "
            f"--tensor-parallel-size {size}: choose another draft model"
        )


def _check_tokens(folder: Path, draft_folder: Path, vocab_size: int, what: str) -> None:
    """Raise ConfigError if the models have different texts for a token. vocab_size: of the draft model."""
    if tokenizer_digest(folder) == tokenizer_digest(draft_folder):
        return
    own, other = _texts(folder), _texts(draft_folder)
    differing = sorted(
        token_id
        for token_id in own.keys() | other.keys()
        if token_id < vocab_size and token_id in other and own.get(token_id) != other[token_id]
    )
    if differing:
        first = differing[0]
        raise ConfigError(
            f"{what} has other tokens than the model: {len(differing)} of {len(other)} differ, the first is token "
            f"{first}, {other[first]!r} in place of {own.get(first)!r}: choose a draft model with the same tokenizer"
        )
    if len(other) < len(own) // 2:
        raise ConfigError(
            f"{what} has {len(other)} tokens, the model has {len(own)}: choose a draft model with the same tokenizer"
        )


def _texts(folder: Path) -> dict[int, str]:
    """Return the text of each token by its id."""
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_bytes())
        vocabulary: object = content["model"]["vocab"]
        added = {each["id"]: each["content"] for each in content["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the tokens of {folder} cannot be compared with the draft model's: its tokenizer.json cannot be read "
            f"({error!r}): save its tokenizer with transformers first"
        ) from None
    if isinstance(vocabulary, dict):
        return {token_id: text for text, token_id in vocabulary.items()} | added
    assert isinstance(vocabulary, list)
    return {token_id: text for token_id, (text, *_) in enumerate(vocabulary)} | added
