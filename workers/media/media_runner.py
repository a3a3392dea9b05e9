"""MediaRunner: the part of media in the steps of a model that takes any.

    freed entries → encodes, some pieces each → spans of new rows → bindings of spans to entries → inputs of the step

Owns the encoder, its cache and the rows' spans. Knows no text: it replaces embeddings and positions of placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...ipc.blobs.store import BlobStore
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import ProtocolError
from ...ipc.messages.media import FailedEntry
from ...ipc.messages.workers import SchedulerOutput
from ...kernels.contract import AttentionMetadata, CrossStep, StepMedia
from ...kernels.select import Ops
from ..arrays import I64
from ..encoders.encoder import Encoder
from ..input_batch import StepInputs, ids_of
from ..model_step import Model
from ..models.decoder import DecoderModel
from ..parallel import ParallelGroup
from ..step_layout import MediaInputs
from .clip_rows import ClipRows, ClipStep
from .encoded_media import EncodedMedia
from .media_rows import MediaPlan, MediaRows

FOLDER = "media"  # of media files, in the run directory
ACTIVATIONS = 16  # of a layer, in elements for each element of a row: its input, norms, heads and a wide MLP


class MediaRunner:
    """`rows` are the spans of the rows in use. All ranks run the same orders."""

    def __init__(
        self,
        spec: EngineSpec,
        encoder: Encoder,
        group: ParallelGroup,
        device: torch.device,
        rotations_at: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`rotations_at` gives the rotations at times, rows and columns of images; None: positions are indices."""
        config, vision = spec.model.encoder, spec.model.vision
        assert config is not None
        self._device, self._hidden_size = device, spec.model.hidden_size
        self._num_parts = 1 + config.num_deepstack
        store = BlobStore(Path(spec.run_directory) / FOLDER, spec.config.media_store_bytes)
        self._encoder = encoder
        self._cache = EncodedMedia(encoder, config, self._num_parts * self._hidden_size, store, group)
        axes_merge = None if vision is None or rotations_at is None else vision.merge_size
        self.rows = MediaRows(spec.config.max_num_seqs, config, axes_merge)
        self._rotations_at = rotations_at
        num_elements = self._num_parts * self._hidden_size * spec.encoder_cache_tokens
        num_elements += config.num_rows(spec.max_item_embeds) * config.hidden_size * ACTIVATIONS  # of the largest item
        self.reserved_bytes = num_elements * encoder.dtype.itemsize  # that entries and an encode will take
        self.weight_bytes = encoder.weight_bytes

    @property
    def shifts(self) -> I64 | None:
        """The shift of each row's positions behind its media; None: all 0."""
        return None if self._rotations_at is None else self.rows.shifts

    def clear(self) -> None:
        """Forget all rows and entries."""
        self.rows.clear()
        self._cache.clear()

    @torch.inference_mode()
    def encode(self, step: SchedulerOutput) -> list[FailedEntry]:
        """Free entries and run the step's encodes; return those that failed."""
        self._cache.free(ids_of(step.freed_entries).tolist())
        failed = [self._cache.encode(order) for order in step.encodes]
        if not step.rows and self._device.type == "cuda":  # no tokens follow whose arrival would end the step
            torch.cuda.current_stream(self._device).synchronize()
        return [each for each in failed if each is not None]

    def update_rows(self, step: SchedulerOutput) -> None:
        """Forget the media of freed rows, note those of new ones, and bind spans to entries."""
        self.rows.free(ids_of(step.freed_rows))
        for new_row in step.new_rows:
            self.rows.admit(new_row)
        bindings = ids_of(step.span_entries)
        if len(bindings) % 3:
            raise ProtocolError(f"span_entries holds {len(bindings)} numbers, which make no triples")
        self.rows.bind(bindings.reshape(-1, 3))

    def prepare(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with its media. Placeholders get token id 0: theirs may be beyond the vocabulary."""
        if isinstance(self.rows, ClipRows):
            return self._prepare_clips(inputs, self.rows)
        plan = self.rows.plan(inputs)
        if plan is None:
            return inputs
        if plan.tokens is not None:
            inputs.token_ids[plan.tokens] = 0
        return inputs._replace(media=self._inputs_of(plan, len(inputs.token_ids)))

    def _prepare_clips(self, inputs: StepInputs, clips: ClipRows) -> StepInputs:
        """Return the inputs of the decoder alone, with those of its cross attention."""
        step = clips.split(inputs)
        rows = None
        if step.pieces:
            rows = torch.cat([self._rows_of(*piece) for piece in step.pieces])
        cross = CrossStep(cross_metadata(step, clips.num_rows, self._device), rows)
        return step.decoder._replace(media=MediaInputs(step.positions, None, None, None, False, cross))

    def _rows_of(self, entry: int, first: int, count: int) -> Tensor:
        return self._cache.take(entry, first, count) if entry else self._encoder.zeros(count, self._hidden_size)

    def _inputs_of(self, plan: MediaPlan, num_tokens: int) -> MediaInputs:
        positions, cos_sin = plan.positions, None
        if positions is not None and positions.ndim == 2:
            assert self._rotations_at is not None, "a model comes before steps"
            cos_sin = self._rotations_at(torch.from_numpy(positions).to(self._device))
            positions = np.arange(num_tokens)
        see_until = None if plan.see_until is None else torch.from_numpy(plan.see_until).to(self._device)
        media = None
        if plan.tokens is not None:
            embeds = torch.cat([self._cache.take(*piece) for piece in plan.pieces])
            parts = embeds.view(len(embeds), self._num_parts, self._hidden_size).unbind(1)
            media = StepMedia(torch.from_numpy(plan.tokens).to(self._device), parts[0], parts[1:])
        return MediaInputs(positions, cos_sin, see_until, media, plan.is_behind_spans)


def cross_metadata(step: ClipStep, num_rows: int, device: torch.device) -> AttentionMetadata:
    """Return the metadata of a step's cross attention: each token sees all rows of its clip, `num_rows`."""
    decoder, num_tokens = step.decoder, len(step.positions)
    query_starts, seq_lens = decoder.query_starts, np.full_like(decoder.seq_lens, num_rows)
    has_prompts = decoder.num_decode_rows < len(decoder.rows)
    see_until = torch.full((num_tokens,), num_rows - 1, dtype=torch.int32, device=device) if has_prompts else None
    slots = torch.from_numpy(step.slots).to(device)
    return AttentionMetadata(
        positions=torch.zeros_like(slots),
        slots=slots,
        query_starts=torch.from_numpy(query_starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_tables=torch.from_numpy(step.clip_tables).to(device),
        num_decode_rows=decoder.num_decode_rows,
        query_starts_host=query_starts.tolist(),
        seq_lens_host=seq_lens.tolist(),
        see_until=see_until,
    )


def load_media(
    spec: EngineSpec,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    group: ParallelGroup,
    model: Model,
    ops: Ops | None = None,
) -> MediaRunner:
    """Read the encoder that belongs to `model` from the checkpoint in `folder`. ConfigError as Encoder.load."""
    config = spec.model.encoder
    assert config is not None
    is_dummy = spec.config.load_format == "dummy" and folder == Path(spec.model_folder)
    encoder = Encoder.load(folder, config, dtype, device, spec.config.hf_overrides, ops, is_dummy=is_dummy)
    has_axes = any(rope.sections for rope in spec.model.ropes)
    rotations_at = model.rotations_at if has_axes and isinstance(model, DecoderModel) else None
    return MediaRunner(spec, encoder, group, device, rotations_at)
