"""ControlProxy: passes clients' orders on, and returns the replies.

Orders go to the supervisor. A prefetch, which changes nothing but blocks, goes to one core alone, and to its successor
if it is lost.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from ....ipc.codec import num_ids
from ....ipc.errors import EngineDead, ErrorInfo, RequestError, error_info
from ....ipc.messages.client import Control, Done, Medium, QueryFailed
from ....ipc.messages.core import Prefetch, Prefetched
from ....ipc.messages.intake import ReadPrompt
from ....ipc.messages.orders import Order, Ordered
from ....ipc.messages.supervisor import ReplicaDown
from ....ipc.notes.deadly import ReadingNote
from ....ipc.spec.config.engine_spec import EngineSpec
from ..adapters.manager import AdapterManager
from ..helpers.task import error_of, run
from ..prompts.prompt import Prompt
from ..prompts.prompt_reader import PromptReader
from .core_client import FrontendOutbox
from .cores import Cores

NO_TIERS = (
    "all KV blocks are in the pool: start the engine with --kv-host-bytes, --kv-disk, --kv-remote or --kv-peers; "
    "reset_prefix_cache empties the pool"
)

AWAY = "the core is being replaced: try again in a second"

ONE_REPLICA = "no other replica could answer meanwhile: start the engine with --data-parallel-size 2, or start it again"

MAX_ORDER_ID_CHARACTERS = 100

Finish: TypeAlias = Callable[[ErrorInfo | int], None]  # replies: a command has failed, or is done with so many tokens


class _OpenPrefetch:
    """A prefetch without a reply yet, and its core."""

    def __init__(self, core: int, message: Prefetch, finish: Finish) -> None:
        self.core = core
        self.message = message
        self.finish = finish


class ControlProxy:
    """Forwarder of orders and prefetches. Owns those that have no reply yet."""

    def __init__(
        self,
        spec: EngineSpec,
        cores: Cores,
        adapters: AdapterManager,
        prompts: PromptReader,
        expand: Callable[[bytes, list[Medium]], Awaitable[Prompt]],
        outbox: FrontendOutbox,
        note: ReadingNote,
    ) -> None:
        """`expand` puts media into a prompt."""
        self._expand = expand
        self._spec, self._cores, self._outbox = spec, cores, outbox
        self._adapters, self._prompts, self._note = adapters, prompts, note
        self._finishes: dict[str, list[Finish]] = {}  # of orders, by their ids
        self._numbers = itertools.count()
        self._prefetches: dict[int, _OpenPrefetch] = {}  # by id

    def submit(self, control: Control, send: Callable[[Done | QueryFailed], None]) -> None:
        """Forward a command. `send` is called once with its reply, in the frontend's thread."""

        def finish(result: ErrorInfo | int) -> None:
            if isinstance(result, ErrorInfo):
                send(QueryFailed(query_id=control.query_id, error=result))
            else:
                send(Done(query_id=control.query_id, num_tokens=result))

        if control.action in ("clear_kv_cache", "prefetch_kv") and not self._spec.config.has_tiers:
            finish(error_info(RequestError(NO_TIERS)))
        elif control.action == "prefetch_kv":
            run(self._note.slices(self._prefetch(control, finish)))
        else:
            self._order(control, finish)

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, control: Control, finish: Finish) -> None:
        refusal = ""
        if control.action == "restart_replicas" and self._spec.config.data_parallel_size == 1:
            refusal = ONE_REPLICA
        elif len(control.order_id) > MAX_ORDER_ID_CHARACTERS:
            refusal = f"an order_id has at most {MAX_ORDER_ID_CHARACTERS} characters"
        if refusal:
            finish(error_info(RequestError(refusal)))
            return
        assert control.action != "prefetch_kv"
        order = Order(
            order_id=control.order_id or secrets.token_hex(8),
            action=control.action,
            mode=control.mode,
            model=control.model,
            sleep_level=control.sleep_level,
            tags=control.tags,
            level=control.level,
            replica=control.replica if control.action == "restart_replicas" else None,
        )
        self._finishes.setdefault(order.order_id, []).append(finish)
        self._outbox.to_supervisor.append(order)

    def on_ordered(self, ordered: Ordered) -> None:
        """Reply to an order."""
        for finish in self._finishes.pop(ordered.order_id, ()):
            finish(0 if ordered.error is None else ordered.error)

    # ── prefetches ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _prefetch(self, control: Control, finish: Finish) -> None:
        """Read the prompt of a prefetch, with its adapter and media, and forward it."""
        most = self._spec.max_model_len
        try:
            info = await self._adapters.find(control.adapter)
            question = ReadPrompt(prompt=control.prompt, token_ids=control.prompt_token_ids)
            prompt = await self._prompts.read(question)
            if control.media:
                prompt = await self._expand(prompt.token_ids, control.media)
            if (num_tokens := num_ids(prompt.token_ids)) > most:
                raise RequestError(f"the prompt has {num_tokens} tokens, max_model_len is {most}: give its beginning")
            if not self._cores.are_all_up:
                raise EngineDead(AWAY)
        except Exception as error:
            finish(error_info(error_of(error)))
            return
        message = Prefetch(
            prefetch_id=next(self._numbers),
            prompt_token_ids=prompt.token_ids,
            cache_salt=control.cache_salt,
            adapter_digest=b"" if info is None else bytes.fromhex(info.digest),
            media=[*prompt.spans],
        )
        core = self._cores.pick_for_prefetch(message)
        self._prefetches[message.prefetch_id] = _OpenPrefetch(core, message, finish)
        self._cores.prefetch(core, message)

    def on_prefetched(self, done: Prefetched) -> None:
        if (opened := self._prefetches.pop(done.prefetch_id, None)) is not None:
            opened.finish(done.num_tokens)

    # ── cores come and go ────────────────────────────────────────────────────────────────────────────────────────

    def on_core_up(self, core: int) -> None:
        """Send a core its open prefetches; it has just welcomed this frontend."""
        for opened in self._prefetches.values():
            if opened.core == core:
                self._cores.prefetch(core, opened.message)

    def on_down(self, down: ReplicaDown) -> None:
        """End the prefetches of a core that does not come back, with 0 tokens."""
        for opened in [*self._prefetches.values()]:
            if down.is_final and opened.core == down.replica:
                self.on_prefetched(Prefetched(prefetch_id=opened.message.prefetch_id))
