"""FusedAttention: an attention module of a borrowed model as four of our operations.

    x → query | key | value heads → norms, rotation, KV cache → attention → output

Used for modules that compute exactly this, which a comparison of numbers shows (see sketch.py). All other modules keep
their own code and only call our attention function.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.contract import AttentionMetadata, HeadNorms, Norm, Rotary
from ...kernels.reference import ReferenceOps
from ...kernels.select import Ops
from .arguments import Angles, Arguments
from .attention import AttentionCall, PagedAttention, attending
from .linear import PackedLayer, PackedModule, is_joinable, joined, take_over
from .norm import rms_norm_of
from .sketch import SCALES, LinearSketch, is_close, sketch

FAR = 1_000_003  # a position so large that factors which grow with the position become visible


@dataclass(frozen=True)
class AttentionRecipe:
    """Description of an attention module: the names of its parts, and how it normalizes and rotates heads."""

    projections: tuple[str, ...]  # linear layers whose outputs, side by side, are query | key | value heads
    output: str
    norms: tuple[str, ...]  # norms of query and key heads; () if there are none
    is_after_rope: bool
    is_rotated: bool
    num_returned: int  # 0: the module returns its output; else the size of a tuple that begins with it

    def head_norms(self, module: nn.Module, call: AttentionCall) -> HeadNorms | None:
        """Return the norms of query and key heads; None if there are none. ValueError if they do not fit the heads."""
        if not self.norms:
            return None
        found = [rms_norm_of(getattr(module, name)) for name in self.norms]
        heads = (call.num_heads, call.num_kv_heads)
        sizes = [0 if norm is None or norm.weight is None else len(norm.weight) for norm in found]
        if sizes == [call.key_dim] * 2:
            spans_heads = False
        elif sizes == [count * call.key_dim for count in heads]:
            spans_heads = True
        else:
            raise ValueError(f"norms of {sizes} elements")
        query, key = (norm for norm in found if norm is not None)
        if spans_heads:
            query, key = (_per_head(norm, count) for norm, count in zip((query, key), heads, strict=True))
        return HeadNorms(query, key, spans_heads, self.is_after_rope)


class FusedAttention(PackedModule):
    """Attention module, x [1, T, hidden] → [1, T, hidden], over the KV cache of the step."""

    def __init__(
        self, ops: Ops, paged: PagedAttention, module: nn.Module, call: AttentionCall, recipe: AttentionRecipe
    ) -> None:
        super().__init__()
        self._ops, self._paged, self.call = ops, paged, call
        self.arguments = paged.arguments[module]
        self.is_rotated = recipe.is_rotated
        self._num_returned = recipe.num_returned
        self.norms = recipe.head_norms(module, call)
        self.qkv = ops.pack_linear(*joined(module, recipe.projections))
        self.num_bytes = self.qkv.nbytes
        self.output = PackedLayer(ops, getattr(module, recipe.output))

    def forward(self, *args: Any, **options: Any) -> Any:
        x, angles = self.arguments.found(args, options)
        return self.as_returned(self.attended(x[0], angles)[None])

    def attended(self, x: Tensor, angles: Angles | None) -> Tensor:
        """Compute the module's output [T, hidden] for x [T, hidden]."""
        (kv_cache, metadata), call = self._paged.context.groups[0], self.call
        rotary, placed = self._paged.rotation(angles if self.is_rotated else None)
        heads = self._ops.linear(x.to(self.output.weight.dtype), self.qkv)
        heads = heads.view(len(heads), -1, call.key_dim)
        query = self._ops.qk_norm_rope_cache(heads, self.norms, rotary, kv_cache, call.layer, placed)
        attended = self._ops.paged_attention(query, kv_cache, call.layer, metadata, call.spec)
        output: Tensor = self.output(attended.flatten(1))
        return output

    def as_returned(self, output: Tensor) -> Any:
        """Return the output in the form in which the module returns it: alone, or as the first of a tuple."""
        return (output, *(None,) * (self._num_returned - 1)) if self._num_returned else output


def fuse_attention(paged: PagedAttention, ops: Ops, dtype: torch.dtype) -> None:
    """Make each attention module of `dtype` compute as a FusedAttention if a recipe is found for it."""
    for module, call in paged.calls.items():
        recipe = _recipe(module, call, paged, dtype) if paged.is_widest(call) else None
        if recipe is not None:
            fused = FusedAttention(ops, paged, module, call, recipe)
            take_over(module, fused, (*recipe.projections, recipe.output, *recipe.norms))


