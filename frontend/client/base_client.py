"""BaseClient: the part that Client and AsyncClient share: transport, lifetime, construction of messages, control.

Needs pyzmq and msgspec, not torch. Knows neither the wire protocol (`protocol.py`) nor the forms of prompts
(`frontend/forms/prompts.py`).
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, Self, TypeVar, get_args

import msgspec

from ...ipc.errors import RequestError
from ...ipc.messages.base import MemoryTag, PauseMode
from ...ipc.messages.client import ChatForm, Info, LoadAdapter, Query, Submit, UnloadAdapter
from ...ipc.params.lora_request import LoRARequest
from ...ipc.params.pooling_params import PoolingParams, PoolingTask
from ...ipc.params.public_struct import suggestion
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.process.log import LogLevel
from ..forms.call_options import ChatOptions, PoolOptions, adapters_of, pool_params
from ..forms.prompts import Chat, CheckedChat, Prompt, check_pooling, distinct_texts, new_submit
from ..forms.queries import order_query, pause_query, sleep_query, wake_up_query
from .transport import Transport
from .zmq_transport import ZmqTransport

if TYPE_CHECKING:
    from .chat_tools import ChatTools

DoneT = TypeVar("DoneT")  # result of a control method: None, or a coroutine that returns None


class BaseClient(Generic[DoneT]):
    """Common part of Client and AsyncClient: the connection to an engine, and methods to control it. A control method
    waits until its command is done; in an AsyncClient it is a coroutine."""

    _waits_for_engine: ClassVar[bool]
    _model = ""  # as the caller named it, or as `info` said; empty: not known yet
    _defaults: dict[str, Any] | None = None  # the engine's sampling defaults; None: not fetched yet

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 30.0,
        key_file: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        """Connect to the engine at `address`, as engine-launch prints it; `key_file` is the engine's --key-file.

        If no engine answers within `connect_timeout_s`, EngineDead is raised: in a Client by this constructor, in an
        AsyncClient by the first request or by `async with`. If the frontend process dies later, open requests resume
        with its replacement, or fail with EngineDead after `reconnect_timeout_s`. If several addresses are given, one
        for each frontend, the client uses one of them, and resumes at the next.
        """
        for name in unknown:
            known = ("address", "connect_timeout_s", "reconnect_timeout_s", "key_file")
            raise TypeError(f"{type(self).__name__}() has no keyword {name!r}{suggestion(name, known)}")
        transport = ZmqTransport(address, connect_timeout_s, reconnect_timeout_s, key_file)
        self._attach(transport, transport.close)
        if self._waits_for_engine:
            try:
                transport.wait_connected()
            except BaseException:
                self._finalizer()
                raise

    def _attach(self, transport: Transport, close: Callable[[], None]) -> None:
        """Use `transport`. `close` is called once: by `close()`, at garbage collection or at exit, whichever is
        first."""
        self._transport = transport
        self._finalizer = weakref.finalize(self, close)
        self._request_numbers = itertools.count()

    def __repr__(self) -> str:
        """Name the class, the model if it is known, and the addresses."""
        places = ", ".join(self._transport.addresses)
        return f"<{' '.join(filter(None, (type(self).__name__, self._model)))} at {places}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._finalizer()

    def _new_submit(
        self,
        prompt: Prompt | Chat | CheckedChat,
        params: SamplingParams,
        request_id: str | None = None,
        pooling: PoolingParams | None = None,
        form: ChatForm | None = None,
        adapter: LoRARequest | None = None,
    ) -> Submit:
        if request_id is None:
            request_id = f"request-{next(self._request_numbers)}"
        submit = new_submit(request_id, prompt, params, pooling, form)
        if adapter is None:
            return submit
        path = _on_engine(adapter.lora_path) if adapter.lora_path else ""
        return msgspec.structs.replace(submit, adapter=adapter.lora_name, adapter_path=path)

    def _pool_submits(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None,
        task: PoolingTask | None,
        options: PoolOptions,
        request_id: str | None = None,
    ) -> list[Submit]:
        pooling, adapters = check_pooling(pooling_params, task), adapters_of(options, len(prompts))
        params = pool_params(options)
        return [
            self._new_submit(prompt, params, request_id, pooling, adapter=adapter)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]

    def _pair_submits(
        self, pairs: Sequence[tuple[str, str]], pooling_params: PoolingParams | None, info: Info, options: PoolOptions
    ) -> list[Submit]:
        """Return the requests that score pairs of texts: one for each pair if the model has a head for that, else one
        for each distinct text to embed."""
        if "score" in info.pooling_tasks:
            firsts = [first for first, _ in pairs]
            submits = self._pool_submits(firsts, pooling_params, "score", options)
            return [
                msgspec.structs.replace(submit, text_pair=second, params=submit.params.replace(truncation_side="right"))
                for submit, (_, second) in zip(submits, pairs, strict=True)
            ]
        if "embed" not in info.pooling_tasks:
            served = ", ".join(info.pooling_tasks)
            raise RequestError(f"this model scores no pairs, since its head has several classes: it serves {served}")
        params = msgspec.structs.replace(check_pooling(pooling_params, "embed"), use_activation=True)
        return self._pool_submits(distinct_texts(pairs), params, "embed", options)

    # ── control ──

    def _control(self, make_query: Callable[..., Query]) -> DoneT:
        """Send a command and wait until it is done; raise its error. Each subclass defines it."""
        raise NotImplementedError

    def pause(self, mode: PauseMode = "keep") -> DoneT:
        """Start no waiting or new requests until `resume`; return once no request runs.

        `mode` says what happens to running requests: with keep they stop, and continue after `resume`; with wait they
        finish; with abort they end as aborted.
        """
        return self._control(pause_query(mode))

    def resume(self) -> DoneT:
        """End a pause; do nothing if the engine is not paused."""
        return self._control(order_query("resume"))

    def reload(self, model: str | os.PathLike[str]) -> DoneT:
        """Load the weights of another checkpoint of the same architecture and shape; open requests continue with them.
        `model`: a folder, a GGUF file, or a hub id, which the engine downloads if needed. RequestError if the
        checkpoint cannot be read, or has another shape."""
        if not isinstance(model, (str, os.PathLike)):
            raise RequestError(f"model is {model!r:.80}: it must be a folder, a GGUF file or a hub id")
        return self._control(order_query("reload", model=_on_engine(model)))

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, load_inplace: bool = False) -> DoneT:
        """Load a LoRA adapter from a folder on the engine's machine; then requests may name it. RequestError if it
        cannot be loaded, or another adapter has the name. With `load_inplace` the new adapter takes over the name:
        later requests use it, open ones keep the old one."""
        query = partial(LoadAdapter, name=name, path=_on_engine(path), is_inplace=load_inplace)
        return self._control(partial(query, order_id=secrets.token_hex(8)))

    def unload_adapter(self, name: str) -> DoneT:
        """Forget the name of an adapter; open requests keep the adapter. RequestError if no adapter has the name."""
        return self._control(partial(UnloadAdapter, name=name, order_id=secrets.token_hex(8)))

    def sleep(self, level: int = 1, mode: PauseMode = "keep") -> DoneT:
        """Free the memory of weights and KV cache until `wake_up`. New requests wait; `mode` says what happens to
        running ones, as in `pause`.

        Level 1 keeps the checkpoint in the operating system's page cache, level 2 drops it from the cache, too.
        """
        return self._control(sleep_query(level, mode))

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> DoneT:
        """Allocate the memory of `tags` ("weights", "kv_cache"; None: both) again. Requests resume once both are
        restored."""
        return self._control(wake_up_query(tags))

    def clear_kv_cache(self) -> DoneT:
        """Remove all KV blocks from the pool, host memory, disk and remote store, also for other engines that share
        these. Running requests keep their blocks. RequestError if the engine has no KV tiers."""
        return self._control(order_query("clear_kv_cache"))

    def start_profile(self) -> DoneT:
        """Start torch's profiler in every worker. RequestError if it is running already."""
        return self._control(order_query("start_profile"))

    def stop_profile(self) -> DoneT:
        """Stop the profiler; return after each worker has written a Chrome trace to the engine's `profile_dir`.

        RequestError if the profiler does not run, or if a worker or the core has been replaced since it was started.
        """
        return self._control(order_query("stop_profile"))

    def restart_replicas(self, replica: int | None = None) -> DoneT:
        """Restart the processes of a replica, or of all replicas one after the other (None). Before that its open
        answers may finish, for at most --drain-timeout-s; the others then continue on another replica. RequestError if
        there is no such replica, or no other one."""
        return self._control(order_query("restart_replicas", replica=replica))

    def reload_frontends(self) -> DoneT:
        """Replace the engine's frontends one by one, as after a change of their program. The next one loads while the
        old one serves, and goes on with its streams and requests. InternalError if one does not come up."""
        return self._control(order_query("reload_frontends"))

    def set_log_level(self, level: LogLevel) -> DoneT:
        """Set the log level of all processes of the engine, including those that start later. RequestError if `level`
        is unknown."""
        if level not in get_args(LogLevel):
            raise RequestError(f"level must be {', '.join(get_args(LogLevel))}, got {level!r:.80}")
        return self._control(order_query("log_level", level=level))


def new_tools(options: ChatOptions) -> ChatTools | None:
    """Return the tools of a call of `chat`; None if it has none."""
    if not options.get("tools") and options.get("tool_choice") in (None, "none", "auto"):
        return None
    from .chat_tools import ChatTools  # imports the forms of OpenAI's API, which only tools need

    return ChatTools(options)


def _on_engine(path: str | os.PathLike[str]) -> str:
    """Return an existing path as an absolute one, since the engine runs in another folder; anything else, such as a
    hub id, unchanged."""
    return os.path.abspath(path) if os.path.exists(path) else os.fspath(path)
