"""PagedRun: drives a model over a hand-built paged cache, without scheduler or runner, for the tests of this room."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenloom.ipc.spec.config.served_model import quantized_on_load
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.contract import AttentionMetadata, CacheGroup, StepMedia
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.workers.state_tables import StateTables
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.model_step import Model, StepContext

CPU = torch.device("cpu")


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 512,
    group: ParallelGroup | None = None,
    device: torch.device = CPU,
    ops: Ops | None = None,
    quantization: str | None = None,
) -> DecoderModel:
    config = load_model_config(folder)
    if quantization is not None:
        config = quantized_on_load(config, quantization)
    ops, group = ops or select_ops(device, dtype), group or ParallelGroup()
    return load_model(folder, config, max_model_len, dtype, device, ops, group)


def make_metadata(
    rows: list[tuple[int, int, list[int]]], block_size: int, device: torch.device = CPU
) -> AttentionMetadata:
    """rows: (computed tokens, new tokens, block ids) in the step's order."""
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for computed, count, blocks in rows:
        positions += range(computed, computed + count)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(computed, computed + count)]
        starts.append(starts[-1] + count)
    lengths = [computed + count for computed, count, _ in rows]
    used = [blocks[: -(-length // block_size)] for length, (_, _, blocks) in zip(lengths, rows, strict=True)]
    width = max(map(len, used), default=0)
    num_decode_rows = next((i for i, (_, count, _) in enumerate(rows) if count != 1), len(rows))
    return AttentionMetadata(
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.tensor(
            [blocks + [0] * (width - len(blocks)) for blocks in used], dtype=torch.int32, device=device
        ).view(len(rows), width),
        num_decode_rows=num_decode_rows,
        query_starts_host=starts,
        seq_lens_host=lengths,
    )


@dataclass
class GivenMedia:
    """Embeddings, rope positions and attention of the tokens of one request with images."""

    embeds: dict[int, Tensor]  # by index in the request: [(1 + features) * hidden_size]
    positions: Tensor | None = None  # [3, length]
    see_until: Tensor | None = None  # [length] int32


class PagedRun:
    """Requests by name, their blocks scattered over the pool; stale blocks hold large numbers, not zeros."""

    def __init__(
        self,
        model: Model,
        block_size: int,
        num_blocks: int = 256,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.device = device
        (spec,) = model.kv_cache_specs(block_size, dtype)
        stale = 1000.0 if dtype.is_floating_point else 100  # of bytes; as a scale they are 1.7e22
        self.kv_cache = torch.full(spec.shape(num_blocks), stale, dtype=dtype, device=device)
        self.states: StateTables | None = None
        if model.state_spec is not None:
            self.states = StateTables(model.state_spec, block_size, device)
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)
        self._blocks: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self.slots: dict[str, int] = {}  # of requests with an adapter
        self.media: dict[str, GivenMedia] = {}
        self.num_features = 0  # of the language model's first layers, for each embedding

    def step(self, new_tokens: dict[str, list[int]]) -> dict[str, Tensor]:
        """Compute these tokens of each request in one step: float32 logits [n, vocab] of each (rank 0)."""
        order = sorted(new_tokens, key=lambda name: len(new_tokens[name]) != 1)
        rows = []
        for name in order:
            self._rows.setdefault(name, len(self._rows))
            computed, count = self._computed.get(name, 0), len(new_tokens[name])
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self.block_size < computed + count:
                blocks.append(self._free.pop())
            rows.append((computed, count, blocks))
            self._computed[name] = computed + count
        metadata = make_metadata(rows, self.block_size, self.device)
        ranges = {name: range(row[0], row[0] + row[1]) for name, row in zip(order, rows, strict=True)}
        metadata, media = self._with_media(metadata, ranges)
        token_ids = torch.tensor([t for name in order for t in new_tokens[name]], device=self.device)
        with torch.inference_mode():
            every = torch.arange(len(token_ids), device=self.device)
            row_ids = np.array([self._rows[name] for name in order], np.int32)
            slots = [self.slots.get(name, 0) for name in order for _ in new_tokens[name]]
            token_slots = torch.tensor(slots, dtype=torch.int32, device=self.device) if any(slots) else None
            states = None
            if self.states is not None:
                states = self.states.step([(name, each.start, len(each)) for name, each in ranges.items()])
            groups = [CacheGroup(self.kv_cache, metadata)]
            context = StepContext(groups, states, row_ids, token_slots, media=media)
            logits = self.model.forward_logits(token_ids, every, context)[1].clone()
        if not logits.shape[0]:  # another rank has them
            return {}
        return dict(zip(order, torch.split(logits, [len(new_tokens[name]) for name in order]), strict=True))

    def forget(self, name: str) -> None:
        """Take a request's blocks, which stay as they are; its next step begins anew, in others."""
        self._free[:0] = self._blocks.pop(name)
        del self._computed[name]
        if self.states is not None:
            self.states.forget(name)

    def _with_media(
        self, metadata: AttentionMetadata, ranges: dict[str, range]
    ) -> tuple[AttentionMetadata, StepMedia | None]:
        """Return the metadata and the embeddings of a step of these tokens of each request."""
        tokens = [(name, index) for name, indices in ranges.items() for index in indices]
        given = {token: self.media[name].embeds for token, (name, _) in enumerate(tokens) if name in self.media}
        found = {token: embeds[tokens[token][1]] for token, embeds in given.items() if tokens[token][1] in embeds}
        media = None
        if found:
            embeds, *added = torch.stack(list(found.values())).to(self.device).chunk(1 + self.num_features, dim=1)
            media = StepMedia(torch.tensor(list(found), device=self.device), embeds, added)
        owners = [self.media.get(name) for name, _ in tokens]
        if any(owner is not None and owner.see_until is not None for owner in owners):
            ends = [
                index if owner is None or owner.see_until is None else int(owner.see_until[index])
                for owner, (_, index) in zip(owners, tokens, strict=True)
            ]
            see_until = torch.tensor(ends, dtype=torch.int32, device=self.device)
            metadata = replace(metadata, see_until=see_until)
        if any(owner is not None and owner.positions is not None for owner in owners):
            assert isinstance(self.model, DecoderModel)
            columns = [
                torch.tensor([index] * 3) if owner is None or owner.positions is None else owner.positions[:, index]
                for owner, (_, index) in zip(owners, tokens, strict=True)
            ]
            places = torch.stack(columns, dim=1).to(self.device)
            if torch.equal(places, places[:1].expand(3, -1)):  # text, perhaps behind images
                return replace(metadata, positions=places[0]), media
            cos_sin = self.model.rotations_at(places)
            metadata = replace(metadata, cos_sin=cos_sin, positions=torch.arange(len(tokens), device=self.device))
        return metadata, media
