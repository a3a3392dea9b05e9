"""Loading of ModelConfig from a checkpoint's config.json and generation_config.json, without transformers.

Unsupported architectures, missing fields and invalid values raise ConfigError with the file, the value and, if there is
one, the remedy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from .audio_families import AUDIO_FAMILIES
from .borrowed_config import borrowed_config, text_of
from .config_file import ConfigFile, NotNative, overridden, read_json, shown
from .encoders.bert_kin import BERT_KIN
from .encoders.biased_kin import BIASED_KIN
from .encoders.rotary_kin import ROTARY_KIN
from .expert_families import EXPERT_FAMILIES
from .families import FAMILIES
from .gemma4_family import GEMMA4_FAMILIES
from .hybrids.gated_delta import DELTA_FAMILIES
from .hybrids.mamba2 import MAMBA_FAMILIES
from .hybrids.short_conv import CONV_FAMILIES
from .model_config import ModelConfig, ModelImplementation, OutputRules
from .multimodal import language_model
from .pooling import heads
from .pooling.encoder_heads import encoder_head
from .pooling.heads import Headed
from .pooling.pooling_config import PoolingConfig
from .pooling.sentence_files import with_sentence_files
from .quantization_config import parse_quantization
from .vision_families import VISION_FAMILIES

HYBRIDS = DELTA_FAMILIES | CONV_FAMILIES | MAMBA_FAMILIES
ENCODERS = BERT_KIN | BIASED_KIN | ROTARY_KIN
TEXT = FAMILIES | EXPERT_FAMILIES | GEMMA4_FAMILIES | HYBRIDS | ENCODERS
MULTIMODAL = VISION_FAMILIES | AUDIO_FAMILIES
NATIVE = sorted([*TEXT, *MULTIMODAL])  # architectures with native layers
CAUSAL = re.compile("ForCausalLM$|LMHead|ForConditionalGeneration$")  # in the names of causal architectures


def load_model_config(
    folder: Path,
    overrides: dict[str, Any] | None = None,
    generation_folder: Path | None = None,
    implementation: ModelImplementation = "auto",
    *,
    with_encoder: bool = True,
) -> ModelConfig:
    """Return the ModelConfig from config.json, with `overrides` applied, and generation_config.json, if it exists.

    `generation_folder`: folder of generation_config.json, if it is not `folder`. `implementation`: --model-impl.
    Without `with_encoder`, a model that takes media is returned as its language model alone. ConfigError if a file is
    missing or invalid, or the model is not supported.
    """
    path = folder / "config.json"
    raw = read_json(path)
    if overrides:
        raw = overridden(raw, overrides)
    generation_file = (generation_folder or folder) / "generation_config.json"
    generation = ConfigFile(generation_file, read_json(generation_file) if generation_file.exists() else {})
    try:
        config = _parse(ConfigFile(path, raw), generation, implementation)
        rules, languages = _output_rules(generation, config.vocab_size), _language_ids(generation)
        pooling = with_sentence_files(config.pooling, folder, config.hidden_size)
        dimensions = ConfigFile(path, raw).wholes("matryoshka_dimensions", least=1)
        pooling = msgspec.structs.replace(pooling, dimensions=sorted(dimensions))
        if pooling.head is not None and pooling.pair_template is None:
            template = heads.pair_template_of(config.architecture, pooling.head)
            pooling = msgspec.structs.replace(pooling, pair_template=template)
        config = msgspec.structs.replace(config, output_rules=rules, language_ids=languages, pooling=pooling)
        return config if with_encoder else msgspec.structs.replace(config, vision=None, audio=None)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{path} has an invalid value: {error}") from error


def _parse(file: ConfigFile, generation: ConfigFile, implementation: ModelImplementation) -> ModelConfig:
    listed = file.get("architectures") or ["none"]
    architecture = listed[0] if isinstance(listed, list) else listed
    if not isinstance(architecture, str):
        file.refuse(f"architectures must be a list with the name of a class, it is {shown(listed)}")
    if (headed := heads.split(architecture, TEXT)) is not None:
        return _parse_headed(file, generation, architecture, headed)
    is_native = architecture in NATIVE
    if not is_native and not CAUSAL.search(architecture):
        file.refuse(
            f"architecture {architecture:.100} is not supported: it is neither a causal language model nor one of the "
            "encoders of text that are"
        )
    if not is_native and implementation == "native":
        file.refuse(
            f"architecture {architecture:.100} has no native model: leave out --model-impl; native are "
            + ", ".join(NATIVE)
        )
    text = text_of(file)
    if (two_way := text.get("use_bidirectional_attention")) in (True, "all"):
        file.refuse(f"use_bidirectional_attention {two_way} is not supported: answers need a causal model")
    if is_native and implementation != "transformers":
        try:
            return parse_native(file, generation, architecture)
        except NotNative:
            if implementation == "native":
                raise
    if file.flag("is_encoder_decoder"):
        file.refuse(f"architecture {architecture} is an encoder-decoder, which transformers' layers cannot run here")
    return borrowed_config(text, architecture, _eos_token_ids(text, generation))


def _parse_headed(file: ConfigFile, generation: ConfigFile, architecture: str, headed: Headed) -> ModelConfig:
    """Return the config of an architecture that has the layers of a language model without its head. Its embedding
    stands in for that, since every step has a head; only rows that generate read it."""
    config = parse_native(text_of(file), generation, headed.family)
    head = heads.head_of(file, architecture, headed.kind, config.hidden_size)
    config = msgspec.structs.replace(config, architecture=architecture, pooling=PoolingConfig(head=head))
    if "classifier_from_token" in file:  # a language model's files, with its head
        return config
    return msgspec.structs.replace(config, has_lm_head=False, has_head_bias=False, tie_word_embeddings=True)


def parse_native(file: ConfigFile, generation: ConfigFile, architecture: str) -> ModelConfig:
    """Return the config of an architecture with native layers. ConfigError if a field is missing or invalid."""
    if architecture in MULTIMODAL:
        family, file = language_model(file, MULTIMODAL[architecture])
    else:
        family = TEXT[architecture]
        file = family.prepare(file)
    if "per_layer_config" in file and architecture not in GEMMA4_FAMILIES:
        file.refuse_native("per_layer_config, fields of single layers, has no native layers")
    fields = {name: rule(file) if callable(rule) else rule for name, rule in family.rules().items()}
    config = ModelConfig(
        architecture=architecture,
        dtype=file.text("dtype") or file.text("torch_dtype") or "float32",
        quantization=parse_quantization(file),
        eos_token_ids=_eos_token_ids(file, generation),
        bos_token_id=file.whole("bos_token_id", least=-1) if "bos_token_id" in file else None,
        **fields,
    )
    if config.is_encoder:
        head = encoder_head(file, architecture, config.hidden_size)
        config = msgspec.structs.replace(config, pooling=msgspec.structs.replace(config.pooling, head=head))
    if not any(layer.has_attention for layer in config.layers):
        fields_of_kinds = "layer_types, layers_block_type, hybrid_override_pattern or attn_layer_indices"
        file.refuse_native(f"a model in which no layer attends ({fields_of_kinds}) has no native layers")
    if config.num_heads % config.num_kv_heads:
        names = (file.spelled(each) for each in ("num_attention_heads", "num_key_value_heads"))
        file.refuse(
            f"{config.num_heads} attention heads do not divide into {config.num_kv_heads} KV heads ({', '.join(names)})"
        )
    return config


def _output_rules(generation: ConfigFile, vocab_size: int) -> OutputRules | None:
    """Return the rules for all answers; None if there are none. Ids beyond the vocabulary are left out: they are never
    sampled."""

    def ids(name: str) -> list[int]:
        return sorted({each for each in generation.wholes(name, least=-1) if 0 <= each < vocab_size})

    def index(name: str) -> int | None:
        return generation.whole(name) if name in generation else None

    no_timestamps_id, end = index("no_timestamps_token_id"), generation.get("eos_token_id")
    rules = OutputRules(
        suppressed_ids=ids("suppress_tokens"),
        first_suppressed_ids=ids("begin_suppress_tokens"),
        no_timestamps_id=no_timestamps_id,
        max_first_timestamp=index("max_initial_timestamp_index"),
        end_id=end if no_timestamps_id is not None and isinstance(end, int) else 0,
    )
    return None if rules == OutputRules() else rules


def _language_ids(generation: ConfigFile) -> dict[str, int] | None:
    """Return the ids of the language tokens <|CODE|> by code; {} for a model of one language, None if the file does not
    list them."""
    if not generation.flag("is_multilingual", True):
        return {}
    if "lang_to_id" not in generation:
        return None
    found = generation.part("lang_to_id")
    return {name.strip("<|>"): found.whole(name) for name in found.fields()}


def _eos_token_ids(file: ConfigFile, generation: ConfigFile) -> list[int]:
    stated = generation if "eos_token_id" in generation else file
    if isinstance(stated.get("eos_token_id"), list | tuple):
        return sorted(set(stated.wholes("eos_token_id", least=-1)))
    return [stated.whole("eos_token_id", least=-1)] if "eos_token_id" in stated else []
