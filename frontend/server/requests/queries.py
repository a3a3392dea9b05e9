"""QueryProcessor: answers the queries of clients: tokenize, detokenize, health, info, answer form, metrics.

Threads process long texts. Health is computed from the supervisor's last Progress, so it works without a core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from ....ipc.errors import error_info
from ....ipc.messages.client import (
    AnswerFormIs,
    Detokenize,
    GetAnswerForm,
    GetHealth,
    GetInfo,
    GetMetrics,
    Health,
    Info,
    Metrics,
    QueryFailed,
    Reply,
    SpeechModel,
    Text,
    TokenIds,
    Tokenize,
)
from ....ipc.messages.intake import ReadPrompt
from ....ipc.messages.supervisor import Progress
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.models.model_config import ModelConfig
from ....ipc.version import tokenloom_version
from ...forms.openai.calls.constraints import call_token
from ...forms.parsers.names import new_parsers
from ..answer_forms.held_forms import HeldForms
from ..helpers.task import error_of
from ..prompts.prompt_reader import PromptReader
from .cores import Cores
from .engine_metrics import EngineMetrics

_PROGRESS_FIELDS = (  # copied from the last Progress to Health
    *("step", "num_running", "num_waiting", "num_free_blocks", "num_recomputed_tokens"),
    *("num_restarts", "last_failure", "is_paused", "is_asleep"),
)
STALL_S = 10.0  # with open requests and no finished step for longer, the engine counts as stalled


_Query: TypeAlias = Tokenize | Detokenize | GetHealth | GetInfo | GetAnswerForm | GetMetrics


@dataclass(eq=False)
class QueryProcessor:
    """Handler of clients' queries. Keeps the times of the last Progress and of the last one that showed progress."""

    _spec: EngineSpec
    _prompts: PromptReader
    _forms: HeldForms
    _cores: Cores
    _metrics: EngineMetrics
    _awake_time: Callable[[], float]  # seconds without suspensions of the engine (AwakeClock)
    _progress_at: float = 0.0
    _moved_at: float = 0.0
    is_draining: bool = False  # new requests are refused

    def on_progress(self, progress: Progress) -> None:
        known, self._progress_at = self._metrics.progress, self._awake_time()
        has_moved = progress.step != known.step or _is_held(progress) != _is_held(known)
        if has_moved or not (_is_busy(known) and _is_busy(progress)):
            self._moved_at = self._progress_at
        self._metrics.on_progress(progress)

    async def answer(self, query: _Query, owner: str, send: Callable[[Reply], None]) -> None:
        """Call `send` with the answer, later if the work is long. `owner`: the caller, for fair queueing."""
        try:
            reply = await self._reply(query, owner)
        except Exception as error:
            reply = QueryFailed(query_id=query.query_id, error=error_info(error_of(error)))
        send(reply)

    async def _reply(self, query: _Query, owner: str) -> Reply:
        query_id = query.query_id
        if isinstance(query, GetHealth):
            return self.health(query_id)
        if isinstance(query, GetInfo):
            return self._info(query_id)
        if isinstance(query, GetAnswerForm):
            return await self._answer_form(query)
        if isinstance(query, GetMetrics):
            return Metrics(query_id=query_id, metrics=self._metrics.read())
        if isinstance(query, Tokenize):
            question = ReadPrompt(prompt=query.prompt, chat=query.chat, add_special_tokens=query.add_special_tokens)
            prompt = await self._prompts.read(question, owner=owner)
            return TokenIds(query_id=query_id, token_ids=prompt.token_ids)
        return Text(query_id=query_id, text=await self._prompts.detokenize(query.token_ids, owner=owner))

    def health(self, query_id: int = 0) -> Health:
        progress, now = self._metrics.progress, self._awake_time()
        since = now - self._progress_at if self._progress_at else 0.0
        return Health(
            query_id=query_id,
            is_ready=self._cores.is_up and progress.is_core_up and not progress.obstacle and not self.is_draining,
            is_stalled=_is_busy(progress) and not _is_held(progress) and now - self._moved_at > STALL_S,
            step_age_s=progress.step_age_s + since,
            is_draining=self.is_draining,
            **{name: getattr(progress, name) for name in _PROGRESS_FIELDS},
        )

    def _info(self, query_id: int) -> Info:
        spec, inputs = self._spec, self._prompts.inputs
        limits, rules = inputs.media_limits, spec.model.output_rules
        return Info(
            query_id=query_id,
            version=tokenloom_version(),
            run_id=spec.run_id,
            model=spec.served_model_name,
            max_model_len=inputs.max_model_len,
            vocab_size=spec.model.vocab_size,
            block_size=spec.config.block_size,
            num_kv_blocks=self._metrics.num_kv_blocks or spec.config.num_kv_blocks or 0,
            tensor_parallel_size=spec.config.tensor_parallel_size,
            eos_token_ids=sorted(inputs.eos_token_ids),
            dtype=spec.dtype,
            device=spec.device,
            kernels=self._metrics.kernels,
            default_sampling_params=spec.default_sampling_params,
            tokenizer_folder=spec.tokenizer_folder if inputs.has_tokenizer else "",
            chat_template="" if inputs.chat_template is None else inputs.chat_template.source,
            max_loras=spec.config.max_loras if spec.config.enable_lora else 0,
            modalities=[] if limits.kind is None else [limits.kind],
            max_media=limits.max_media,
            max_media_bytes=0 if limits.kind is None else limits.max_bytes,
            has_answer_rules=rules is not None and rules.depend_on_place,
            pooling_tasks=spec.model.pooling.tasks,
            speech=speech_of(spec.model),
        )

    async def _answer_form(self, query: GetAnswerForm) -> AnswerFormIs:
        form = (await self._forms.find(query.template)).form
        inputs = self._prompts.inputs
        markers = [marker for parser in new_parsers(form, {}, is_inside_thought=False) for marker in parser.markers]
        return AnswerFormIs(
            query_id=query.query_id,
            form=msgspec.to_builtins(form),
            call_token=call_token(form, inputs.is_added_token),
            marker_ids=inputs.special_ids_of(tuple(markers)),
        )


def speech_of(model: ModelConfig) -> SpeechModel | None:
    """Return the facts about a model that requests for transcripts depend on; None if it takes no audio."""
    if model.audio is None:
        return None
    rules = model.output_rules
    return SpeechModel(
        family=model.audio.family,
        piece_s=model.audio.piece_s,
        language_ids=model.language_ids,
        has_times=rules is not None and rules.no_timestamps_id is not None,
        max_context_tokens=model.max_position_embeddings // 2 - 1,  # as in OpenAI's program of Whisper
    )


def _is_held(progress: Progress) -> bool:
    return progress.is_paused or progress.is_asleep or bool(progress.obstacle)


def _is_busy(progress: Progress) -> bool:
    return progress.num_running + progress.num_waiting > 0
