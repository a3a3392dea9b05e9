"""BorrowedModel: a causal language model of transformers whose layers run over our paged KV cache.

    token ids → transformers' decoder, the tokens of all rows packed as [1, T] → hidden states → its head → logits

It serves architectures for which we have no model. Attention, linear layers and recurrent states are ours; the rest,
in which architectures differ, is transformers' code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...kernels.contract import BatchColumns
from ...kernels.select import Ops
from ..machine.parallel import ParallelGroup
from ..step.kv_cache import KVCacheSpec
from ..step.model_step import StepContext
from ..step.state_cache import StateSpec
from .attention import IMPLEMENTATION, PagedAttention, Unserved, attention_function
from .fused_attention import fuse_attention
from .fused_layer import fuse_layers
from .linear import PackedLayer, PackedModule, pack_layers
from .mlp import pack_mlps
from .norm import pack_norms
from .recurrent import PassingCache, RecurrentRows

NUM_TRIAL_TOKENS = 2

ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_function)


class BorrowedModel:
    """Forward pass of one rank over transformers' modules, for inference only. Shapes are those of DecoderModel."""

    def __init__(
        self,
        model: PreTrainedModel,
        ops: Ops,
        dtype: torch.dtype = torch.float32,
        group: ParallelGroup | None = None,
    ) -> None:
        """Run the model once, on a few tokens, and pack its parts of `dtype`, which must be the dtype of `ops`.

        model: built with our attention implementation, and sharded if there is a `group` of ranks (see shard_model).
        Raises Unserved if the model cannot be served.
        """
        self._model = model.train(False)
        self._rank = 0 if group is None else group.rank
        self.decoder: nn.Module = model  # the trial replaces it by the model's decoder
        self._config = model.config.get_text_config(decoder=True)
        self._vocab_size = int(self._config.vocab_size)
        self._device = next(model.parameters()).device
        self._attention = PagedAttention(ops)
        self.rows = RecurrentRows(self._config)
        self.state_spec: StateSpec | None = None  # states are in the rows, not in the KV cache
        self._cache = PassingCache(config=self._config)
        self._given: Any = None  # output of the decoder, for the head
        with torch.inference_mode():
            self._try()
            self._pack(ops, dtype)
        self._compute = self.decoder.forward
        self.decoder.forward = self._give

    def _pack(self, ops: Ops, dtype: torch.dtype) -> None:
        """Replace the parts that our operations can compute: attention and MLP blocks, whole layers of such blocks, and
        then single linear layers and norms."""
        model = self._model
        fuse_attention(self._attention, ops, dtype)
        pack_mlps(model, ops, dtype)
        fuse_layers(model, self._attention, ops, dtype)
        self._attention.arguments.clear()
        pack_layers(model, ops, dtype)
        pack_norms(model, ops, dtype)
        head = model.get_output_embeddings()
        if isinstance(head, PackedLayer):
            head.is_head = True
        tensors = [each for each in (*model.parameters(), *model.buffers()) if each.device.type != "meta"]
        plain = {each.data_ptr(): each.nbytes for each in tensors}  # tied tensors count once
        packed = sum(each.num_bytes for each in model.modules() if isinstance(each, PackedModule))
        self.weight_bytes = packed + sum(plain.values())

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """Return one spec: all layers share their block tables."""
        return [self._attention.kv_cache_spec(block_size, dtype)]

    @property
    def state_bytes(self) -> int:
        return self.rows.state_bytes

    def forward_logits(self, token_ids: Tensor, logits_indices: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        """Compute one step, see DecoderModel.forward_logits."""
        if not len(token_ids):
            hidden = torch.empty((0, self._config.hidden_size), device=token_ids.device)
            return hidden, torch.empty((0, self._vocab_size), device=token_ids.device)
        self.rows.begin(context)
        with self._attention.step(context):
            self._given = self._compute(**self._inputs(token_ids, context.metadata.positions))
        hidden = self._given.last_hidden_state[0]
        if not len(logits_indices):
            return hidden, torch.empty((0, self._vocab_size), device=hidden.device)
        return hidden, self.compute_logits(hidden, logits_indices)

    def forward_mixed(self, token_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor:
        raise NotImplementedError("borrowed models sample on the host")

    def forward_decode(self, row_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor:
        raise NotImplementedError("borrowed models sample on the host")

    def compute_logits(self, hidden: Tensor, indices: Tensor | None = None) -> Tensor:
        """Return float32 logits [n, vocab_size] for the tokens `indices` [n] int64 of hidden [T, hidden_size] (None:
        all tokens), computed by the model's own head. All ranks must call; those other than the first get [0,
        vocab_size].
        """
        hidden = hidden if indices is None else hidden[indices]
        self._given.last_hidden_state = hidden[None]
        token_ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._model(input_ids=token_ids, use_cache=False, return_dict=True).logits
        return logits[0, : 0 if self._rank else len(hidden)].float()

    def _give(self, *args: Any, **kwargs: Any) -> Any:
        return self._given

    def _inputs(self, token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
        return {
            "input_ids": token_ids.long()[None],
            "position_ids": positions[None],
            "past_key_values": self._cache,
            "use_cache": False,
            "return_dict": True,
        }

    def _find_decoder(self, inputs: dict[str, Any]) -> None:
        """Run the model once and set `decoder`: the part that is called first among those that are PreTrainedModels.
        Raises Unserved if there is none."""
        called: list[nn.Module] = []
        parts = [
            each for each in self._model.modules() if isinstance(each, PreTrainedModel) and each is not self._model
        ]
        hooks = [each.register_forward_pre_hook(lambda module, _args: called.append(module)) for each in parts]
        self._model(**inputs)
        for hook in hooks:
            hook.remove()
        if not called:
            raise Unserved("it has no decoder apart from its head")
        self.decoder = called[0]

    def _try(self) -> None:
        token_ids = torch.arange(NUM_TRIAL_TOKENS, device=self._device)
        try:
            with self._attention.trial(self._model, self._device):
                self.rows.wrap(
                    self._model,
                    lambda: self._find_decoder(self._inputs(token_ids, token_ids)),
                    lambda module: module in self._attention.calls,
                )
        except Unserved:
            raise
        except Exception as error:  # a model's code may raise anything if it needs a mask, or another cache
            raise Unserved(f"its layers need a mask or cache of transformers' own ({_shown(error)})") from error


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
