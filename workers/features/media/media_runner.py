"""MediaRunner: encodes media, and adds them to the inputs of steps.

    freed entries → encodes, some pieces each → spans of new rows → bindings of spans to entries → inputs of the step

Owns the encoder, its cache and the rows' spans. Knows no text: it replaces embeddings and positions of placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ....ipc.blobs.fetched_store import FetchedStore, HeadBlobs
from ....ipc.blobs.store import BlobStore
from ....ipc.errors import ProtocolError
from ....ipc.messages.workers import SchedulerOutput
from ....ipc.spec.config.engine_spec import EngineSpec
from ....kernels.select import Ops
from ...encoders.encoder import Encoder
from ...machine.arrays import I64, ids_of
from ...machine.parallel import ParallelGroup
from ...models.decoder import DecoderModel
from ...step.model_step import Model
from ...step.runner_feature import BegunStep, RunnerFeature
from ...step.step_inputs import StepInputs
from .clip_inputs import ClipInputs
from .clip_rows import ClipRows
from .encoded_media import EncodedMedia
from .media_rows import MediaRows
from .span_inputs import SpanInputs

FOLDER = "media"  # of media files, in the run directory
FETCH_TIMEOUT_S = 4.0  # of a media file from the head; a step waits for it, and counts as hung after 5 s at least
ACTIVATIONS = 16  # of a layer, in elements for each element of a row: its input, norms, heads and a wide MLP


def media_store(spec: EngineSpec) -> BlobStore:
    """Return the store of decoded media. On a host other than the head it fetches them from the head."""
    folder, limit = Path(spec.run_directory) / FOLDER, spec.config.media_store_bytes
    if spec.is_on_head:
        return BlobStore(folder, limit)
    return FetchedStore(folder, limit, HeadBlobs(spec.endpoints.blobs, spec.secure_to_head), FETCH_TIMEOUT_S)


class MediaRunner(RunnerFeature):
    """Feature that owns the `encoder`, its cache, and the spans of the running rows (`rows`). All ranks run the same
    orders."""

    orders = ("encodes", "freed_entries", "span_entries")

    def __init__(
        self,
        spec: EngineSpec,
        encoder: Encoder,
        group: ParallelGroup,
        device: torch.device,
        rotations_at: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`rotations_at`: as DecoderModel.rotations_at, if positions in images are times, rows and columns; None:
        positions are indices."""
        config, cross = spec.model.encoder, spec.model.cross
        assert config is not None
        self._device, num_parts = device, 1 + config.num_deepstack
        store = media_store(spec)
        width = num_parts * spec.model.hidden_size
        self._cache = EncodedMedia(encoder, config, width, store, group)
        self.encoder = encoder
        self._inputs: SpanInputs | ClipInputs
        if cross is not None:
            clips = ClipRows(spec.config.max_num_seqs, cross, spec.config.block_size)
            self._inputs = ClipInputs(clips, self._cache.take, encoder.zeros(1, width))
        else:
            vision = spec.model.vision
            axes_merge = None if vision is None or rotations_at is None else vision.merge_size
            rows = MediaRows(spec.config.max_num_seqs, config, axes_merge)
            self._inputs = SpanInputs(rows, self._cache.take, num_parts, device, rotations_at)
        self.rows = self._inputs.rows
        num_elements = width * spec.encoder_cache_tokens
        num_elements += config.num_rows(spec.max_item_embeds) * config.hidden_size * ACTIVATIONS  # of the largest item
        self.reserved_bytes = num_elements * encoder.dtype.itemsize  # that entries and an encode will take
        self.weight_bytes = encoder.weight_bytes

    @property
    def shifts(self) -> I64 | None:
        """For each row, the position minus the index of the tokens after its media; None: all are 0."""
        return self._inputs.shifts

    def clear(self) -> None:
        """Forget all rows and entries."""
        self.rows.clear()
        self._cache.clear()

    def begin(self, step: SchedulerOutput, begun: BegunStep) -> None:
        """Free entries and run the step's encodes; add those that failed to `begun`."""
        if not (step.encodes or step.freed_entries):
            return
        begun.enter("encode")
        self._cache.free(ids_of(step.freed_entries).tolist())
        failed = [self._cache.encode(order) for order in step.encodes]
        if not step.rows and self._device.type == "cuda":  # no tokens follow whose arrival would end the step
            torch.cuda.current_stream(self._device).synchronize()
        begun.failed_entries += [each for each in failed if each is not None]

    def update(self, step: SchedulerOutput) -> None:
        """Forget the media of freed rows, record those of new rows, and bind spans to entries."""
        self.rows.free(ids_of(step.freed_rows))
        for new_row in step.new_rows:
            self.rows.admit(new_row)
        bindings = ids_of(step.span_entries)
        if len(bindings) % 3:
            raise ProtocolError(f"span_entries holds {len(bindings)} numbers, which make no triples")
        self.rows.bind(bindings.reshape(-1, 3))

    def prepare(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with its media."""
        return self._inputs.prepare(inputs)


def load_media(
    spec: EngineSpec,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    group: ParallelGroup,
    model: Model,
    ops: Ops | None = None,
) -> MediaRunner:
    """Read the encoder that belongs to `model` from the checkpoint in `folder`, and return its runner. ConfigError if
    the checkpoint lacks the encoder or cannot be read."""
    config = spec.model.encoder
    assert config is not None
    is_dummy = spec.config.load_format == "dummy" and folder == Path(spec.model_folder)
    encoder = Encoder.load(folder, config, dtype, device, spec.config.hf_overrides, ops, is_dummy=is_dummy)
    has_axes = any(rope.sections for rope in spec.model.ropes)
    rotations_at = model.rotations_at if has_axes and isinstance(model, DecoderModel) else None
    return MediaRunner(spec, encoder, group, device, rotations_at)
