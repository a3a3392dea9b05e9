"""Writes tiny random-weight Whisper checkpoints, with tokenizer, feature extractor and the rules of its answers.

    from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint
    folder = whisper_checkpoint(tmp_path, max_source_positions=37)

Weights are scaled so that other audio gives other tokens. Special tokens stand behind the text's, in the order of the
published files, and the tokenizer puts some around a text as theirs does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .audio_configs import extractor_config
from .media_checkpoints import DEMO, randomize, write_json

TEXT_SIZE = 2048  # of the demo's tokenizer
NAMES = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
IDS = {name: TEXT_SIZE + number for number, name in enumerate(NAMES)}
EOS_ID, START_ID, NO_TIMESTAMPS_ID = IDS["<|endoftext|>"], IDS["<|startoftranscript|>"], IDS["<|notimestamps|>"]
SUPPRESSED = [5, 9, 33, 100, 101, 102, 777, START_ID, *(IDS[name] for name in NAMES[4:9])]
GAINS = {  # so that the clip and all tokens before decide the next one
    "decoder.embed_positions": 1.0,
    "fc2": 4.0,
    "q_proj": 4.0,
    "encoder_attn.out_proj": 4.0,
    "out_proj": 2.0,
    "embed_tokens": 4.0,
}
SIZES = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 88,
    "num_mel_bins": 16,
    "max_source_positions": 37,
    "max_target_positions": 32,
}
TINY = {  # of openai/whisper-tiny
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}


def whisper_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, *, has_rules: bool = True, **fields: Any
) -> Path:
    """Write a checkpoint and return its folder. `fields` replace those of config.json. Without `has_rules` no token is
    suppressed, and there are no timestamps."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    config = {**whisper_config(**fields), "dtype": str(dtype).removeprefix("torch.")}
    write_tokenizer(folder, config["max_source_positions"] + 1)
    write_json(folder / "config.json", config)
    network = transformers.WhisperForConditionalGeneration(transformers.AutoConfig.from_pretrained(folder))
    randomize(network, seed, GAINS)
    network.to(dtype).save_pretrained(folder)
    write_json(folder / "config.json", config)  # transformers has rewritten it in its own spelling
    write_json(folder / "generation_config.json", generation_config(has_rules=has_rules))
    write_json(folder / "preprocessor_config.json", preprocessor_config(config))
    return folder


def whisper_config(**fields: Any) -> dict[str, Any]:
    """Return config.json with some of its fields."""
    sizes = {**SIZES, **fields}
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": TEXT_SIZE + len(NAMES) + sizes["max_source_positions"] + 1,
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "num_hidden_layers": sizes["encoder_layers"],
        "decoder_start_token_id": START_ID,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        **sizes,
    }


def generation_config(*, has_rules: bool) -> dict[str, Any]:
    ids = {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID, "decoder_start_token_id": START_ID}
    if not has_rules:
        return ids
    return {
        **ids,
        "is_multilingual": True,
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": [220, EOS_ID],
        "no_timestamps_token_id": NO_TIMESTAMPS_ID,
        "max_initial_timestamp_index": 5,
        "lang_to_id": {"<|en|>": IDS["<|en|>"], "<|de|>": IDS["<|de|>"]},
        "task_to_id": {"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
    }


def preprocessor_config(config: dict[str, Any]) -> dict[str, Any]:
    num_frames = 2 * config["max_source_positions"]
    return extractor_config(
        "WhisperFeatureExtractor",
        feature_size=config["num_mel_bins"],
        chunk_length=num_frames / 100,
        nb_max_frames=num_frames,
        n_samples=160 * num_frames,
        return_attention_mask=False,
    )


def write_tokenizer(folder: Path, num_timestamps: int) -> None:
    """Write the demo's tokenizer with Whisper's special tokens and its template around texts."""
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    stamps = [f"<|{number * 0.02:.2f}|>" for number in range(num_timestamps)]
    tokenizer.add_tokens([AddedToken(stamp, special=False) for stamp in stamps])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftranscript|> <|notimestamps|> $A <|endoftext|>",
        special_tokens=[(name, IDS[name]) for name in ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    ).save_pretrained(folder)
