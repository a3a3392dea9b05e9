"""ControlProxy: checks control commands of clients, forwards them, and returns the replies.

Most commands go to the cores. A new log level and a restart of replicas go to the supervisor; its broadcast is the
reply.

A thread finds and reads the checkpoint of a reload, because a hub id may need a download. If the core is lost, open
commands are sent to the next core, except pause and resume, which fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from ....ipc.codec import num_ids
from ....ipc.errors import ConfigError, EngineDead, ErrorInfo, RequestError, TokenloomError, error_info
from ....ipc.messages.client import Control, Done, Medium, QueryFailed
from ....ipc.messages.core import ControlDone, EngineControl
from ....ipc.messages.intake import ReadPrompt
from ....ipc.messages.media import MediaSpan
from ....ipc.messages.supervisor import ReplicaDown, ReplicasRestarted, RestartReplicas, SetLogLevel
from ....ipc.notes.deadly import ReadingNote
from ....ipc.process.log import LogLevel
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.config.served_model import check_exchange
from ...checkpoint.hub import find_checkpoint
from ..adapters.manager import AdapterManager
from ..helpers.task import run
from ..helpers.thread_pool import ThreadPool, error_of
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

Finish: TypeAlias = Callable[[ErrorInfo | ControlDone | None], None]  # replies to a command: it is done, or has failed


class _OpenControl:
    """A command without a reply yet, and the cores that have not carried it out."""

    def __init__(self, command: EngineControl, finish: Finish, waits: set[int]) -> None:
        self.command, self.finish, self.waits = command, finish, waits
        self.num_cores, self.num_tokens = len(waits), 0
        self.errors: dict[int, ErrorInfo] = {}  # of the cores that refused it, or failed

    def result(self) -> ErrorInfo | ControlDone:
        """Return the reply: an error if any core had one, which names these cores unless all had."""
        if not self.errors:
            return ControlDone(control_id=self.command.control_id, num_tokens=self.num_tokens)
        error = next(iter(self.errors.values()))
        if len(self.errors) == self.num_cores:
            return error
        where = ", ".join(map(str, sorted(self.errors)))
        what = f"{self.command.action} failed at replica {where} of {self.num_cores}, which is as it was before"
        return msgspec.structs.replace(
            error, message=f"{what}; the others have carried it out: repeat it, or undo it there. {error.message}"
        )


class ControlProxy:
    """Forwarder of control commands. Owns those that have no reply yet."""

    def __init__(
        self,
        spec: EngineSpec,
        cores: Cores,
        adapters: AdapterManager,
        thread_pool: ThreadPool,
        prompts: PromptReader,
        expand: Callable[[bytes, list[Medium]], Awaitable[Prompt]],
        outbox: FrontendOutbox,
        note: ReadingNote,
    ) -> None:
        """`expand` puts media into a prompt."""
        self._expand = expand
        self._spec, self._cores, self._thread_pool, self._outbox = spec, cores, thread_pool, outbox
        self._adapters, self._prompts, self._note = adapters, prompts, note
        self._numbers = itertools.count()
        self._open: dict[int, _OpenControl] = {}  # by control id
        self._level_changes: list[tuple[LogLevel, Finish]] = []
        self._restarts: list[tuple[int | None, Finish]] = []

    def submit(self, control: Control, send: Callable[[Done | QueryFailed], None]) -> None:
        """Forward a command. `send` is called once with its reply, in the frontend's thread."""

        def finish(result: ErrorInfo | ControlDone | None) -> None:
            query_id = control.query_id
            if isinstance(result, ErrorInfo):
                send(QueryFailed(query_id=query_id, error=result))
            else:
                send(Done(query_id=query_id, num_tokens=0 if result is None else result.num_tokens))

        if control.action in ("clear_kv_cache", "prefetch_kv") and not self._spec.config.has_tiers:
            finish(error_info(RequestError(NO_TIERS)))
        elif control.action == "reload" and self._spec.remote_cores:
            self._reload_elsewhere(control, finish)
        elif control.action == "prefetch_kv":
            run(self._note.slices(self._prefetch(control, finish)))
        elif control.action == "log_level":
            self._level_changes.append((control.level, finish))
            self._outbox.to_supervisor.append(SetLogLevel(level=control.level))
        elif control.action == "restart_replicas" and self._spec.config.data_parallel_size == 1:
            finish(error_info(RequestError(ONE_REPLICA)))
        elif control.action == "restart_replicas":
            self._restarts.append((control.replica, finish))
            self._outbox.to_supervisor.append(RestartReplicas(replica=control.replica))
        elif control.action == "reload":
            self._thread_pool.run(
                lambda: self._find_checkpoint(control.model), lambda folder: self._forward(control, folder, finish)
            )
        else:
            self._forward(control, "", finish)

    def on_log_level(self, level: LogLevel) -> None:
        """Reply to the commands for this level, which the supervisor has broadcast."""
        changes, self._level_changes = self._level_changes, [each for each in self._level_changes if each[0] != level]
        for asked, finish in changes:
            if asked == level:
                finish(None)

    def on_restarted(self, done: ReplicasRestarted) -> None:
        """Reply to the orders to restart these replicas."""
        restarts, self._restarts = self._restarts, [each for each in self._restarts if each[0] != done.replica]
        for replica, finish in restarts:
            if replica == done.replica:
                finish(done.error)

    def _reload_elsewhere(self, control: Control, finish: Finish) -> None:
        """Forward a gateway's reload: each engine finds and checks the folder on its own machine."""
        if control.model.startswith("/"):
            self._forward(control, control.model, finish)
        else:
            what = (
                f"{control.model!r:.200} is no absolute path: engines of a gateway reload the same path on each machine"
            )
            finish(error_info(RequestError(f"{what}; put the checkpoint there and name it so")))

    def _find_checkpoint(self, model: str) -> str:
        """Find or download a checkpoint and return its folder; RequestError if it cannot replace the served one."""
        if not model:
            raise RequestError("reload needs a model: a folder, a GGUF file or a hub id")
        try:
            folder = find_checkpoint(model, None, "the model", self._spec.config)
        except ConfigError as error:  # the caller's mistake here, not the operator's
            raise RequestError(str(error)) from None
        check_exchange(folder, self._spec.config, self._spec.model)
        return str(folder)

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
        except Exception as error:
            finish(error_info(error_of(error)))
            return
        digest = b"" if info is None else bytes.fromhex(info.digest)
        control = msgspec.structs.replace(control, prompt_token_ids=prompt.token_ids)
        self._forward(control, "", finish, digest, prompt.spans)

    def _forward(
        self,
        control: Control,
        folder: str | TokenloomError,
        finish: Finish,
        adapter_digest: bytes = b"",
        media: Sequence[MediaSpan] = (),
    ) -> None:
        if not isinstance(folder, TokenloomError) and not self._cores.are_all_up:
            is_away = "an engine of this gateway is away, and an order goes to all: try again when it is back"
            folder = EngineDead(is_away if self._cores.are_remote else AWAY)
        if isinstance(folder, TokenloomError):
            finish(error_info(folder))
            return
        assert control.action != "log_level" and control.action != "restart_replicas"
        command = EngineControl(
            control_id=next(self._numbers),
            action=control.action,
            mode=control.mode,
            model_folder=folder,
            sleep_level=control.sleep_level,
            tags=control.tags,
            prompt_token_ids=control.prompt_token_ids or b"",
            cache_salt=control.cache_salt,
            adapter_digest=adapter_digest,
            media=[*media],
        )
        is_for_one = command.action == "prefetch_kv"
        cores = {self._cores.pick_for_prefetch(command)} if is_for_one else self._cores.numbers
        self._open[command.control_id] = _OpenControl(command, finish, set(cores))
        for core in cores:
            self._cores.control(core, command)

    def on_done(self, core: int, done: ControlDone) -> None:
        """Note that a core has carried out a command, or refused it; reply after the last core."""
        opened = self._open.get(done.control_id)
        if opened is not None and core in opened.waits:
            opened.num_tokens += done.num_tokens
            if done.error is not None:
                opened.errors[core] = done.error
            self._drop(core, opened)

    def _drop(self, core: int, opened: _OpenControl) -> None:
        """Wait for a core no more; reply if it was the last one."""
        opened.waits.discard(core)
        if not opened.waits:
            del self._open[opened.command.control_id]
            opened.finish(opened.result())

    def on_core_lost(self, core: int) -> None:
        """Fail open pauses and resumes: the new core starts unpaused."""
        for control_id, opened in list(self._open.items()):
            if core in opened.waits and opened.command.action in ("pause", "resume"):
                del self._open[control_id]
                opened.finish(ErrorInfo("dead", "the core was replaced: try again"))

    def on_core_up(self, core: int) -> None:
        """Send the open commands that wait for a core to it; it has just welcomed this frontend."""
        for opened in self._open.values():
            if core in opened.waits:
                self._cores.control(core, opened.command)

    def on_down(self, down: ReplicaDown) -> None:
        """Wait no more for a core that does not come back, and no more for the reload of an engine that a gateway has
        lost: it reads the weights of the others when it is back."""
        for opened in list(self._open.values()):
            is_behind = self._cores.are_remote and not down.has_core and opened.command.action == "reload"
            if down.replica in opened.waits and (down.is_final or is_behind):
                if is_behind:
                    opened.errors[down.replica] = ErrorInfo("dead", down.reason)
                self._drop(down.replica, opened)
