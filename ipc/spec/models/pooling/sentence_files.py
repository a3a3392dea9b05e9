"""Reading of sentence-transformers' files: modules.json, the configs of its modules, and prompts.

A folder names its modules in order: a transformer, then how its hidden states are pooled, dense layers, and whether the
result has length 1. A reranker that is a language model has a LogitScore. Modules of other types are refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....errors import ConfigError
from ....params.pooling_params import PoolingMethod
from ..config_file import ConfigFile, read_json
from .pooling_config import (
    DenseConfig,
    DenseNormConfig,
    HeadActivation,
    HeadConfig,
    PoolingConfig,
    TokenRowsConfig,
)

MODULES_NAME = "modules.json"
PROMPTS_NAME = "config_sentence_transformers.json"
LENGTH_NAME = "sentence_bert_config.json"
KNOWN = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "LogitScore")
OUTPUT = "sentence_embedding"  # what modules read and write
MODES: dict[str, PoolingMethod] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted",
    "lasttoken": "last",
}
FLAGS = {  # the older spelling of pooling_mode: a flag for each mode, in the order in which their vectors are joined
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ACTIVATIONS: dict[str, HeadActivation] = {  # torch's classes
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


class _Module(NamedTuple):
    kind: str
    path: str


def with_sentence_files(config: PoolingConfig, folder: Path, hidden_size: int) -> PoolingConfig:
    """Return the config with the settings of sentence-transformers' files, if the folder has them. ConfigError if a
    module is of an unknown type, stands in the wrong place, or does not fit the one before it."""
    config = msgspec.structs.replace(config, max_tokens=_max_tokens_of(folder), **_prompts_of(folder))
    path = folder / MODULES_NAME
    if not path.is_file():
        return config
    modules = _read_modules(path)
    kinds = [each.kind for each in modules]
    if not kinds or kinds[0] != "Transformer" or kinds.count("Transformer") > 1:
        raise ConfigError(f"{path}: the first module must be a Transformer, and only that one; it has {kinds}")
    if "Normalize" in kinds[:-1]:
        raise ConfigError(f"{path}: Normalize must be the last module, it has {kinds}")
    methods, size = config.methods, hidden_size
    layers: list[DenseConfig | DenseNormConfig] = []
    for module in modules[1:]:
        if module.kind == "Pooling":
            methods = _methods_of(folder / module.path, hidden_size)
            size = hidden_size * len(methods)
        elif module.kind == "Dense":
            dense = _dense_of(folder, module.path, size)
            layers.append(dense)
            size = dense.num_outputs
        elif module.kind == "LayerNorm":
            layers.append(_norm_of(folder, module.path, size))
        elif module.kind == "Normalize":
            _check_places(folder / module.path)
    if "LogitScore" in kinds:
        return msgspec.structs.replace(config, head=_token_head(folder / modules[-1].path, hidden_size))
    if layers and "Pooling" not in kinds:
        raise ConfigError(f"{path}: there is no Pooling module before {kinds[1]}: add it, or remove {MODULES_NAME}")
    is_normalized = "Normalize" in kinds
    return msgspec.structs.replace(config, methods=methods, layers=layers, is_normalized=is_normalized)


def _max_tokens_of(folder: Path) -> int | None:
    """Return the length at which sentence-transformers cuts texts, special tokens included; None if no file states
    it."""
    path = folder / LENGTH_NAME
    if not path.is_file():
        return None
    file = ConfigFile(path, read_json(path))
    return file.positive("max_seq_length") if "max_seq_length" in file else None


def _read_modules(path: Path) -> list[_Module]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        found = [_Module(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in listed]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{path} must list modules with a type and a path ({error!r:.200})") from None
    for module in found:
        if module.kind not in KNOWN:
            raise ConfigError(f"{path} has a module {module.kind:.100}, which is not supported: {', '.join(KNOWN)} are")
        inside = Path(module.path)
        if inside.is_absolute() or ".." in inside.parts:
            raise ConfigError(f"{path}: the path {module.path!r:.100} of a module leads out of the folder")
    return found


def _config_of(folder: Path) -> ConfigFile:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, {MODULES_NAME} names its folder: the download is incomplete")
    return ConfigFile(path, read_json(path))


def _methods_of(folder: Path, hidden_size: int) -> list[PoolingMethod]:
    file = _config_of(folder)
    stated = file.get("pooling_mode")
    if stated is not None:
        names = list(stated) if isinstance(stated, list) else [stated]
    else:
        names = [name for name, flag in FLAGS.items() if file.flag(flag)]
    unknown = [each for each in names if not isinstance(each, str) or each not in MODES]
    if unknown or not names:
        file.refuse(f"the pooling {unknown or names} is not supported, known are {', '.join(MODES)}")
    if not file.flag("include_prompt", True):
        file.refuse("include_prompt false is not supported: the tokens of a prompt would have to be left out")
    for name in ("word_embedding_dimension", "embedding_dimension"):
        if name in file and file.positive(name) != hidden_size:
            file.refuse(f"{name} is {file.get(name)}, the model's hidden_size is {hidden_size}")
    return [MODES[name] for name in names]


def _dense_of(folder: Path, path: str, size: int) -> DenseConfig:
    file = _config_of(folder / path)
    _check_places(folder / path)
    name = file.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in ACTIVATIONS:
        file.refuse(f"activation_function {name:.100} is not supported, known are {', '.join(ACTIVATIONS)}")
    if file.positive("in_features") != size:
        file.refuse(f"in_features is {file.get('in_features')}, the module before gives {size}")
    return DenseConfig(
        weight="linear.weight",
        bias="linear.bias" if file.flag("bias", True) else "",
        num_inputs=size,
        num_outputs=file.positive("out_features"),
        activation=ACTIVATIONS[name],
        folder=path,
    )


def _check_places(folder: Path) -> None:
    """Raise ConfigError if a module reads or writes other results than the prompt's vector. A folder without a config
    is that of an older version, which has no others."""
    if not (folder / "config.json").is_file():
        return
    file = _config_of(folder)
    for name in ("module_input_name", "module_output_name"):
        if file.text(name, OUTPUT) != OUTPUT:
            file.refuse(f"{name} {file.text(name):.100} is not supported: only {OUTPUT} is")


def _token_head(folder: Path, hidden_size: int) -> HeadConfig:
    """Return the head of a language model that answers whether a document fits a query: the logit of a token, less that
    of another if there is one."""
    file = _config_of(folder)
    ids = [file.whole("false_token_id")] if "false_token_id" in file else []
    ids.append(file.whole("true_token_id"))
    rows = TokenRowsConfig(token_ids=ids, num_inputs=hidden_size)
    return HeadConfig(layers=[rows], activation="sigmoid", labels=["LABEL_0"])


def _norm_of(folder: Path, path: str, size: int) -> DenseNormConfig:
    file = _config_of(folder / path)
    if file.positive("dimension") != size:
        file.refuse(f"dimension is {file.get('dimension')}, the module before gives {size}")
    return DenseNormConfig(weight="norm.weight", bias="norm.bias", size=size, eps=1e-5, folder=path)


def _prompts_of(folder: Path) -> dict[str, object]:
    """Return the texts that a checkpoint puts before a text, by name, and the default's name."""
    for name, field in (("config.json", "task_instructions"), (PROMPTS_NAME, "prompts")):
        path = folder / name
        raw = read_json(path) if path.is_file() else {}
        found = raw.get(field)
        if not isinstance(found, dict) or not found:
            continue
        prompts = {key: text for key, text in found.items() if isinstance(text, str)}
        default = raw.get("default_prompt_name") or ""
        if default and (not isinstance(default, str) or default not in prompts):
            raise ConfigError(f"{path}: default_prompt_name is {default!r:.100}, prompts has {', '.join(prompts)}")
        return {"prompts": prompts, "default_prompt": default}
    return {}
