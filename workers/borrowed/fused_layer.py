"""FusedLayer: a whole decoder layer of a borrowed model, computed in one call if there is a kernel for it.

Used for layers that consist of a FusedAttention, a PackedMLP, and norms and residual additions like those of
LayerWeights, which a comparison of numbers shows (see sketch.py). All other layers keep their own code.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.contract import AttentionWeights, LayerWeights, MLPWeights, Norm, Rotary
from ...kernels.reference import ReferenceOps
from ...kernels.select import Ops
from .arguments import Angles, Arguments
from .attention import PagedAttention
from .fused_attention import FAR, FusedAttention
from .linear import PackedModule, take_over
from .mlp import PackedMLP
from .norm import rms_norm_of
from .sketch import RANK, SCALES, is_close, randomized

PLACES = ("input_norm", "mixer_output_norm", "mlp_norm", "mlp_output_norm")


@dataclass(frozen=True)
class LayerRecipe:
    """Description of a decoder layer: the names of its parts, and how it combines them."""

    attention: str
    mlp: str
    norms: tuple[tuple[str, str], ...]  # for each norm its field in LayerWeights, and its name
    is_parallel: bool
    num_returned: int  # 0: the layer returns its output; else the size of a tuple that begins with it

    def found_norms(self, module: nn.Module) -> dict[str, Norm | None]:
        return dict.fromkeys(PLACES) | {place: rms_norm_of(getattr(module, n)) for place, n in self.norms}


class FusedLayer(PackedModule):
    """Decoder layer, x [1, T, hidden] → [1, T, hidden], over the KV cache of the step."""

    def __init__(self, ops: Ops, paged: PagedAttention, module: nn.Module, recipe: LayerRecipe) -> None:
        super().__init__()
        self._ops, self._paged = ops, paged
        self._arguments = paged.arguments[module]
        self._returned = recipe.num_returned
        attention, mlp = getattr(module, recipe.attention).packed, getattr(module, recipe.mlp).packed
        self.attention, self.mlp, call = attention, mlp, attention.call
        self._weights = LayerWeights(
            attention=AttentionWeights(
                qkv=attention.qkv,
                head_norms=attention.norms,
                rotary=Rotary(None),
                spec=call.spec,
                output=attention.output.packed,
                group=0,
                cache_layer=call.layer,
            ),
            mlp=MLPWeights(mlp.up, mlp.down.packed),
            is_parallel=recipe.is_parallel,
            is_post_norm=False,
            cross=None,
            state=None,
            **recipe.found_norms(module),
        )
        is_whole = attention.output.split is None and mlp.down.split is None
        self._fused = None
        if is_whole:  # otherwise ranks sum their results between its parts
            self._fused = ops.fuse_layer(self._weights, call.num_heads, call.num_kv_heads, call.key_dim)

    def forward(self, *args: Any, **options: Any) -> Any:
        x, angles = self._arguments.found(args, options)
        output = (self._run(x[0], angles) if self._fused is None else self._run_fused(x[0], angles))[None]
        return output if not self._returned else (output, *(None,) * (self._returned - 1))

    def _run_fused(self, x: Tensor, angles: Angles | None) -> Tensor:
        assert self._fused is not None
        attention, (kv_cache, metadata) = self.attention, self._paged.context.groups[0]
        rotary, placed = self._paged.rotation(angles if attention.is_rotated else None)
        output: Tensor = self._fused(x, rotary, placed.positions, kv_cache, attention.call.layer, metadata)
        return output

    def _run(self, x: Tensor, angles: Angles | None) -> Tensor:
        weights, first = self._weights, self._normed(x, self._weights.input_norm)
        if weights.is_parallel:
            second = first if weights.mlp_norm is None else self._ops.norm(x, weights.mlp_norm)
            output: Tensor = x + self.attention.attended(first, angles) + self.mlp(second)
            return output
        x = x + self._normed(self.attention.attended(first, angles), weights.mixer_output_norm)
        fed: Tensor = self.mlp(self._normed(x, weights.mlp_norm))
        return x + self._normed(fed, weights.mlp_output_norm)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else self._ops.norm(x, norm)


def fuse_layers(model: nn.Module, paged: PagedAttention, ops: Ops, dtype: torch.dtype) -> None:
    """Make each layer of `dtype` compute as a FusedLayer if a LayerRecipe is found for it."""
    for module in list(model.modules()):
        recipe = _recipe(module, paged, dtype)
        if recipe is not None:
            fused = FusedLayer(ops, paged, module, recipe)
            take_over(module, fused, (recipe.attention, recipe.mlp, *(name for _, name in recipe.norms)))


def _recipe(module: nn.Module, paged: PagedAttention, dtype: torch.dtype) -> LayerRecipe | None:
    parts = {name: getattr(child, "packed", None) for name, child in module.named_children()}
    blocks = [(n, each) for n, each in parts.items() if isinstance(each, (FusedAttention, PackedMLP))]
    norms = [n for n, child in module.named_children() if parts[n] is None and list(child.parameters())]
    arguments = paged.arguments.get(module)
    kinds = sorted(type(each).__name__ for _, each in blocks)
    if kinds != ["FusedAttention", "PackedMLP"] or arguments is None or not 1 <= len(norms) <= len(PLACES):
        return None
    weights = [getattr(getattr(module, name), "weight", None) for name in norms]
    if list(module.parameters(recurse=False)) or any(each is None or each.dtype != dtype for each in weights):
        return None
    attention, mlp = sorted((name for name, _ in blocks), key=lambda name: isinstance(parts[name], PackedMLP))
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        try:
            runs = [_run(module, (attention, mlp), norms, arguments, scale) for scale in SCALES]
            found = _recipes(attention, mlp, norms, runs[0].num_returned)
            return next((each for each in found if all(run.is_by(each) for run in runs)), None)
        except Exception:  # a model's code may raise anything on such inputs
            return None


def _recipes(attention: str, mlp: str, norms: list[str], num_returned: int) -> Iterator[LayerRecipe]:
    for places in itertools.permutations(PLACES, len(norms)):
        for is_parallel in (False, True):
            pairs = tuple(zip(places, norms, strict=True))
            yield LayerRecipe(attention, mlp, pairs, is_parallel, num_returned)


class BlockSketch(nn.Module):
    """Random linear map that replaces a layer's attention or MLP in a sketch, and records its last call."""

    def __init__(self, num_hidden: int, part: FusedAttention | PackedMLP) -> None:
        super().__init__()
        self._inner, self._outer = torch.randn(num_hidden, RANK) * num_hidden**-0.5, torch.randn(RANK, num_hidden)
        self._part = [part]  # in a list, so that torch does not register it as a child
        self.given, self.returned = torch.empty(0), torch.empty(0)
        self.angles: Any = None

    def forward(self, *args: Any, **options: Any) -> Any:
        (part,) = self._part
        if isinstance(part, PackedMLP):
            x = args[0]
        else:
            x, self.angles = part.arguments.found(args, options)
        self.given, self.returned = x.clone(), x @ self._inner @ self._outer
        output = self.returned.clone()
        return output if isinstance(part, PackedMLP) else part.as_returned(output)


