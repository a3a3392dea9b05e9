"""Sampling defaults of a checkpoint, from generation_config.json and the options that replace or override it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...ipc.codec import JsonObject
from ...ipc.errors import ConfigError, RequestError
from ...ipc.params.sampling_defaults import FIRST_IMPRESSION, names_sampling
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.models.config_file import read_json
from .given_name import name_as_given

logger = logging.getLogger("tokenloom.supervisor")

FILE = "generation_config.json"
NAMES = {  # name in the file → field of SamplingParams
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "max_tokens")},
    "max_new_tokens": "max_tokens",
}

NOT_APPLIED = {  # field with an effect only in transformers → values without effect, besides null and empty ones
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("top_h", "max_time", "stop_strings", "bad_words_ids", "sequence_bias", "dola_layers"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("force_words_ids", "constraints", "watermarking_config", "token_healing"), ()),
}


def generation_folder(config: EngineConfig, folder: Path) -> Path:
    """Return the folder of the generation_config.json to read: the model's `folder`, or the one of --generation-config.
    ConfigError if the latter has no such file."""
    if config.generation_config in ("auto", "vllm"):
        return folder
    found = Path(config.generation_config)
    if not (found / FILE).is_file():
        raise ConfigError(f"--generation-config {found} must be auto, vllm or a folder with {FILE}")
    return found


def default_sampling_params(config: EngineConfig, folder: Path) -> dict[str, int | float]:
    """Return the sampling defaults in `folder` (none for --generation-config vllm) with the overrides applied, of which
    --default-max-tokens is one. ConfigError if a value is invalid, or an override has an unknown name."""
    file = folder / FILE
    shown_file = name_as_given(str(file), config.model, folder)
    reads_file = config.generation_config != "vllm"
    found = _fields(folder) if reads_file else {}
    params = _params(found, str(file))
    unlike = [name for name, same in NOT_APPLIED.items() if found.get(name) and found[name] not in same]
    if unlike:
        shown = ", ".join(f"{name} {found[name]!s:.60}" for name in unlike)
        logger.warning("%s: not applied to answers: %s", shown_file, shown)
    if params:
        shown = ", ".join(f"{name} {value}" for name, value in params.items())
        logger.info("defaults of %s: %s; --generation-config vllm takes the engine's own", shown_file, shown)
    given = config.override_generation_config or {}
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        known = ", ".join(NAMES)
        raise ConfigError(f"--override-generation-config has {', '.join(unknown)}: it may have {known}")
    longest = {} if config.default_max_tokens is None else {"max_tokens": config.default_max_tokens}
    return params | longest | _params(given, "--override-generation-config")


def tell_missing_defaults(params: dict[str, int | float]) -> None:
    """Log it if a model that generates names no sampling in its defaults, with which a small model answers badly."""
    if not names_sampling(params):
        logger.info(
            "the model names no sampling defaults: requests that name none have temperature 1, a person's chat %s; "
            "--override-generation-config sets others",
            ", ".join(f"{name} {value:g}" for name, value in FIRST_IMPRESSION.items()),
        )


def stored_sampling_params(folder: Path) -> dict[str, int | float]:
    """Return the sampling defaults in the folder of a checkpoint; ConfigError if one is invalid."""
    return _params(_fields(folder), str(folder / FILE))


def _fields(folder: Path) -> JsonObject:
    file = folder / FILE
    return read_json(file) if file.is_file() else {}


def _params(given: JsonObject, origin: str) -> dict[str, int | float]:
    known = {name: value for name, value in given.items() if name in NAMES and value is not None}
    params: dict[str, Any] = {NAMES[name]: value for name, value in known.items()}
    try:
        SamplingParams(**params)
    except (RequestError, TypeError) as error:
        reason = str(error).replace("max_tokens", "max_new_tokens" if "max_new_tokens" in known else "max_tokens")
        mend = "give --generation-config vllm or --override-generation-config"
        raise ConfigError(f"{origin}: {reason}: {mend}") from None
    return params
