"""PackedMLP: a feed-forward block of a borrowed model as two of our operations; the first includes the activation.

Blocks are gated, down(act(gate(x)) * up(x)), or plain, down(act(up(x))); gates and ups may be one matrix. A block is
recognized by the numbers that it computes, see sketch.py.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels.contract import Activation, ActivationKind
from ...kernels.reference import ReferenceOps
from ...kernels.select import Ops
from .linear import PackedLayer, PackedModule, is_joinable, joined, take_over
from .sketch import SCALES, is_close, sketch

KINDS: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")


@dataclass(frozen=True)
class MLPRecipe:
    """Description of a feed-forward block: the names of its linear layers, and the activation between them."""

    first: tuple[str, ...]  # gates, then ups; one layer if it computes both or if there are no gates
    activation: Activation
    down: str


class PackedMLP(PackedModule):
    """Feed-forward block, x [..., hidden] → [..., hidden]."""

    def __init__(self, ops: Ops, module: nn.Module, recipe: MLPRecipe) -> None:
        super().__init__()
        self._ops = ops
        self.up = ops.pack_linear(*joined(module, recipe.first), recipe.activation)
        self.num_bytes = self.up.nbytes
        self.down = PackedLayer(ops, getattr(module, recipe.down))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(self.down.weight.dtype)
        output: Tensor = self.down(self._ops.linear(flat, self.up))
        return output.view(x.shape)


def pack_mlps(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Make each module of `dtype` that turns out to be a feed-forward block compute as a PackedMLP."""
    for module in [each for each in model.modules() if not isinstance(each, nn.Linear)]:  # must keep no weight alive
        recipe = recipe_of(module, dtype)
        if recipe is not None:
            take_over(module, PackedMLP(ops, module, recipe), (*recipe.first, recipe.down))


def recipe_of(module: nn.Module, dtype: torch.dtype) -> MLPRecipe | None:
    """Return the recipe of a feed-forward block; None if the module computes anything else, has parameters outside its
    linear layers, or has a layer that is not joinable."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if len(linears) not in (2, 3) or not all(is_joinable(each, dtype) for each in linears.values()):
        return None
    if len(list(module.parameters())) != sum(len(list(each.parameters())) for each in linears.values()):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    sizes = dict.fromkeys(each.in_features for each in linears.values())
    found = (_recipe_of_inputs(module, list(linears), num_inputs) for num_inputs in sizes)
    return next((each for each in found if each is not None), None)


def _recipe_of_inputs(module: nn.Module, names: list[str], num_inputs: int) -> MLPRecipe | None:
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        try:
            runs = [_run(module, num_inputs, scale) for scale in SCALES]
        except Exception:  # a model's code may raise anything on such inputs
            return None
        return next((each for each in _recipes(names) if all(run.is_by(each) for run in runs)), None)


def _recipes(names: list[str]) -> Iterator[MLPRecipe]:
    for *first, down in itertools.permutations(names):
        for kind, is_gated in itertools.product(KINDS, (True, False) if len(first) == 1 else (True,)):
            yield MLPRecipe(tuple(first), Activation(kind, is_gated), down)


@dataclass(frozen=True)
class _Run:
    """One run of a sketch from x to y, with the inputs and the outputs of its linear layers by name."""

    x: Tensor
    y: Tensor
    given: dict[str, Tensor | None]
    returned: dict[str, Tensor]

    def is_by(self, recipe: MLPRecipe) -> bool:
        inner = self.given[recipe.down]
        is_fed = all(_is_same(self.given[name], self.x) for name in recipe.first)
        if not is_fed or inner is None or not _is_same(self.returned[recipe.down], self.y):
            return False
        outputs = torch.cat([self.returned[name] for name in recipe.first], dim=-1)
        if recipe.activation.is_gated and outputs.shape[-1] != 2 * inner.shape[-1]:
            return False
        return is_close(inner, ReferenceOps().activate(outputs, recipe.activation))


def _run(module: nn.Module, num_inputs: int, scale: float) -> _Run:
    twin, linears = sketch(module)
    x = scale * torch.randn(1, 3, num_inputs)
    y = twin(x.clone())
    return _Run(x, y, {n: each.given for n, each in linears.items()}, {n: each.returned for n, each in linears.items()})


def _is_same(actual: Tensor | None, expected: Tensor) -> bool:
    return actual is not None and torch.equal(actual, expected)