@dataclass(frozen=True)
class _Run:
    """One run of a layer's sketch from x to y."""

    twin: nn.Module
    x: Tensor
    y: Tensor
    num_returned: int
    is_turned: bool  # whether the layer passes its angles on to its attention, or the attention needs none

    def is_by(self, recipe: LayerRecipe) -> bool:
        norms = recipe.found_norms(self.twin)
        attention, mlp = (getattr(self.twin, name) for name in (recipe.attention, recipe.mlp))
        assert isinstance(attention, BlockSketch) and isinstance(mlp, BlockSketch)

        def normed(x: Tensor, place: str) -> Tensor:
            norm = norms[place]
            return x if norm is None else ReferenceOps().norm(x, norm)

        first = normed(self.x, "input_norm")
        if recipe.is_parallel:
            if norms["mixer_output_norm"] is not None or norms["mlp_output_norm"] is not None:
                return False
            second = first if norms["mlp_norm"] is None else normed(self.x, "mlp_norm")
            y = self.x + attention.returned + mlp.returned
        else:
            middle = self.x + normed(attention.returned, "mixer_output_norm")
            second = normed(middle, "mlp_norm")
            y = middle + normed(mlp.returned, "mlp_output_norm")
        pairs = ((attention.given, first), (mlp.given, second), (self.y, y))
        return self.is_turned and all(is_close(actual, expected) for actual, expected in pairs)


def _run(module: nn.Module, blocks: tuple[str, str], norms: list[str], arguments: Arguments, scale: float) -> _Run:
    drawn = arguments.drawn(scale, FAR)
    x, angles = drawn.found(drawn.args, drawn.options)
    sketches = {name: BlockSketch(x.shape[-1], getattr(module, name).packed) for name in blocks}
    copies = {name: randomized(getattr(module, name)) for name in norms}
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)
    twin.__dict__["_modules"] = {**module._modules, **sketches, **copies}
    returned = twin(*drawn.args, **drawn.options)
    num_returned = len(returned) if isinstance(returned, tuple) else 0
    if num_returned and any(each is not None for each in returned[1:]):
        raise ValueError("it returns more than hidden states")
    given = sketches[blocks[0]].angles
    is_same = given is not None and angles is not None and torch.equal(torch.cat(given), torch.cat(angles))
    is_turned = is_same or not getattr(module, blocks[0]).packed.is_rotated
    return _Run(twin, x, returned[0] if num_returned else returned, num_returned, is_turned)
