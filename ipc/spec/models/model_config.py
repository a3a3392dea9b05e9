"""ModelConfig: the shape of a decoder or of an encoder of text, in the same fields for every family.

The supervisor reads it once from config.json (`model_file.py`) and sends it to every process. A further family needs a
line in `families.py`; a further kind of layer needs a field here.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from .audio_config import AudioConfig
from .pooling.pooling_config import PoolingConfig
from .quantization_config import QuantizationConfig
from .vision_config import VisionConfig

ModelImplementation = Literal["auto", "native", "transformers"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional", "divided"]
Encoder: TypeAlias = VisionConfig | AudioConfig
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]
Mixer = Literal["attention", "state", "both", "none"]


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


class PositionBiasConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What attention adds to scores by the distance of query and key, alike in all layers: a learned number for each
    head and bucket of distances, or the distance times a head's slope (ALiBi)."""

    kind: Literal["buckets", "slopes"]
    num_buckets: int = 32  # this and the next one are for buckets
    max_distance: int = 128  # from here on all distances of a direction have one bucket


class ActivationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Activation of the MLP. Gated: act(gate(x)) * up(x); else act(up(x))."""

    kind: ActivationKind = "silu"
    is_gated: bool = True
    limit: float = 0.0  # bound of "swiglu_clamped"


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's own settings."""

    mixer: Mixer = "attention"  # what mixes the tokens; "both": the sum of attention and of a state's output
    has_input_norm: bool = True  # False: the mixer reads the residual stream as it is
    has_mlp: bool = True
    window: int | None = None  # positions that a token attends to, its own included; None: all
    rope: int | None = 0  # index in ModelConfig.ropes; None: no positions (NoPE)
    has_experts: bool = False
    head_dim: int | None = None  # None, here and below: the model's
    num_kv_heads: int | None = None
    intermediate_size: int | None = None  # of the dense MLP
    are_values_keys: bool = False  # values are the keys before their norm and rotation
    kv_layer: int | None = None  # the layer whose keys and values this one attends to; None: it has its own

    @property
    def has_attention(self) -> bool:
        return self.mixer in ("attention", "both")

    @property
    def has_state(self) -> bool:
        return self.mixer in ("state", "both")

    @property
    def has_own_kv(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.has_attention and self.kv_layer is None


class StateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that mix tokens through a state: a short convolution, then a scan with a matrix [key_dim, value_dim] for
    each head. Its input projections give parts of a token, named by letters:

        q, k  query and key of each key head; Mamba2's C and B
        v     value of each head; Mamba2's x
        z     gate of the output, as long as v
        u     factor of v before the convolution (kind "conv")
        a, b  decay and beta, a number for each head; Mamba2's dt is its a

    kind: "gated_delta" (arXiv 2412.06464), "mamba2" (arXiv 2405.21060), or "conv", which has a convolution alone.
    """

    kind: Literal["gated_delta", "mamba2", "conv"]
    num_heads: int  # of values; of kind "conv": hidden_size
    key_heads: int = 0  # each is read by num_heads / key_heads heads; 0: there is no scan
    are_key_heads_tiled: bool = False  # head h reads key head h % key_heads, not h // (num_heads / key_heads)
    key_dim: int = 0
    value_dim: int = 1
    conv_size: int  # inputs of the convolution, the token's own included
    conv_parts: str = "qkv"  # the parts that pass through the convolution, in the order of its weights
    has_conv_activation: bool = True  # SiLU
    has_conv_bias: bool = False
    has_projection_bias: bool = False
    has_output_bias: bool = False
    beta_scale: float = 1.0
    min_dt: float = 0.0
    max_dt: float | None = None  # None: unbounded
    gate: Literal["norm_then_silu", "silu_then_norm", "silu", "product"] = "norm_then_silu"  # order of norm and gate
    norm: NormConfig | None = None  # of the output; None: there is none
    norm_groups: int = 0  # parts of a token's output that are normalized separately; 0: heads, which share a weight
    has_skip: bool = False  # adds D · v to the output of the scan
    input_scale: float = 1.0
    output_scale: float = 1.0
    part_scales: dict[str, float] = {}  # factors of parts, before the convolution
    projections: dict[str, str]  # tensor → the parts that it gives, such as "qkvz"
    by_key_head: tuple[str, ...] = ()  # tensors that have their parts of the first key head, then of the second, …
    names: StateNames

    def part_size(self, part: str) -> int:
        """Return the number of elements that a token has in a part."""
        if part in "qk":
            return self.key_heads * self.key_dim
        return self.num_heads if part in "ab" else self.num_heads * self.value_dim

    @property
    def num_outputs(self) -> int:
        """The number of elements that the projections give a token, and those that it has before the last one."""
        return sum(map(self.part_size, "".join(self.projections.values()))) + self.part_size("v")


class StateNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the tensors of a layer's state mixer, as in TensorNames. `projections` of StateConfig follow `block`,
    too. Empty: the layer has no such tensor."""

    block: str
    conv: str = "conv1d"  # with "{part}": a tensor for each of the parts
    decay: str = "A_log"  # this and the next two are parameters of their own, without ".weight"
    dt_bias: str = "dt_bias"
    skip: str = "D"
    norm: str = "norm"
    output: str = "out_proj"
    layer_norms: tuple[str, str, str, str] | None = None  # input, mixer's output, MLP's input, MLP's output; None: the
    # names that layers with attention have


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
    token_types: str = "model.token_type_embeddings"
    position_bias: str = ""  # table of the heads' numbers by bucket
    embedding_norm: str = "model.embedding_norm"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention_output_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    saved_norms: dict[str, str] = {}  # names of a layer's norms → names that files saved by transformers may have
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
    are_ups_first: bool = False  # in that tensor
    down: str = "mlp.down_proj"
    experts: str = "mlp"  # the block with router and experts; in files saved by transformers it may also be "mlp"
    expert_list: str = "experts"  # in the block, the prefix of an expert's number or of stacks; empty: there is none
    expert_stacks: tuple[str, str] = ("gate_up_proj", "down_proj")  # of all experts: gates and ups, downs
    expert_matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert: gate, up, down
    are_experts_interleaved: bool = False  # gates and ups alternate, in one tensor for all experts: [E, in, out]
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    is_choice_bias_row: bool = False  # [1, E] in place of [E]
    shared_expert: str = "shared_experts"  # in the block; empty: its names are those of a dense MLP
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
    """The shape of a decoder or of an encoder of text; sizes count elements."""

    architecture: str
    implementation: Literal["native", "transformers"] = "native"  # whose code runs the layers
    is_encoder: bool = False  # every token attends to its whole prompt: the model pools, and generates nothing
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
    is_post_norm: bool = False  # output norms are of the sum with the residual stream, which continues from them
    embedding_norm: NormConfig | None = None  # of the sum of a token's embeddings
    head_norms: HeadNormsConfig | None = None
    value_norm: NormConfig | None = None  # norm of each value head, without weight and bias
    has_layer_scale: bool = False  # each layer multiplies the residual stream by a parameter
    qkv_clip: float = 0.0  # queries, keys and values are clamped to ± this before norms; 0: they are not
    attention_scale: float
    attention_softcap: float = 0.0  # 0: none
    has_sinks: bool = False
    position_bias: PositionBiasConfig | None = None
    query_scaling: tuple[float, int] | None = None  # (b, n): queries are multiplied by 1 + b · log(1 + ⌊position / n⌋)
    activation: ActivationConfig = ActivationConfig()
    experts: ExpertsConfig | None = None
    cross: CrossConfig | None = None  # None: a decoder-only model
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP
    attention_input_scale: float = 1.0
    attention_output_scale: float = 1.0
    gate_scale: float = 1.0  # of the gated MLP's gates, before the activation
    mlp_output_scale: float = 1.0  # of the dense MLP
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    num_learned_positions: int = 0  # rows of a table of position embeddings; 0: none
    first_position: int = 0  # the row in it of a request's first token
    num_token_types: int = 0  # rows of a table of embeddings of token types; 0: none
    has_qkv_bias: bool = False
    has_key_bias: bool = True  # False: with has_qkv_bias, only queries and values have a bias
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_up_bias: bool = True  # False: with has_mlp_bias, only the last matrix of the MLP has a bias
    has_head_bias: bool = False
    state: StateConfig | None = None  # of layers whose mixer is "state" or "both"
    has_output_gate: bool = False  # each query head has a gate behind it; its sigmoid is a factor of attention's output
    has_state: bool = False  # layers keep a state that is not in the KV cache, so that requests share no prefixes
    names: TensorNames = TensorNames()
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    tie_word_embeddings: bool
    quantization: QuantizationConfig | None  # of the layers' matrices
    eos_token_ids: list[int]  # sorted
    bos_token_id: int | None
    output_rules: OutputRules | None = None
    has_lm_head: bool = True  # False: the file has no language model's head, so that nothing is generated
    pooling: PoolingConfig = PoolingConfig()  # how hidden states become vectors or scores
    language_ids: dict[str, int] | None = None  # tokens that name the spoken language, by its code; None: unknown
    vision: VisionConfig | None = None  # None: the model takes no images
    audio: AudioConfig | None = None  # None: the model takes no audio

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of media; None: the model takes only text."""
        return self.vision or self.audio

    @property
    def is_generative(self) -> bool:
        """Whether the model generates tokens; every model pools."""
        return self.has_lm_head and not self.is_encoder

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
        return sum(layer.has_own_kv for layer in self.layers)

    @property
    def num_layer_weights(self) -> int:
        """Number of elements by which one token is multiplied in all layers: elements of the layers' matrices, except
        routers and gates of shared experts, and of the keys and values of cross attention."""
        experts, total = self.experts, 0
        for layer in range(self.num_layers):
            own = self.at_layer(layer)
            kind = own.layers[layer]
            if kind.has_attention:
                num_heads = 2 * (own.num_heads + own.num_kv_heads) + own.has_output_gate * own.num_heads
                total += own.hidden_size * own.head_dim * num_heads
            if kind.has_state and self.state is not None:
                total += own.hidden_size * self.state.num_outputs
            if own.cross is not None:
                total += own.head_dim * 2 * (own.num_heads * own.hidden_size + own.num_kv_heads * own.cross.num_rows)
            if kind.has_mlp and (experts is None or not kind.has_experts or experts.is_beside_mlp):
                total += (2 + own.activation.is_gated) * own.hidden_size * own.intermediate_size
            if experts is not None and kind.has_experts:
                inner_size = experts.top_k * experts.intermediate_size + experts.shared_size
                total += (2 + experts.activation.is_gated) * own.hidden_size * inner_size
        return total

    @property
    def num_expert_layers(self) -> int:
        return sum(layer.has_experts for layer in self.layers)
