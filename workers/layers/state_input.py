"""StateInput: the first half of a mixer with a state, on one rank: project a token into parts, and convolve some.

Heads of values are divided among the ranks. A rank holds the heads of queries and keys that its heads read, so that
several ranks may hold the same one. StateConfig names the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...ipc.spec.models.model_config import StateConfig
from ...kernels.contract import (
    ConvActivation,
    GateOrder,
    Norm,
    PackedLinear,
    Rates,
    ScanWeights,
    StateMetadata,
    StatePart,
    StateWeights,
)
from ..machine.parallel import ParallelGroup
from ..step.state_cache import StateShape
from ..weights.checkpoint import Checkpoint
from ..weights.loader import LayerLoader, Projection
from .elementwise import scaled


@dataclass(frozen=True)
class StateHeads:
    """The heads of one rank. `read`: heads of queries and keys that are loaded. `order`: which of these each computed
    head is; all ranks have equally many. `first_key`: value head i of the rank reads the computed head first_key + i,
    and again from the first one; None: each is read by the same number of value heads, one after the other."""

    values: range
    read: range
    order: Sequence[int]
    first_key: int | None = None

    @classmethod
    def of(cls, state: StateConfig, group: ParallelGroup) -> StateHeads:
        """Return the heads of a rank. ConfigError if the value heads do not divide among the ranks."""
        values = group.shard(state.num_heads, "heads of a layer with a state")
        if not state.key_heads:
            return cls(values, range(0), ())
        num_sharing = state.num_heads // state.key_heads
        if state.are_key_heads_tiled and num_sharing > 1:
            numbers = [head % state.key_heads for head in values]
            read = range(min(numbers), max(numbers) + 1)
            return cls(values, read, range(len(read)), numbers[0] - read.start)
        read = range(values.start // num_sharing, (values.stop - 1) // num_sharing + 1)
        if len(values) % num_sharing == 0 or num_sharing % len(values) == 0:
            return cls(values, read, range(len(read)))
        return cls(values, read, [head // num_sharing - read.start for head in values])  # a copy for each head


class _Product(NamedTuple):
    """A matrix that gives some parts of a token. `scales`: [outputs], factors of these; None: ones."""

    parts: str
    linear: PackedLinear
    scales: Tensor | None


class StateInput:
    """Projections of a mixer's input x [T, hidden_size], and the convolution of its parts `state.conv_parts`."""

    def __init__(self, loader: LayerLoader, prefix: str, state: StateConfig, hidden_size: int) -> None:
        """`prefix`: the prefix of the layer's tensor names, with the dot."""
        self._ops, self._state = loader.ops, state
        self.heads = StateHeads.of(state, loader.group)
        self._scanned: Tensor | None = None
        if self.heads.first_key is not None:
            places = self.heads.first_key + torch.arange(len(self.heads.values), device=loader.checkpoint.device)
            self._scanned = places % len(self.heads.read)
        block = f"{prefix}{state.names.block}."
        tensor_by_part = {part: (name, parts) for name, parts in state.projections.items() for part in parts}
        # Quantized checkpoints have floats in tensors of a and b alone, which would make floats of all in one product.
        apart = "".join(parts for parts in state.projections.values() if set(parts) <= {"a", "b"})
        others = "".join(part for part in tensor_by_part if part not in state.conv_parts + apart)
        self._products = [
            self._load_product(loader, block, each, tensor_by_part, hidden_size)
            for each in (state.conv_parts + others, apart)
            if each
        ]
        self._activation: ConvActivation = "silu" if state.has_conv_activation else "none"
        self._load_convolution(loader, f"{block}{state.names.conv}")
        self.shape = StateShape(
            len(self.heads.values), state.key_dim, state.value_dim, state.conv_size - 1, self._num_channels
        )

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """Return the parts [T, n] of each token by letter, and `conv_parts` together; views of one tensor or two."""
        x = scaled(x, self._state.input_scale)
        found: dict[str, Tensor] = {}
        for parts, linear, scales in self._products:
            outputs = self._ops.linear(x, linear)
            outputs = outputs if scales is None else outputs * scales
            sizes = [self._size(part) for part in parts]
            found |= zip(parts, torch.split(outputs, sizes, dim=1), strict=True)
            found.setdefault(self._state.conv_parts, outputs[:, : self._num_channels])  # of the first product
        return found

    def convolve(self, x: Tensor, states: Tensor, metadata: StateMetadata) -> dict[str, Tensor]:
        """Convolve `conv_parts` of the tokens, x [T, channels]; return these parts by letter, with the queries and keys
        that each value head reads. states: see Ops.causal_conv."""
        mixed = self._ops.causal_conv(x, self._weight, self._bias, self._activation, states, metadata)
        sizes = [self._size(part) for part in self._state.conv_parts]
        found = dict(zip(self._state.conv_parts, torch.split(mixed, sizes, dim=1), strict=True))
        if self._scanned is not None:
            found |= {part: as_heads(found[part], self._state.key_dim)[:, self._scanned].flatten(1) for part in "qk"}
        return found

    def weights(self, output: PackedLinear, index: int, scan: ScanWeights | None = None) -> StateWeights:
        """Return the weights of a mixer with this input, for a fused decoder."""
        state, parts = self._state, dict[str, StatePart]()
        for number, product in enumerate(self._products):
            parts |= {part: StatePart(number, start) for part, start in self._starts(product.parts)}
        return StateWeights(
            kind=state.kind,
            inputs=[product.linear for product in self._products],
            input_scales=[product.scales for product in self._products],
            parts=parts,
            conv=dict(self._starts(state.conv_parts)),
            conv_weight=self._weight,
            conv_bias=self._bias,
            conv_activation=self._activation,
            scan=scan,
            output=output,
            input_scale=state.input_scale,
            output_scale=state.output_scale,
            index=index,
        )

    def scan_weights(self, rates: Rates, norm: Norm | None, num_groups: int) -> ScanWeights:
        """Return the weights of a scan with these heads, for a fused decoder. norm, num_groups: see Ops.gated_norm."""
        return ScanWeights(
            key_heads=len(self.heads.order),
            first_key=self.heads.first_key,
            num_heads=self.shape.num_heads,
            key_dim=self.shape.key_dim,
            value_dim=self.shape.value_dim,
            rates=rates,
            norm=norm,
            num_groups=num_groups,
            order=gate_order(self._state),
        )

    def _starts(self, parts: str) -> Iterator[tuple[str, int]]:
        """Yield the parts, each with the number of elements before it."""
        sizes = [self._size(part) for part in parts]
        yield from zip(parts, accumulate(sizes, initial=0), strict=False)

    def _load_product(
        self,
        loader: LayerLoader,
        block: str,
        parts: str,
        tensor_by_part: Mapping[str, tuple[str, str]],
        hidden_size: int,
    ) -> _Product:
        """Load the projections that give `parts`. tensor_by_part: name and parts of the tensor with each part."""
        state, projections = self._state, []
        for part in parts:
            name, parts_of_tensor = tensor_by_part[part]
            num_outputs = sum(map(state.part_size, parts_of_tensor))
            rows = self._outputs_of(part, parts_of_tensor, name in state.by_key_head)
            projections.append(Projection(f"{block}{name}", num_outputs, rows))
        linear = loader.column_parallel(
            hidden_size, projections, state.has_projection_bias, row_order=self._row_order(parts)
        )
        if not state.part_scales:
            return _Product(parts, linear, None)
        factors = [torch.full((self._size(part),), state.part_scales.get(part, 1.0)) for part in parts]
        return _Product(parts, linear, torch.cat(factors).to(loader.checkpoint.device, loader.checkpoint.dtype))

    def _load_convolution(self, loader: LayerLoader, name: str) -> None:
        """Load the weights [channels, taps] and biases of this rank's channels."""
        state = self._state

        def load(ending: str, shape: tuple[int, ...]) -> Tensor:
            return torch.cat(
                [loader.vector(f"{each}.{ending}", (total, *shape), 0, rows) for each, total, rows in parts]
            )

        parts = list(self._channels_of(loader.checkpoint, name))
        taps = load("weight", (1, state.conv_size))[:, 0]
        order = self._row_order(state.conv_parts)
        taps = taps if order is None else taps[order]
        self._weight = taps.t().contiguous().t()  # the layout that the kernels prefer
        self._num_channels = len(taps)
        self._bias: Tensor | None = None
        if state.has_conv_bias:
            biases = load("bias", ())
            self._bias = biases if order is None else biases[order]

    def _channels_of(self, checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, int, range]]:
        """Yield the pieces of this rank's channels in their order: the tensor, the number of all its channels, and
        those of the piece. Of several tensors, one after the other, transformers saves the lengths as it likes."""
        state, tensors = self._state, {name: sum(map(self._state.part_size, self._state.conv_parts))}
        if "{part}" in name:
            tensors = {name.format(part=part): state.part_size(part) for part in state.conv_parts}
            if all(f"{tensor}.weight" in checkpoint for tensor in tensors):
                tensors = {tensor: checkpoint.shape_of(f"{tensor}.weight")[0] for tensor in tensors}
        start = 0
        for part in state.conv_parts:
            wanted, first = _moved(self._elements(part), start), 0
            start += state.part_size(part)
            for tensor, count in tensors.items():
                piece = range(max(wanted.start, first) - first, min(wanted.stop, first + count) - first)
                if piece:
                    yield tensor, count, piece
                first += count

    def _width(self, part: str) -> int:
        """Return the number of elements of one head in a part."""
        if part in "qk":
            return self._state.key_dim
        return 1 if part in "ab" else self._state.value_dim

    def _size(self, part: str) -> int:
        """Return the number of elements of a part on this rank."""
        return self._width(part) * len(self.heads.order if part in "qk" else self.heads.values)

    def _elements(self, part: str) -> range:
        """Return which elements of a part this rank loads."""
        heads, width = self.heads.read if part in "qk" else self.heads.values, self._width(part)
        return range(heads.start * width, heads.stop * width)

    def _outputs_of(self, part: str, parts: str, is_by_key_head: bool) -> list[range]:
        """Return which outputs of a tensor with `parts` are those of this rank in `part`."""
        state = self._state
        before = sum(map(state.part_size, parts[: parts.index(part)]))
        if not is_by_key_head:
            return [_moved(self._elements(part), before)]
        stride = sum(map(state.part_size, parts)) // state.key_heads  # outputs of a key head
        before //= state.key_heads
        heads = self.heads.read if part in "qk" else self.heads.values
        num_sharing = 1 if part in "qk" else state.num_heads // state.key_heads
        width, found = self._width(part), []
        for head in heads:
            start = head // num_sharing * stride + before + head % num_sharing * width
            found.append(range(start, start + width))
        return list(_joined(found))

    def _row_order(self, parts: str) -> Tensor | None:
        """Return the order that copies loaded rows of `parts` where several heads of the scan are one loaded head;
        None: it is not changed."""
        heads = self.heads
        if list(heads.order) == list(range(len(heads.read))):
            return None
        rows, start = [], 0
        for part in parts:
            loaded = torch.arange(start, start + len(self._elements(part)))
            start += len(loaded)
            rows.append(loaded.view(len(heads.read), -1)[list(heads.order)].flatten() if part in "qk" else loaded)
        return torch.cat(rows)


def as_heads(part: Tensor, size: int) -> Tensor:
    """Return a view [T, heads, size] of a part [T, heads * size]."""
    return part.view(part.shape[0], part.shape[1] // size, size)


def gate_order(state: StateConfig) -> GateOrder:
    """Return whether the norm of the scan's output comes before its gate."""
    return "norm_then_silu" if state.gate == "norm_then_silu" else "silu_then_norm"


def _moved(elements: range, start: int) -> range:
    return range(start + elements.start, start + elements.stop)


def _joined(ranges: Iterable[range]) -> Iterator[range]:
    """Yield the ranges, adjacent ones as one."""
    last: range | None = None
    for each in ranges:
        if last is not None and last.stop == each.start:
            last = range(last.start, each.stop)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last
