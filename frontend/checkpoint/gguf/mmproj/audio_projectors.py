"""Projectors of encoders of audio like Whisper's: Voxtral and Qwen2-Audio."""

from __future__ import annotations

from ..metadata import Metadata
from .projector import Fields, Projector, sizes

ROWS_PER_S = 50  # of the encoder
MODULES = {
    "a.conv1d.1": "audio_tower.conv1",
    "a.conv1d.2": "audio_tower.conv2",
    "a.position_embd": "audio_tower.embed_positions",
    "a.post_ln": "audio_tower.layer_norm",
}
LAYER = {
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}


def _shared(data: Metadata) -> Fields:
    return {
        "num_mel_bins": data.count("audio.num_mel_bins", least=1),
        "max_source_positions": data.shape_of("a.position_embd.weight")[0],
    }


def _voxtral(data: Metadata) -> Fields:
    tower = {"model_type": "voxtral_encoder", **sizes(data, "audio"), **_shared(data)}
    stacked = data.count("audio.projector.stack_factor", 4, least=1) * tower["hidden_size"]
    if stacked != tower["intermediate_size"]:
        data.refuse(
            f"clip.audio.projector.stack_factor makes rows of {stacked}, the projector takes the "
            f"{tower['intermediate_size']} of a feed-forward block: not supported"
        )
    return {"projector_hidden_act": "gelu", "audio_config": tower}


def _qwen2_audio(data: Metadata) -> Fields:
    found = sizes(data, "audio")
    tower = {
        "model_type": "qwen2_audio_encoder",
        "d_model": found["hidden_size"],
        "encoder_layers": found["num_hidden_layers"],
        "encoder_attention_heads": found["num_attention_heads"],
        "encoder_ffn_dim": found["intermediate_size"],
    }
    return {"audio_config": tower | _shared(data)}


def _processor(data: Metadata) -> Fields:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": data.count("audio.num_mel_bins", least=1),
        "chunk_length": data.shape_of("a.position_embd.weight")[0] // ROWS_PER_S,
    }


VOXTRAL = Projector(
    "VoxtralForConditionalGeneration",
    "voxtral",
    "audio",
    texts={"llama": "llama"},
    tokens={"audio_token_id": ("[AUDIO]",)},
    config=_voxtral,
    processor=_processor,
    output=("mm.a.mlp.2.weight", 0),
    modules={
        **MODULES,
        "mm.a.mlp.1": "multi_modal_projector.linear_1",
        "mm.a.mlp.2": "multi_modal_projector.linear_2",
    },
    layers="audio_tower.layers.",
    in_layer=LAYER,
)
QWEN2_AUDIO = Projector(
    "Qwen2AudioForConditionalGeneration",
    "qwen2_audio",
    "audio",
    texts={"qwen2": "qwen2"},
    tokens={"audio_token_index": ("<|AUDIO|>",)},
    config=_qwen2_audio,
    processor=_processor,
    output=("mm.a.fc.weight", 0),
    modules={**MODULES, "mm.a.fc": "multi_modal_projector.linear"},
    layers="audio_tower.layers.",
    in_layer=LAYER,
)
