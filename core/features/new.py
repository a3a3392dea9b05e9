"""Makes the features of an engine in their order, and hands them to its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...ipc.process.awake_clock import AwakeClock
from ...ipc.spec.config.engine_spec import EngineSpec
from ..request import Request
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_feature import Engine, StepFeature
from .adapters.adapter_queue import AdapterQueue
from .blobs.needed_blobs import NeededBlobs
from .crash_isolation import AdmissionNotes, CrashIsolation
from .flex import Flex
from .grammar.helper import GrammarHelper
from .grammar.manager import GrammarManager
from .grammar.prover import GrammarProver
from .media.row_media import RowMedia
from .misses.miss_finder import MissFinder
from .pause import Pause
from .pins import Pins
from .speculation.lookup import lookup_of
from .texts import Texts
from .tiers.offload import Offload
from .tiers.options import Tiers
from .tiers.tier_feature import TierFeature


class Surroundings(NamedTuple):
    """The connections to other processes that the features use."""

    grammar_helper: GrammarHelper
    grammar_prover: GrammarHelper | None = None  # compiles unknown grammars first; None: nothing protects the helper
    tiers: Tiers | None = None  # places for blocks outside the pool
    blobs: NeededBlobs | None = None  # adapters and media of the requests of gateways
    on_admission: Callable[[Request], None] | None = None  # is called before a request is admitted to a step
    has_exact_drafts: bool = False  # as in Initialize


class Features(NamedTuple):
    """The features that the engine also calls directly, to pass them messages and orders."""

    pause: Pause
    isolation: CrashIsolation
    offload: Offload | None
    adapters: AdapterQueue
    media: RowMedia
    grammars: GrammarManager


def new_features(
    engine: Engine, spec: EngineSpec, scheduler: Scheduler, clock: AwakeClock, around: Surroundings
) -> Features:
    """Make and return the features of an engine, and give them to its scheduler in an order that matters: each verb
    calls them in this order, and no block is fetched and no slot is filled for a request that an earlier feature
    holds."""
    waiting, kv_cache, drafting = scheduler.waiting, scheduler.kv_cache, scheduler.batches.drafting
    pause = Pause()
    isolation = CrashIsolation(scheduler.rows)
    holders: list[StepFeature] = [pause, isolation]
    if around.blobs is not None:
        around.blobs.connect(waiting, engine)
        holders.append(around.blobs)
    in_order = [*holders, Flex(scheduler, spec.config.flex_share), Texts(scheduler, spec.max_num_batched_tokens)]
    if around.on_admission is not None:
        in_order.append(AdmissionNotes(around.on_admission))
    proposer = lookup_of(spec, scheduler, has_exact_drafts=around.has_exact_drafts)
    if proposer is not None:
        drafting.proposer = proposer
        in_order.append(proposer)
        if proposer.model is not None:
            in_order.append(proposer.model)
    offload = None
    if around.tiers is not None:
        offload = Offload(around.tiers, kv_cache, waiting.release, engine.enter_namespace)
        kv_cache.attach_outer(offload)
    if spec.shares_prefixes:
        in_order.append(MissFinder(engine, scheduler, offload))
    if offload is not None:
        in_order.append(TierFeature(offload, scheduler))
    adapters = AdapterQueue(spec, scheduler, clock, engine, lambda each: any(one.holds(each) for one in holders))
    if adapters.table.slots:
        in_order.append(adapters)
    media = RowMedia(spec, scheduler, engine)
    if spec.encoder_cache_tokens:
        in_order.append(media)
    prover = None
    if around.grammar_prover is not None:
        prover = GrammarProver(around.grammar_prover, spec.config.grammar_timeout_s, clock)
    can_void = not spec.model.has_state and spec.model.state is None and spec.model.cross is None
    grammars = GrammarManager(around.grammar_helper, prover, clock, scheduler, engine, can_void=can_void)
    scheduler.features.use([*in_order, grammars, drafting, Pins(scheduler, clock), scheduler.tenants])
    return Features(pause, isolation, offload, adapters, media, grammars)
