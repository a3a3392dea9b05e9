"""A core and a worker that checks every read of its cache; the test moves each message."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tokenloom.core.engine import BEAT_S, EngineCore
from tokenloom.core.features.crash_isolation import CRASHES_TO_FAIL
from tokenloom.core.features.new import Surroundings
from tokenloom.core.features.tiers.offload import Offload
from tokenloom.core.features.tiers.options import OffloadOptions, Tiers
from tokenloom.core.kv.block_record import BlockRecord
from tokenloom.core.request import Request
from tokenloom.core.scheduling.drafting import Proposer
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.adapter import AdapterRef
from tokenloom.ipc.messages.base import BulkArray, CacheMisses, Rank
from tokenloom.ipc.messages.core import CoreChild, EngineCoreOutputs, EngineCoreRequest, Finished
from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.ipc.messages.tier import PlaceName, TierToCore
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.process.awake_clock import AwakeClock
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.ipc.spec.models.model_config import LayerConfig, StateConfig, StateNames
from tokenloom.ipc.spec.models.vision_config import VisionConfig
from tokenloom.tests.core.fake_adapters import adapter_of
from tokenloom.tests.core.fake_cache import STATE
from tokenloom.tests.core.fake_media import FakeEncoder, seen
from tokenloom.tests.core.fake_worker import FakeWorker, expected_tokens, fake_vector
from tokenloom.tests.core.features.grammar.fake_grammar_helper import FakeGrammarHelper
from tokenloom.tests.core.features.life import Life
from tokenloom.tests.core.features.tiers.fake_tier import FakeTier
from tokenloom.tests.support.engine_specs import new_spec


def make_spec(**options: object) -> EngineSpec:
    config = EngineConfig(**{"speculation": "off", **options})  # type: ignore[arg-type]
    return new_spec(vocab_size=997, max_model_len=256, config=config)


A_STATE = StateConfig(
    kind="conv",
    num_heads=8,
    conv_size=3,
    conv_parts="v",
    projections={"in_proj": "vzu"},
    names=StateNames(block="conv"),
)
TURN_S = 0.01  # that a turn takes by the tiers' clock


class Harness:
    """A core, a worker that answers on request, and the outputs of each request."""

    new_worker: type[FakeWorker] = FakeWorker

    def __init__(
        self,
        num_blocks: int = 64,
        record: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        num_new_tokens: Callable[[], int] = lambda: 1,
        tiers: OffloadOptions | None = None,
        seed: int = 0,
        vision: VisionConfig | None = None,
        encoder_cache: int = 0,
        max_item_embeds: int = 0,
        proposer: Proposer | None = None,
        has_prover: bool = False,
        products_per_weight: float | None = None,
        windows: Sequence[int | None] = (None,),
        pool: PoolShape | None = None,
        **options: object,
    ) -> None:
        """record: the file of the core's BlockRecord, if any. num_new_tokens: draws how many tokens a row brings.
        tiers: places for blocks outside the pool; `seed` of the FakeTier that serves them. vision: the model sees
        images of up to `max_item_embeds`; workers keep `encoder_cache` embeddings. proposer: of drafts.
        has_prover: unknown grammars are tried first. products_per_weight: of a piece of an encoder; None: as usual.
        windows: of the layers, each a group; STATE: a layer with a state. pool: of the KV groups; None: one group of
        `num_blocks`."""
        self.tiers, self.arena = tiers, dict[int, tuple[object, ...]]()
        self.tier = FakeTier(self.arena, self._tell, random.Random(seed))
        self.num_new_tokens, self.proposer = num_new_tokens, proposer
        self.products_per_weight = products_per_weight
        self.awake_clock = AwakeClock(BEAT_S, monotonic)
        spec = make_spec(**{"block_size": 4, **options})
        if windows != (None,):
            layers = [
                LayerConfig(mixer="state") if window == STATE else LayerConfig(window=window, num_kv_heads=1 + i)
                for i, window in enumerate(windows)
            ]
            fields = {"layers": layers, "num_layers": len(layers), "state": A_STATE if STATE in windows else None}
            spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, **fields))
        if vision is not None:
            model = msgspec.structs.replace(spec.model, vision=vision)
            sizes = {"encoder_cache_tokens": encoder_cache, "max_item_embeds": max_item_embeds}
            spec = msgspec.structs.replace(spec, model=model, **sizes)
        self.spec, self.num_blocks, self.record = spec, num_blocks, record
        self.pool = pool or PoolShape(num_blocks, 1, (1,))
        self.media: dict[int, list[MediaSpan]] = {}
        self.broken, self.damaged = set[bytes](), set[bytes]()  # media without files, and with bad ones
        self.grammars = FakeGrammarHelper()
        self.prover = FakeGrammarHelper() if has_prover else None
        self.core_epoch = self.generation = self.num_arenas = 0
        self.renew_worker()
        self.renew_core()
        self.requests: dict[int, EngineCoreRequest] = {}
        self.prompts: dict[int, tuple[list[int], SamplingParams, int, list[int]]] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.num_losses: dict[int, int] = defaultdict(int)  # of workers that computed this request
        self.lonely: set[int] = set()  # requests that workers computed alone when they were lost
        self.finished: dict[int, Finished] = {}
        self.fills_by_itself = True  # the worker, in each turn
        self.cached: dict[int, int] = {}
        self.missed: dict[int, CacheMisses] = {}
        self.loaded: dict[int, dict[PlaceName, int]] = {}  # prompt tokens by place
        self.poolings: dict[int, PoolingParams] = {}
        self.vectors: dict[int, BulkArray] = {}
        self.adapters: dict[int, AdapterRef | None] = {}
        self.failed_adapters: set[bytes] = set()  # with a fill that has failed, hung or ended the workers
        self.accepted: set[int] = set()
        self.aborted: set[int] = set()
        self.clock = 0.0
        self.now = 0.0  # of the tiers' clock

    def renew_worker(self) -> None:
        sizes = self.num_blocks, self.spec.config.block_size, self.spec.max_num_batched_tokens
        windows = [STATE if group.is_state else group.window for group in self.spec.kv_groups]
        vision = self.spec.model.vision
        encoder = None if vision is None else FakeEncoder(self.spec.encoder_cache_tokens, len(vision.stages))
        is_bidirectional = vision is not None and vision.is_bidirectional
        self.worker = self.new_worker(
            *sizes,
            self.spec.ranks,
            encoder,
            is_bidirectional=is_bidirectional,
            pool=self.pool,
            windows=windows,
        )
        self.worker.encoder.broken, self.worker.encoder.damaged = self.broken, self.damaged
        self.worker.media_by_seed = self.media
        self.worker.num_new_tokens = self.num_new_tokens
        self.worker.arena = self.arena

    @property
    def offload(self) -> Offload:
        """Of a core with tiers."""
        assert self.core.offload is not None
        return self.core.offload

    def _tell(self, message: TierToCore) -> None:
        self.offload.on_message(message)

    def lose_tier(self) -> None:
        """The tier process is killed and another one starts."""
        self.tier.die()
        self.offload.on_tier_lost()
        self.offload.open("weights")

    def lose_host(self) -> None:
        """A host ends with its ranks, its tier process and its part of every slot; another one takes its place."""
        for slot in self.arena:
            self.arena[slot] = ("lost", slot)
        self.num_arenas += 1
        self.offload.lose_slots(self.num_arenas)
        self.lose_tier()
        self.lose_worker()

    def renew_core(self) -> None:
        self.tier.die()
        self.grammars.stop()  # it ends with its core
        if self.prover is not None:
            self.prover.stop()
        tiers = None
        if self.tiers is not None:
            of_slots = None
            if self.record is not None:
                of_slots = BlockRecord(
                    self.record.with_suffix(".slots"), self.tiers.arena.ids.all_blocks, self.num_arenas
                )
            tiers = Tiers(self.tiers, self.tier.send, of_slots, lambda: self.now)
        record = None if self.record is None else BlockRecord(self.record, self.pool.all_blocks, self.generation)
        self.core = EngineCore(
            self.spec,
            self.pool,
            self.worker,
            Surroundings(self.grammars, self.prover, tiers),
            core_epoch=self.core_epoch,
            generation=self.generation,
            record=record,
            clock=self.awake_clock,
        )
        features = self.core.scheduler.features
        self.life = Life()
        features.use([*features.in_order, self.life])
        if self.proposer is not None:
            self.core.scheduler.batches.drafting.proposer = self.proposer
        if self.products_per_weight is not None:
            most = self.products_per_weight * self.spec.model.num_layer_weights
            self.core.media.encodes.max_products = most
        self.core.adapters.table.adopt(self.worker.adapters.common())
        if self.core.offload is not None:
            self.core.offload.open("weights")

    def lose_worker(self) -> None:
        computed = [each.key for each in self._computed()]
        loading = self.worker.adapters.loading(self.core_epoch)
        self.failed_adapters |= loading if not computed else set()
        for key in computed:
            self.num_losses[key] += 1
        self.lonely.update(computed if len(computed) == 1 else ())
        self.core.lose_workers("a test")
        self.core.scheduler.check_invariants()
        self._copy_late()
        self.renew_worker()
        self.generation += 1
        self.core.gain_workers(self.worker, self.generation)

    def _copy_late(self) -> None:
        """Lost workers that have not ended copy once more into the slots of their steps, while the tiers go on."""
        if self.core.offload is None:
            return
        for _ in range(4):
            self.tier.act()
            self.now += TURN_S
            self.core.offload.tick(is_idle=True)
        for message in self.worker.queue:
            for slot in decode_ids(message.stores)[1::2]:
                assert slot not in self.tier.owned_slots, "lost workers write a slot of the tier process"
                assert self.core.offload.slots.ref_count(slot), "a slot is free that lost workers write"
                self.arena[slot] = ("late", slot)

    def lose_core(self, num_done: int, *, with_worker: bool = False) -> None:
        """Of the steps in flight the worker ends `num_done`, which nobody hears, and the others have never come. The
        next core gets all open requests with the tokens that have been taken."""
        for _ in range(num_done):
            self.worker.answer()
        if with_worker:
            self.generation += 1
            self.renew_worker()
        self.worker.forget_rows()
        self.core_epoch += 1
        self.renew_core()
        for key, request in self.requests.items():
            if key not in self.finished:
                request = msgspec.structs.replace(request, children=[child_of(key, self.tokens[key])])
                self.core.add_request(frontend_of(key), request)

    def fill(self, rank: Rank, error: str = "") -> None:
        """A rank ends its oldest fill; only the core that ordered it gets the answer."""
        digest = self.worker.adapters.next_digest(rank)
        answer = self.worker.adapters.finish(rank, error)
        if (answer.core_epoch, answer.generation) == (self.core_epoch, self.generation):
            if error:
                self.failed_adapters.add(digest)
            self.core.adapters.on_filled(answer)
            self.take()

    def fill_all(self) -> None:
        while ranks := self.worker.adapters.busy_ranks:
            self.fill(ranks[0])

    def _computed(self) -> list[Request]:
        """Return the requests in the step that the worker runs."""
        rows = decode_ids(self.worker.queue[0].rows) if self.worker.queue else ()
        return [each for each in self.core.scheduler.rows.requests() if each.row in rows]

    def computes(self, key: int) -> bool:
        """Return whether the step that the worker runs has this request."""
        return any(each.key == key for each in self._computed())

    def run_with_deadly_workers(self, is_deadly: Callable[[], bool]) -> None:
        """Run until all requests end; the workers end whenever they do something deadly."""
        while self.core.num_requests:
            self.core.step()
            if is_deadly():
                self.lose_worker()
                assert self.generation < 12, "the cause is not found"
            else:
                self.turn()
            self.take()

    def add(
        self,
        key: int,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        stop: Sequence[int] = (),
        outputs: Sequence[int] | Mapping[int, Sequence[int]] = (),
        pooling: PoolingParams | None = None,
        adapter: int = 0,
        media: Sequence[MediaSpan] = (),
        **more: object,
    ) -> None:
        """Add a request for `n` answers, with keys from `key` on. outputs: tokens that each of them has, or some by
        key. more: of its sampling, and fields of the message."""
        self.clock += 1.0
        of_sampling = {name: more.pop(name) for name in SamplingParams.__struct_fields__ if name in more}
        sampling = SamplingParams(max_tokens=1 if pooling else max_tokens, n=n, **of_sampling)  # type: ignore[arg-type]
        keys = range(key, key + n)
        had = outputs if isinstance(outputs, Mapping) else dict.fromkeys(keys, outputs)
        for each in keys:
            self.media[each], self.tokens[each] = list(media), list(had.get(each, ()))
            self.prompts[each] = (seen(prompt, media), sampling, each, list(stop))
            self.adapters[each] = adapter_of(adapter)
            if pooling is not None:
                self.poolings[each] = pooling
        request = new_message(
            {each: self.tokens[each] for each in keys},
            prompt,
            sampling,
            stop_token_ids=list(stop),
            pooling=pooling,
            adapter=adapter_of(adapter),
            media=self.media[key],
            **{"arrival_time": self.clock, **more},
        )
        self.requests.update(dict.fromkeys(keys, request))
        self.core.add_request(frontend_of(key), request)

    def abort(self, key: int) -> None:
        self.aborted.add(key)
        self.core.abort(frontend_of(key), [key])
        self.take()

    def turn(self, answers: int = 1) -> None:
        self.core.step()
        if self.fills_by_itself:
            self.fill_all()
        for _ in range(answers):
            self.answer()
        self.take()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def answer(self) -> None:
        """The worker ends the oldest step in flight."""
        result = self.worker.answer()
        if result is not None:
            self.core.on_result(result)
        self.take()

    def take(self) -> None:
        for frontend_id, outputs in self.core.take_outputs():
            self.accepted.update(outputs.accepted)
            for key in append_tokens(self.tokens, outputs):
                assert frontend_id == frontend_of(key), "another frontend's token"
                assert key not in self.finished, "tokens after the finish"
            for started in outputs.started:
                self.cached[started.key] = started.num_cached_tokens
                self.loaded[started.key] = dict(started.num_loaded_tokens)
            self.missed |= {missed.key: missed.misses for missed in outputs.missed}
            for finished in outputs.finished:
                assert finished.key not in self.finished
                if finished.vector is not None:
                    self.vectors[finished.key] = finished.vector
                self.finished[finished.key] = finished

    def run(self, max_turns: int = 20_000) -> None:
        self.take()
        for _ in range(max_turns):
            if self.core.offload is not None:
                self.now += TURN_S
                self.core.offload.tick(is_idle=self.core.scheduler.rows.num_active == 0)
                self.tier.act()
            if not self.core.num_requests and not self.worker.queue:
                self.core.scheduler.check_invariants()
                return
            self.turn()
        raise AssertionError(f"{self.core.num_requests} requests do not finish")

    def run_to_the_end(self) -> None:
        """Run until every request has ended, with the tokens of a request alone, unless it was aborted or can never
        fit."""
        self.fills_by_itself = True
        self.run()
        assert self.finished.keys() == self.prompts.keys()
        for key, finished in self.finished.items():
            assert finished.reason == "error" or self.requests[key].children[0].key in self.accepted
            if finished.reason == "abort":
                assert key in self.aborted
            elif finished.reason == "error":
                # a crash counts for a request that waits for the adapter that is loaded or for its image, too
                waits = any(self.adapters.values()) or self.media[key]
                num_losses = self.generation if waits else self.num_losses[key] * (key in self.lonely)
                is_convicted = num_losses >= CRASHES_TO_FAIL and "given up" in self.error_of(key)
                is_expected = "KV blocks" in self.error_of(key) or is_convicted or self.has_failed_adapter(key)
                is_broken = any(span.digest in self.broken | self.damaged for span in self.media[key])
                is_expected |= is_broken and "of the prompt could not be read" in self.error_of(key)
                assert is_expected, self.error_of(key)
            else:
                self.check(key)

    def has_failed_adapter(self, key: int) -> bool:
        """Whether a request has ended since its adapter could not be loaded, and rightly so."""
        adapter = self.adapters.get(key)
        if adapter is None or adapter.digest not in self.failed_adapters:
            return False
        return f"internal: the adapter in {adapter.folder} could not be loaded: " in self.error_of(key)

    def error_of(self, key: int) -> str:
        error = self.finished[key].error
        assert error is not None and self.finished[key].reason == "error"
        return f"{error.kind}: {error.message}"

    def check(self, key: int) -> None:
        prompt, params, seed, stop = self.prompts[key]
        if key in self.poolings:
            assert self.vectors[key] == fake_vector(prompt), "the vector is not of the whole prompt"
            assert self.finished[key].reason == "stop" and not self.tokens[key]
            return
        assert params.max_tokens is not None
        digest = b"" if (adapter := self.adapters.get(key)) is None else adapter.digest
        assert self.tokens[key] == expected_tokens(prompt, seed, params.max_tokens, stop, digest)
        assert self.finished[key].reason == ("stop" if self.tokens[key][-1] in stop else "length")


def append_tokens(tokens: dict[int, list[int]], outputs: EngineCoreOutputs) -> list[int]:
    """Append the new tokens to those of each key; return the keys."""
    keys, left = list(decode_ids(outputs.keys)), list(decode_ids(outputs.token_ids))
    for key, start, count in zip(keys, decode_ids(outputs.starts), decode_ids(outputs.counts), strict=True):
        assert start == len(tokens[key]), "a token is missing or repeated"
        tokens[key] += left[:count]
        del left[:count]
    return keys


def make_request(key: int, **fields: object) -> Request:
    """Return a request with a prompt of one token, for tests without a core."""
    usual: dict[str, object] = {
        "frontend_id": 0,
        "attempt": 0,
        "params": SamplingParams(),
        "seed": 0,
        "num_prompt_tokens": 1,
        "max_tokens": 100,
        "stop_token_ids": [],
        "arrival_time": 0.0,
        "priority": 0,
        "sort_key": float(key),
        "tokens": np.zeros(1, np.int32),
        "num_tokens": 1,
    }
    return Request(key=key, **usual | fields)  # type: ignore[arg-type]


def child_of(key: int, token_ids: Sequence[int]) -> CoreChild:
    """Return an answer that has these tokens."""
    return CoreChild(key=key, seed=key, output_token_ids=encode_ids(token_ids))


def new_message(
    outputs: Mapping[int, Sequence[int]], prompt: Sequence[int], params: SamplingParams, **fields: object
) -> EngineCoreRequest:
    """Return the message of a request for answers with these keys, and the tokens that each has."""
    usual: dict[str, object] = {"max_tokens": params.max_tokens, "stop_token_ids": [], "arrival_time": 0.0}
    return EngineCoreRequest(
        children=[child_of(key, ids) for key, ids in outputs.items()],
        prompt_token_ids=encode_ids(prompt),
        params=params,
        **usual | fields,  # type: ignore[arg-type]
    )


def frontend_of(key: int) -> int:
    """The one of two frontends that asks."""
    return key // 10 % 2


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(997) for _ in range(length)]


def random_sizes(rng: random.Random) -> dict[str, int | bool]:
    """Options of a Harness with a pool, blocks and steps of any size."""
    block_size, max_num_seqs = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 2, 5, 16])
    return {
        "num_blocks": max(rng.randrange(4, 80), 3 + 80 // block_size),
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_num_seqs, rng.choice([1, 3, 8, 64])),
        "enable_prefix_caching": rng.random() < 0.8,
        "steps_in_flight": rng.choice([1, 2]),
    }