def _recipe(
    module: nn.Module, call: AttentionCall, paged: PagedAttention, dtype: torch.dtype
) -> AttentionRecipe | None:
    linears = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    normed = [name for name, child in module.named_children() if name not in linears and list(child.parameters())]
    arguments = paged.arguments.get(module)
    if arguments is None or len(linears) not in (2, 4) or len(normed) not in (0, 2):
        return None
    if not all(is_joinable(getattr(module, name), dtype) for name in linears):
        return None
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        try:
            runs = [_run(module, call, arguments, scale) for scale in SCALES]
            found = _recipes(linears, normed, runs[0])
            return next((each for each in found if all(run.is_by(each) for run in runs)), None)
        except Exception:  # a model's code may raise anything on such inputs
            return None


@dataclass(frozen=True)
class _Run:
    """One run of a sketch: its input, the heads that it passes to attention, the results it gets, and its output."""

    call: AttentionCall
    twin: nn.Module
    linears: dict[str, LinearSketch]
    x: Tensor  # [1, T, hidden]
    cos_sin: Tensor | None  # [T, rotated]
    heads: tuple[Tensor, Tensor, Tensor]  # query, key and value [T, heads, D]
    attended: Tensor  # [1, T, H, D]
    output: Any

    def is_by(self, recipe: AttentionRecipe) -> bool:
        output = self.output[0] if recipe.num_returned else self.output
        last = self.linears[recipe.output]
        if last.given is None or not torch.equal(last.given.flatten(), self.attended.flatten()):
            return False
        if not torch.equal(output, last.returned):
            return False
        for name in recipe.projections:
            given = self.linears[name].given
            if given is None or not torch.equal(given, self.x):
                return False
        call = self.call
        fused = torch.cat([self.linears[name].returned for name in recipe.projections], dim=-1)[0]
        num_all = call.num_heads + 2 * call.num_kv_heads
        if fused.shape[1] != num_all * call.key_dim:
            return False
        expected = _turned(fused.view(-1, num_all, call.key_dim), recipe, self)
        return all(is_close(actual, wanted) for actual, wanted in zip(self.heads, expected, strict=True))


def _recipes(linears: list[str], normed: list[str], run: _Run) -> Iterator[AttentionRecipe]:
    is_tuple = isinstance(run.output, tuple)
    if is_tuple and any(each is not None for each in run.output[1:]):
        return
    num_returned = len(run.output) if is_tuple else 0
    rotations = (False,) if run.cos_sin is None else (True, False)
    pairs = [tuple(pair) for pair in itertools.permutations(normed)]
    for *projections, output in itertools.permutations(linears):
        for norms, is_rotated, is_after in itertools.product(pairs, rotations, (False, True)):
            yield AttentionRecipe(tuple(projections), output, norms, is_after, is_rotated, num_returned)


def _run(module: nn.Module, call: AttentionCall, arguments: Arguments, scale: float) -> _Run:
    twin, linears = sketch(module)
    drawn = arguments.drawn(scale, FAR)
    x, angles = drawn.found(drawn.args, drawn.options)
    seen: list[Tensor] = []
    attended = torch.randn(1, x.shape[1], call.num_heads, call.value_dim)

    def attend(_module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _options: dict[str, Any]) -> Tensor:
        seen.extend(each[0].transpose(0, 1).clone() for each in (query, key, value))
        return attended.clone()

    with attending(attend):
        output = twin(*drawn.args, **drawn.options)
    query, key, value = seen
    cos_sin = None
    if angles is not None:
        cos_sin = torch.cat([each[0, :, : each.shape[-1] // 2] for each in angles], dim=-1)
    return _Run(call, twin, linears, x, cos_sin, (query, key, value), attended, output)


def _turned(heads: Tensor, recipe: AttentionRecipe, run: _Run) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value heads [T, n, D] after the recipe's norms and rotation."""
    num_tokens, call = len(heads), run.call
    kv_cache = torch.zeros(1, 1, 2, call.num_kv_heads, num_tokens, call.key_dim)
    tokens, none = torch.arange(num_tokens), torch.empty(0, dtype=torch.int32)
    metadata = AttentionMetadata(tokens, tokens, none, none, none, 0, [], [])
    rotary = Rotary(run.cos_sin if recipe.is_rotated else None)
    norms = recipe.head_norms(run.twin, call)
    query = ReferenceOps().qk_norm_rope_cache(heads, norms, rotary, kv_cache, 0, metadata)
    key, value = kv_cache[0, 0].transpose(1, 2)
    return query, key, value


def _per_head(norm: Norm, num_heads: int) -> Norm:
    assert norm.weight is not None
    return Norm(norm.kind, norm.weight.view(num_heads, -1), None, norm.eps)
