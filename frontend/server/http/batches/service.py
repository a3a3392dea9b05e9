"""EngineBatches: the batches of an engine, as one frontend serves them. It joins endpoints, runner and clerk."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from .....ipc.errors import RequestError
from .....ipc.messages.intake import BatchChecked, CheckBatch, IntakeAnswer, NotRead
from .....ipc.spec.config.engine_spec import EngineSpec
from ....forms.openai.batches.batch import BatchRequest
from ....forms.openai.errors import HttpError
from ....state.batches.store import Batches
from ....state.engine_state import EngineState
from ....state.files import Files
from ...api.openai.local_engine import LocalEngine
from ...bodies.batch_file import PIECE_BYTES
from ...helpers.intake import IntakeHelper, IntakePool, ask_intake
from ...helpers.pool import PoolJob
from ...helpers.task import Then, in_event_loop, reply_of
from ...requests.frontend import Frontend
from ..endpoint import Endpoint
from ..peers import Peers
from .clerk import BatchClerk
from .endpoints import RUNNER, BatchEndpoints
from .runner import BatchRunner, RunnerLimits

LINES_PER_ROW = 2  # so that no row waits for the next line


class EngineBatches:
    """Owner of the runner, in frontend 0 of an engine with a state folder."""

    def __init__(
        self,
        engine: LocalEngine,
        frontend: Frontend,
        spec: EngineSpec,
        state: EngineState,
        peers: Peers,
        paths: frozenset[str],
    ) -> None:
        """`paths`: of the endpoints that a batch may be for."""
        self._runner: BatchRunner | None = None
        self._endpoints: BatchEndpoints | None = None
        if state.files is None:
            return
        batches = Batches(state.database)
        if peers.index == RUNNER:
            self._runner = _new_runner(frontend, spec, state, state.files, batches)
        now = state.database.clock.now
        self._endpoints = BatchEndpoints(
            engine.bodies, batches, state.files, self._runner, peers, paths, spec.served_model_name, now
        )

    def endpoints(self) -> list[Endpoint]:
        if self._endpoints is not None:
            return self._endpoints.endpoints()
        one = "/v1/batches/{batch_id}"
        return [
            Endpoint("/v1/batches", _refuse, body_type=BatchRequest),
            Endpoint("/v1/batches", _refuse),
            Endpoint(one, _refuse),
            Endpoint(f"{one}/cancel", _refuse, body_type=BatchRequest),
        ]

    async def run(self, app: ASGIApp) -> None:
        """Run the lines of batches, if this is the frontend that does."""
        if self._runner is not None:
            await self._runner.run(app)


async def _refuse(request: Request) -> Response:
    raise HttpError(400, "batches need a folder that outlives the engine: start with --state-dir DIR")


def _new_runner(
    frontend: Frontend, spec: EngineSpec, state: EngineState, files: Files, batches: Batches
) -> BatchRunner:
    pool, config = frontend.intake, spec.config
    assert frontend.metrics.batches is not None, "an engine with a state folder counts batches"

    async def check(question: CheckBatch) -> BatchChecked:
        return await _checked(pool, question)

    clerk = BatchClerk(batches, files, check, config.max_body_bytes)
    num_cores = max(config.data_parallel_size, len(spec.remote_cores))
    limits = RunnerLimits(LINES_PER_ROW * config.max_num_seqs * num_cores)
    return BatchRunner(
        batches,
        files,
        clerk,
        limits,
        spec.served_model_name,
        frontend.metrics.batches,
        lambda: frontend.is_draining,
        state.database.clock.now,
    )


async def _checked(pool: IntakePool, question: CheckBatch) -> BatchChecked:
    """Let an intake process check lines; RequestError if it cannot read them."""

    def start(then: Then[IntakeAnswer]) -> PoolJob[IntakeHelper] | None:
        return pool.run(lambda helper: ask_intake(helper, question), then, num_bytes=PIECE_BYTES, owner="batches")

    answer = await in_event_loop(reply_of(start, pool.cancel))
    if isinstance(answer, NotRead):
        raise RequestError(answer.message)
    assert isinstance(answer, BatchChecked), "the reply to CheckBatch"
    return answer
