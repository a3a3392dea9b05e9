"""A worker without a model, for tests of the core: it keeps the KV cache as plain facts and checks every read.

Each slot remembers (token, position) and the whole history that it was computed from, as attention would mix it in.
Before a token is computed, its context is read back through the row's block table and compared with the row's own
tokens: a wrong block, a stale prefix hit or a lost write shows at once. The next token is a hash of the history and
the seed, so any schedule must bring the same tokens as computing alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from tokenloom.core.media_spans import end_of, touching
from tokenloom.ipc.codec import Decoder, decode_ids, encode, encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import BulkArray, Rank
from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.ipc.messages.workers import ModelRunnerOutput, NewRow, Pooled, RowLogprobs, SchedulerOutput, TokenMask
from tokenloom.tests.core.fake_adapters import FakeAdapters
from tokenloom.tests.core.fake_cache import STATE, FakeCache
from tokenloom.tests.core.fake_media import IMAGE, FakeEncoder, seen

VOCAB_SIZE = 997


_decode_step = Decoder[SchedulerOutput](SchedulerOutput).decode


def next_token(history: Sequence[int], seed: int, adapter: bytes = b"") -> int:
    data, key = np.asarray(history, np.int32).tobytes(), seed.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=8, key=key, person=adapter[:16])
    return int.from_bytes(digest.digest(), "little") % VOCAB_SIZE


def expected_tokens(
    prompt: Sequence[int], seed: int, max_tokens: int, stop_ids: Sequence[int], adapter: bytes = b""
) -> list[int]:
    """Return the output tokens of a request that runs alone. adapter: its digest."""
    tokens = list(prompt)
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        outputs.append(next_token(tokens, seed, adapter))
        tokens.append(outputs[-1])
        if outputs[-1] in stop_ids:
            break
    return outputs


def fake_vector(tokens: Sequence[int]) -> BulkArray:
    """Return the vector of a prompt to embed, from the tokens that it includes."""
    return BulkArray(dtype="float32", shape=[2], data=np.array([len(tokens), sum(tokens)], np.float32).tobytes())


def masked_token(token: int, allowed: Sequence[int]) -> int:
    """Return the token sampled in place of `token` if only `allowed` tokens may come."""
    return allowed[token % len(allowed)]


def fake_logprob(position: int, token: int, seed: int = 0) -> float:
    """Return the logprob of a token of a prompt (seed 0) or of an output; exact in float32."""
    return -(position * 1000 + token + seed) / 1024


class Row:
    def __init__(self, new: NewRow, media: list[MediaSpan]) -> None:
        known = decode_ids(new.token_ids)
        assert new.spans == encode_ids(number for each in media for number in (each.start, each.length, *each.grid))
        self.media, self.entries = media, dict[int, int]()  # by index of the span
        self.placeholders = [i for span in media for i in range(span.start, end_of(span)) if known[i] == IMAGE]
        self.tokens, self.num_computed = seen(known, media), new.num_computed_tokens
        self.drafts: list[int] = []  # of this step
        self.num_prompt_tokens, self.sampling, self.seed = new.num_prompt_tokens, new.sampling, new.sampling.seed
        self.pooling = new.pooling
        is_mean = new.pooling is not None and new.pooling.method == "mean"
        self.pooled_from = new.num_computed_tokens if is_mean else 0
        self.adapter_slot, self.adapter = new.adapter_slot, b""

    @property
    def is_at_its_end(self) -> bool:
        """Whether a prompt to embed is computed; no step may name it again."""
        return self.pooling is not None and self.num_computed == len(self.tokens)

    def prompt_positions(self, count: int) -> range:
        """Return the prompt tokens with logprobs in the next `count` computed tokens."""
        if self.sampling.num_prompt_logprobs < 0:
            return range(0)
        first = max(self.num_computed + 1, self.sampling.prompt_logprobs_start)
        return range(first, min(self.num_computed + count + 1, self.num_prompt_tokens))


class FakeWorker:
    """Executes SchedulerOutputs in order, as an Executor that answers when `answer` is called."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int = 1 << 30,
        ranks: Sequence[Rank] = (Rank(0, 0),),
        encoder: FakeEncoder | None = None,
        *,
        is_bidirectional: bool = False,
        pool: PoolShape | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """pool: with `windows` the sizes of several KV groups; None: one group of `num_blocks`."""
        self.encoder, self.is_bidirectional = encoder or FakeEncoder(0, 1), is_bidirectional
        self.media_by_seed: dict[int, list[MediaSpan]] = {}  # of the prompts, which the worker is not told
        self.has_states = STATE in windows
        self.num_blocks, self.budget = num_blocks, max_num_batched_tokens
        self.cache = FakeCache(pool or PoolShape(num_blocks, 1, (1,)), block_size, windows)
        self.arena: dict[int, tuple[object, ...]] = {}  # content of a block by slot of the arena
        self.rows: dict[int, Row] = {}
        self.adapters = FakeAdapters(ranks)
        self.queue: list[SchedulerOutput] = []
        self.mask: TokenMask | None = None  # of the oldest step that waits for one
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_drafts = self.num_accepted = 0
        self.next_token: Callable[[Sequence[int], int, bytes], int] = next_token
        self.num_new_tokens: Callable[[], int] = lambda: 1  # that a row without a mask brings when it samples
        self.step_s = self.token_s = 0.0  # that a step, and each token of it, says to have taken
        self.encode_s = 0.0  # likewise for each layer and embedding that is encoded

    def send(self, message: SchedulerOutput | TokenMask) -> None:
        if isinstance(message, SchedulerOutput):
            if message.encodes or message.span_entries:
                message = _decode_step(encode(message))
            self.queue.append(message)
            self.adapters.begin(message, self._used_slots())
        else:
            assert message.step == self.num_steps + 1 and self.mask is None, "a mask for another step, or a second one"
            self.mask = message

    def _used_slots(self) -> set[int]:
        """Return the slots of adapters that the steps in flight use."""
        slot_by_row = {row_id: row.adapter_slot for row_id, row in self.rows.items()}
        used = set[int]()
        for step in self.queue:
            for row_id in decode_ids(step.freed_rows):
                slot_by_row.pop(row_id)
            slot_by_row.update((new.row, new.adapter_slot) for new in step.new_rows)
            used.update(slot_by_row[row_id] for row_id in decode_ids(step.rows))
        return used

    def forget_rows(self) -> None:
        """Drop rows and steps for a new core. The slots keep their content."""
        self.rows.clear()
        self.cache.clear_rows()
        self.queue.clear()
        self.mask, self.num_steps = None, 0
        self.encoder.drop()

    def reload(self) -> None:
        """Load other weights in place of a step: rows and adapters are dropped."""
        assert not self.queue
        self.rows.clear()
        self.cache.clear_rows()
        self.adapters.drop()
        self.encoder.drop()
        self.num_steps += 1

    def answer(self) -> ModelRunnerOutput | None:
        """Execute the oldest step that was sent, once its mask is there."""
        if not self.queue or (self.queue[0].is_mask_pending and self.mask is None):
            return None
        return self.execute(self.queue.pop(0))

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        assert output.step == self.num_steps, "steps have gaps"
        self._copy(output)
        failed_entries = self.encoder.run(output)
        self._apply(output)
        work = list(zip(decode_ids(output.rows), decode_ids(output.counts), strict=True))
        rows = {row_id: self.rows[row_id] for row_id, _ in work}
        for row in rows.values():
            row.adapter = self.adapters.digest_in(row.adapter_slot)
        num_tokens = sum(count for _, count in work)
        assert len(rows) == len(work) and all(count >= 1 for _, count in work) and num_tokens <= self.budget
        self._take_drafts(output)
        for row_id, count in work:
            self._check_media(rows[row_id], count)
        for row_id, row in rows.items():
            self.cache.read_states(row_id, row.num_computed, _history(row.tokens, row.num_computed - 1, row.adapter))
        for row_id, count in work:  # all writes of a step come before its reads
            self._write(row_id, count)
        told = [(id_, i, rows[id_].tokens[i], 0) for id_, count in work for i in rows[id_].prompt_positions(count)]
        masks = self._take_masks()
        new = {
            row_id: token_ids
            for row_id, count in work
            if (token_ids := self._read(row_id, count, masks.get(row_id))) is not None
        }
        logprobs = [
            (row_id, i, row.tokens[i], row.seed)
            for row_id, row in rows.items()
            if row.sampling.num_logprobs >= 0
            for i in range(len(row.tokens) - len(new.get(row_id, ())), len(row.tokens))
        ]
        return ModelRunnerOutput(
            step=output.step,
            core_epoch=output.core_epoch,
            generation=output.generation,
            rows=encode_ids(new),
            counts=encode_ids(map(len, new.values())),
            token_ids=encode_ids(chain.from_iterable(new.values())),
            logprobs=_columns(logprobs),
            prompt_logprobs=_columns(told),
            pooled=[
                Pooled(row=row_id, vector=fake_vector(row.tokens[row.pooled_from :]))
                for row_id, row in rows.items()
                if row.is_at_its_end
            ],
            execute_s=self.step_s
            + self.token_s * num_tokens
            + self.encode_s * sum(each.num_pieces * each.num_embeds / each.pieces_per_stage for each in output.encodes),
            failed_entries=failed_entries,
        )

    def _check_media(self, row: Row, count: int) -> None:
        """Check that each placeholder that a row computes is in an entry with its image."""
        end = row.num_computed + count
        for span in touching(row.media, row.num_computed, end):
            if any(span.start <= i < end_of(span) for i in row.placeholders if row.num_computed <= i < end):
                entry = row.entries[row.media.index(span)]
                assert self.encoder.digest_in(entry) == span.digest, "a row reads another image"
            assert not self.is_bidirectional or end >= end_of(span), "a step ends within a bidirectional span"

    def _copy(self, output: SchedulerOutput) -> None:
        stores, loads = decode_ids(output.stores), decode_ids(output.loads)
        for block, slot in zip(stores[0::2], stores[1::2], strict=True):
            assert slot > 0
            self.arena[slot] = self.cache.copy_out(slot % self.cache.num_groups, block)
        for slot, block in zip(loads[0::2], loads[1::2], strict=True):
            assert slot > 0
            self.cache.copy_in(slot % self.cache.num_groups, block, self.arena[slot])

    def _apply(self, output: SchedulerOutput) -> None:
        for row_id in decode_ids(output.freed_rows):
            del self.rows[row_id]
            self.cache.remove_row(row_id)
        for new in output.new_rows:
            self.cache.add_row(new.row)
            self.rows[new.row] = Row(new, self.media_by_seed.get(new.sampling.seed, []))
        triples = decode_ids(output.span_entries)
        for row_id, index, entry in zip(triples[0::3], triples[1::3], triples[2::3], strict=True):
            assert self.encoder.digest_in(entry) == self.rows[row_id].media[index].digest
            assert index not in self.rows[row_id].entries, "a span is bound twice"
            self.rows[row_id].entries[index] = entry
        self.cache.change_tables(output, {row_id: row.num_computed for row_id, row in self.rows.items()})
        for row_id, token_ids in _by_row(output.token_appends):
            self.rows[row_id].tokens += token_ids

    def _take_drafts(self, output: SchedulerOutput) -> None:
        for row_id in decode_ids(output.rows):
            self.rows[row_id].drafts = []
        for row_id, token_ids in _by_row(output.drafts):
            assert not self.rows[row_id].drafts
            self.rows[row_id].drafts = token_ids
            self.num_drafts += len(token_ids)

    def _write(self, row_id: int, count: int) -> None:
        row = self.rows[row_id]
        tokens = row.tokens + row.drafts
        assert row.num_computed + count <= len(tokens), "a token is computed before it is known"
        assert not row.drafts or row.num_computed + count == len(tokens), "drafts that are not all computed"
        is_last = row.num_computed == len(row.tokens) - 1 or self.has_states
        assert not row.drafts or (is_last and row.num_prompt_tokens < len(row.tokens)), "drafts beside a prompt"
        for position in range(row.num_computed, row.num_computed + count):
            self.cache.write(row_id, position, (tokens[position], _history(tokens, position, row.adapter)))
        if not row.drafts:
            end = row.num_computed + count
            self.cache.write_states(row_id, row.num_computed, end, lambda i: _history(tokens, i - 1, row.adapter))

    def _take_masks(self) -> dict[int, list[list[int]]]:
        """The tokens that the masks of each row allow, in turn."""
        mask, self.mask = self.mask, None
        if mask is None or not mask.rows:
            return {}
        rows, counts = decode_ids(mask.rows), decode_ids(mask.counts) or [1] * len(decode_ids(mask.rows))
        bits = np.frombuffer(mask.bits, np.uint8).reshape(sum(counts), -1)
        allowed = [np.flatnonzero(each).tolist() for each in np.unpackbits(bits, axis=1, bitorder="little")]
        return {row_id: [allowed.pop(0) for _ in range(count)] for row_id, count in zip(rows, counts, strict=True)}

    def _read(self, row_id: int, count: int, masks: list[list[int]] | None) -> list[int] | None:
        """The new tokens of a row that samples; without any, the row computes its last token again."""
        row = self.rows[row_id]
        end, tokens = row.num_computed + count, row.tokens + row.drafts
        facts = [(tokens[position], _history(tokens, position, row.adapter)) for position in range(end)]
        self.cache.check(row_id, row.num_computed, facts)
        start, row.num_computed = row.num_computed, end
        self.num_computed_tokens += count
        if end < len(row.tokens) or row.pooling is not None:
            return None
        if row.drafts or masks is not None:
            num_known = len(row.tokens)
            for guess in [*row.drafts, None][: None if masks is None else len(masks)]:
                token = self.next_token(row.tokens, row.seed, row.adapter)
                token = token if masks is None else masked_token(token, masks[len(row.tokens) - num_known])
                row.tokens.append(token)
                if token != guess:
                    break
                self.num_accepted += 1
            row.num_computed = start if self.has_states and row.drafts else len(row.tokens) - 1
            return row.tokens[num_known:]
        num_new = self.num_new_tokens()
        for _ in range(num_new):
            row.tokens.append(self.next_token(row.tokens, row.seed, row.adapter))
        row.num_computed -= num_new == 0
        return row.tokens[len(row.tokens) - num_new :]


def _by_row(frame: bytes) -> Iterator[tuple[int, list[int]]]:
    """Yield each row of a frame with its tokens."""
    left = list(decode_ids(frame))
    while left:
        row_id, count, *left = left
        assert len(left) >= count > 0
        yield row_id, left[:count]
        left = left[count:]


def _columns(told: list[tuple[int, int, int, int]]) -> RowLogprobs | None:
    """Of (row, position, token, seed): the token itself and another one."""
    if not told:
        return None
    rows, positions, tokens, _ = zip(*told, strict=True)
    logprobs = [(fake_logprob(position, token, seed), -99.0) for _, position, token, seed in told]
    return RowLogprobs(
        rows=encode_ids(rows),
        positions=encode_ids(positions),
        widths=encode_ids([2] * len(told)),
        ranks=encode_ids([1] * len(told)),
        token_ids=encode_ids(chain.from_iterable((token, 996 - token) for token in tokens)),
        logprobs=np.array(logprobs, np.float32).tobytes(),
    )


def _history(tokens: list[int], position: int, adapter: bytes) -> bytes:
    data = np.asarray(tokens[: position + 1], np.int32).tobytes()
    return hashlib.blake2b(data, digest_size=8, person=adapter[:16]).digest()
