"""ModelConfig: the shape of a decoder, in the same fields for every family.

The supervisor reads it once from config.json (`model_file.py`) and sends it to every process. A further family needs a
line in `families.py`; a further kind of layer needs a field here.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from .audio_config import AudioConfig
from .quantization_config import QuantizationConfig
from .vision_config import VisionConfig

ModelImplementation = Literal["auto", "native", "transformers"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional", "divided"]
Encoder: TypeAlias = VisionConfig | AudioConfig
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A rotary embedding. `parameters`: the other fields of the file that the formula of its kind uses."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    rotary_dim: int = 0  # rotated elements of a head, the first ones; 0: all
    is_paired: bool = False  # element 2i is rotated with 2i + 1; else i with i + rotary_dim / 2
    parameters: dict[str, float | bool | list[float]] = {}
    sections: list[int] = []  # pairs rotated by the token's time, row and column; empty: all by its position
    is_interleaved: bool = False  # pairs of the sections alternate; else the pairs of a section are adjacent


class NormConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A norm: "rms", or "layer", which subtracts the mean."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0  # added to the stored weight


class HeadNormsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Norms of query and key heads."""

    norm: NormConfig
    has_weight_per_head: bool = False
    spans_heads: bool = False  # one norm over all heads of a token; the weight is as long as all heads together
    is_after_rope: bool = False


class ActivationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Activation of the MLP. Gated: act(gate(x)) * up(x); else act(up(x))."""

    kind: ActivationKind = "silu"
    is_gated: bool = True
    limit: float = 0.0  # bound of "swiglu_clamped"


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's own settings."""

    window: int | None = None  # positions that a token attends to, its own included; None: all
    rope: int | None = 0  # index in ModelConfig.ropes; None: no positions (NoPE)
    has_experts: bool = False
    head_dim: int | None = None  # None, here and below: the model's
    num_kv_heads: int | None = None
    intermediate_size: int | None = None  # of the dense MLP
    are_values_keys: bool = False  # values are the keys before their norm and rotation
    kv_layer: int | None = None  # the layer whose keys and values this one attends to; None: it has its own


class CrossConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Cross attention of each layer to the rows that an encoder makes of a request's audio clip. The clip takes the
    first token positions of a request; the KV cache slots there hold only the keys and values of its rows."""

    num_rows: int
    num_tokens: int  # token positions of the clip: num_rows, rounded up to whole KV blocks

    def in_blocks(self, block_size: int) -> CrossConfig:
        """Return the config with num_tokens rounded up to KV blocks of this size."""
        return msgspec.structs.replace(self, num_tokens=-(-self.num_rows // block_size) * block_size)


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of generation_config.json for every answer of the model."""

    suppressed_ids: list[int] = []  # are never sampled
    first_suppressed_ids: list[int] = []  # are not sampled first
    no_timestamps_id: int | None = None  # unless a prompt has it, its answer has timestamps: the ids above; None: never
    max_first_timestamp: int | None = None  # largest first timestamp, counted from 0; None: any
    end_id: int = 0  # token that ends answers with timestamps; smaller ids are text

    @property
    def depend_on_place(self) -> bool:
        """Whether the tokens that may be sampled depend on the position in the answer."""
        return bool(self.first_suppressed_ids) or self.no_timestamps_id is not None


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture-of-experts settings. The router's terms are those of kernels' Routing."""

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # of each expert
    is_normalized: bool  # divide the weights of the top k by their sum
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    has_choice_bias: bool = False  # a bias is added to the scores, only to choose experts
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scale: float = 1.0
    has_bias: bool = False  # router and experts have biases
    activation: ActivationConfig = ActivationConfig()
    shared_size: int = 0  # intermediate size of the expert that every token passes; 0: none
    has_shared_gate: bool = False  # the shared expert's output is multiplied by sigmoid(gate(x))
    is_beside_mlp: bool = False  # the layer adds a dense MLP's output; the router reads the residual stream


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a checkpoint's tensors, without ".weight" and ".bias". A layer's names follow "<layers>.<number>.". If
    the name of a norm is empty, the layer has no such norm."""

    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"  # table of learned positions
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention_output_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str = ""  # one tensor in place of query, key and value
    qkv_layout: Literal["stacked", "by_kv_head"] = "stacked"  # by_kv_head: for each KV head its queries, key, value
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    cross_norm: str = "encoder_attn_layer_norm"  # this and the next four are for cross attention
    cross_query: str = "encoder_attn.q_proj"
    cross_key: str = "encoder_attn.k_proj"
    cross_value: str = "encoder_attn.v_proj"
    cross_output: str = "encoder_attn.out_proj"
    sinks: str = ""  # a parameter of its own, without ".weight"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""  # one tensor in place of gate and up, gates first
    down: str = "mlp.down_proj"
    experts: str = "mlp"  # the block with router and experts; in files saved by transformers it may also be "mlp"
    expert_matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert: gate, up, down
    are_experts_interleaved: bool = False  # gates and ups alternate, in one tensor for all experts: [E, in, out]
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    is_choice_bias_row: bool = False  # [1, E] in place of [E]
    shared_expert: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    router_scale: str = "router.scale"  # for is_beside_mlp; a parameter without ".weight", as the next two
    expert_scales: str = "router.per_expert_scale"
    layer_scale: str = "layer_scalar"
    beside_mlp_norms: tuple[str, str, str] = (  # of the experts' input, the MLP's output, the experts' output
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
    )
    is_transposed: bool = False  # matrices of layers are [in, out]
    roots: list[str] = []  # prefixes that a file may have in place of "model."
    ignored: list[str] = []  # prefixes of tensors that the text model does not use
    prefers_stored_head: bool = False  # a head in the file is used, even if config.json ties it to the embedding


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder; sizes count elements."""

    architecture: str
    implementation: Literal["native", "transformers"] = "native"  # whose code runs the layers
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: list[LayerConfig]
    ropes: list[RopeConfig]
    norm: NormConfig
    is_parallel: bool = False  # attention and MLP read the same stream, and both are added to it
    head_norms: HeadNormsConfig | None = None
    value_norm: NormConfig | None = None  # norm of each value head, without weight and bias
    has_layer_scale: bool = False  # each layer multiplies the residual stream by a parameter
    qkv_clip: float = 0.0  # queries, keys and values are clamped to ± this before norms; 0: they are not
    attention_scale: float
    attention_softcap: float = 0.0  # 0: none
    has_sinks: bool = False
    query_scaling: tuple[float, int] | None = None  # (b, n): queries are multiplied by 1 + b · log(1 + ⌊position / n⌋)
    activation: ActivationConfig = ActivationConfig()
    experts: ExpertsConfig | None = None
    cross: CrossConfig | None = None  # None: a decoder-only model
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    num_learned_positions: int = 0  # rows of a table of position embeddings; 0: none
    has_qkv_bias: bool = False
    has_key_bias: bool = True  # False: with has_qkv_bias, only queries and values have a bias
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_bias: bool = False
    has_state: bool = False  # layers keep a state besides keys and values, so that requests share no prefixes
    names: TensorNames = TensorNames()
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    tie_word_embeddings: bool
    quantization: QuantizationConfig | None  # of the layers' matrices
    eos_token_ids: list[int]  # sorted
    bos_token_id: int | None
    output_rules: OutputRules | None = None
    language_ids: dict[str, int] | None = None  # tokens that name the spoken language, by its code; None: unknown
    vision: VisionConfig | None = None  # None: the model takes no images
    audio: AudioConfig | None = None  # None: the model takes no audio

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of media; None: the model takes only text."""
        return self.vision or self.audio

    def at_layer(self, layer: int) -> ModelConfig:
        """Return this config with one layer's own sizes in place of the model's."""
        own, names = self.layers[layer], ("head_dim", "num_kv_heads", "intermediate_size")
        sizes = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
        return msgspec.structs.replace(self, **sizes) if sizes else self

    @property
    def num_clip_tokens(self) -> int:
        """Token positions of the audio clip at the start of every request; 0: media are at placeholders."""
        return 0 if self.cross is None else self.cross.num_tokens

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether rotary embeddings depend on max_model_len."""
        return any(rope.kind in ("dynamic", "longrope") for rope in self.ropes)

    @property
    def num_cached_layers(self) -> int:
        """The number of layers with keys and values of their own."""
        return sum(layer.kv_layer is None for layer in self.layers)

    @property
    def num_layer_weights(self) -> int:
        """Number of elements by which one token is multiplied in all layers: elements of the layers' matrices, except
        routers and gates of shared experts, and of the keys and values of cross attention."""
        experts, total = self.experts, 0
        for layer in range(self.num_layers):
            own = self.at_layer(layer)
            total += own.hidden_size * own.head_dim * 2 * (own.num_heads + own.num_kv_heads)
            if own.cross is not None:
                total += own.head_dim * 2 * (own.num_heads * own.hidden_size + own.num_kv_heads * own.cross.num_rows)
            has_mlp = experts is None or not own.layers[layer].has_experts or experts.is_beside_mlp
            total += (2 + own.activation.is_gated) * own.hidden_size * own.intermediate_size * has_mlp
            if experts is not None and own.layers[layer].has_experts:
                total += 3 * own.hidden_size * (experts.top_k * experts.intermediate_size + experts.shared_size)
        return total

    @property
    def num_expert_layers(self) -> int:
        return sum(layer.has_experts for layer in self.layers)
