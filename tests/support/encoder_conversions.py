"""Writes GGUF files of encoders of text as llama.cpp's converter does, with their tokenizers.

    from tokenloom.tests.support.encoder_conversions import convert_encoder
    convert_encoder(folder, tmp_path / "model.gguf", "Q8_0")

Keys, shapes and the spelling of pieces are facts of conversion/ in ggml-org/llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf

from tokenloom.scripts.bench.inputs.write_gguf import head_dim_of, read_tensors, rope_parameters, stored_as

Config = dict[str, Any]
Write = Callable[[Any, Config], None]
POOLING = gguf.PoolingType
CONTROL, NORMAL = 3, 1
SKIPPED = ("pooler.", "cls.", "lm_head.")


def write_absolute(writer: Any, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"] - first_position(config))


def write_nomic(writer: Any, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["rope_theta"])


def write_modern(writer: Any, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["global_rope_theta"])
    writer.add_rope_freq_base_swa(config["local_rope_theta"])
    writer.add_sliding_window(config["local_attention"])
    writer.add_sliding_window_pattern(config["global_attn_every_n_layers"])


def write_decoder(writer: Any, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim_of(config))
    writer.add_value_length(head_dim_of(config))
    writer.add_rope_freq_base(rope_parameters(config).get("rope_theta") or config["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


WRITERS: dict[str, tuple[str, Write]] = {  # by model_type
    "bert": ("bert", write_absolute),
    "roberta": ("bert", write_absolute),
    "xlm-roberta": ("bert", write_absolute),
    "nomic_bert": ("nomic-bert", write_nomic),
    "modernbert": ("modern-bert", write_modern),
    "gemma3_text": ("gemma-embedding", write_decoder),
    "qwen3": ("qwen3", write_decoder),
}


def first_position(config: Config) -> int:
    return int(config["pad_token_id"]) + 1 if "roberta" in config["model_type"] else 0


def converted(folder: Path, config: Config, architecture: str) -> Iterator[tuple[str, Any]]:
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    has_head = config["architectures"][0].endswith("ForSequenceClassification")
    for name, values in read_tensors(folder):
        if has_head and "pooler.dense" in name:
            yield name.replace("bert.pooler.dense", "cls"), values
        elif has_head and name.startswith("classifier."):
            yield f"cls.output.{name.rpartition('.')[2]}", values
        elif not name.removeprefix("bert.").startswith(SKIPPED):
            short = name.removeprefix("bert.")
            known = (names.get_name(each, (".weight", ".bias")) for each in (short, f"model.{short}"))
            found = next((each for each in known if each is not None), None)
            assert found is not None, f"gguf has no name for {name}"
            if found.startswith("position_embd."):
                values = values[first_position(config) :]
            if architecture == "gemma-embedding" and found.endswith("norm.weight"):
                values = values + 1
            yield found, values


def convert_encoder(
    folder: Path, file: Path, form: str = "F32", *, pooling: int | None = POOLING.MEAN, dense: Any = ()
) -> None:
    """Write the checkpoint in `folder`. dense: the matrices of dense_2 and dense_3."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture, write = WRITERS[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_causal_attention(False)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_eps"])
    write(writer, config)
    if pooling is not None:
        writer.add_uint32(f"{architecture}.pooling_type", int(pooling))
    write_pieces(writer, folder)
    tensors = [*converted(folder, config, architecture)]
    tensors += [(f"dense_{number}.weight", each) for number, each in enumerate(dense, 2)]
    for name, values in tensors:
        data, kind = stored_as(name, values, "F32" if name.startswith(("token_types", "position")) else form)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_pieces(writer: Any, folder: Path) -> None:
    """Write the WordPiece or unigram vocabulary of tokenizer.json; of others none."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, special = stored["model"], {each["content"]: each["id"] for each in stored["added_tokens"]}
    if model["type"] == "WordPiece":
        texts = [text for text, _ in sorted(model["vocab"].items(), key=lambda each: each[1])]
        writer.add_tokenizer_model("bert")
        writer.add_token_list([spelled(text) for text in texts])
        ids = {name: special[f"[{name}]"] for name in ("CLS", "SEP", "PAD", "UNK")}
    elif model["type"] == "Unigram":
        texts = [text for text, _ in model["vocab"]]
        writer.add_tokenizer_model("t5")
        writer.add_token_list(texts)
        writer.add_token_scores([score for _, score in model["vocab"]])
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        ids = {"CLS": special["<s>"], "SEP": special["</s>"], "PAD": special["<pad>"], "UNK": special["<unk>"]}
    else:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_pre("default")
    writer.add_token_types([CONTROL if text in special else NORMAL for text in texts])
    writer.add_bos_token_id(ids["CLS"])
    writer.add_sep_token_id(ids["SEP"])
    writer.add_pad_token_id(ids["PAD"])
    writer.add_unk_token_id(ids["UNK"])


def spelled(text: str) -> str:
    """Return a piece of WordPiece as a file has it."""
    if text.startswith("[") and text.endswith("]"):
        return text
    return text[2:] if text.startswith("##") else f"\u2581{text}"
