"""PoolingRules: checks what a request to pool asks for against the model, and fills in the model's own choices."""

from __future__ import annotations

import msgspec

from ....ipc.errors import RequestError
from ....ipc.params.pooling_params import EMBEDDING_TASKS, PoolingParams
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.spec.models.model_config import ModelConfig
from .prompt import Prompt
from .prompt_question import num_kept_of

MAX_RESULT_BYTES = 48 << 20  # of one request: it travels in one message


class PoolingRules:
    """Rules of one model."""

    def __init__(self, model: ModelConfig) -> None:
        self._model, self.config = model, model.pooling
        self._vector_size = self.config.num_outputs(model.hidden_size)

    def check_generates(self) -> None:
        """Raise RequestError unless the model generates tokens."""
        if self._model.is_generative:
            return
        reason = "it is an encoder" if self._model.is_encoder else "it has no language model's head"
        raise RequestError(
            f"this model ({self._model.architecture}) generates no tokens, since {reason}: it serves "
            + ", ".join(self.config.tasks)
        )

    def check_chats(self) -> None:
        """Raise RequestError if the model is an encoder, of which none has a chat template."""
        if self._model.is_encoder:
            raise RequestError(
                f"this model ({self._model.architecture}) takes no chats, since it is an encoder: send texts, for "
                + ", ".join(self.config.tasks)
            )

    @property
    def keeps_begin(self) -> bool:
        """Whether a prompt that is cut at its beginning keeps the tokens before a text: an encoder's result is read at
        the first."""
        return self._model.is_encoder

    def resolve(self, pooling: PoolingParams, prompt: Prompt) -> PoolingParams:
        """Return the parameters with the model's own choices in place of None. RequestError if the model does not serve
        the task, or the task does not have a parameter that is given."""
        tasks, config = self.config.tasks, self.config
        task = pooling.task or tasks[0]
        if task not in tasks:
            needed = "classification head" if config.head is None else "embedding"
            raise RequestError(
                f"task is {task}, but this model ({self._model.architecture}) has no {needed}: it serves "
                + ", ".join(tasks)
            )
        self._check_fields(task, pooling)
        self._check_dimensions(pooling.dimensions)
        needs_all = pooling.skip_reading_prefix_cache or (pooling.method is None and len(config.methods) > 1)
        method = config.methods[0] if pooling.method is None and len(config.methods) == 1 else pooling.method
        return msgspec.structs.replace(
            pooling,
            task=task,
            method=method,
            skip_reading_prefix_cache=True if needs_all else None,
            first_type_tokens=prompt.first_type_tokens,
        )

    def sampling_params(self, params: SamplingParams, pooling: PoolingParams) -> SamplingParams:
        """Return the sampling parameters of a request to pool: of `params` only truncation, priority, timeouts and
        cache_salt are kept. RequestError if n is not 1."""
        if params.n != 1:
            raise RequestError(f"n is {params.n}: a prompt has one result, leave it out")
        return SamplingParams(
            max_tokens=1,
            truncate_prompt_tokens=num_kept_of(params, pooling),
            truncation_side=params.truncation_side,
            priority=params.priority,
            service_tier=params.service_tier,
            timeout_s=params.timeout_s,
            queue_timeout_s=params.queue_timeout_s,
            cache_salt=params.cache_salt,
        )

    def check_result(self, pooling: PoolingParams, num_tokens: int) -> None:
        """Raise RequestError if the result for a prompt of `num_tokens` tokens would not fit into a message."""
        if not pooling.is_token_level:
            return
        head = self.config.head
        width = self._vector_size if pooling.task in EMBEDDING_TASKS or head is None else len(head.labels)
        num_bytes = 4 * num_tokens * width
        if num_bytes > MAX_RESULT_BYTES:
            raise RequestError(
                f"the result has {width} numbers for each of {num_tokens} tokens, {num_bytes} bytes; at most "
                f"{MAX_RESULT_BYTES} are returned: shorten the prompt, or lower truncate_prompt_tokens"
            )

    def _check_fields(self, task: str, pooling: PoolingParams) -> None:
        """Raise RequestError for a parameter that belongs to another task."""
        is_embedding = task in EMBEDDING_TASKS
        misplaced = [
            name
            for name, fits in (
                ("dimensions", is_embedding),
                ("method", not pooling.is_token_level),
                ("step_tag_id", task == "token_classify"),
                ("returned_token_ids", task == "token_classify"),
            )
            if getattr(pooling, name) is not None and not fits
        ]
        if misplaced:
            raise RequestError(f"{misplaced[0]} is given, task {task} does not have it: leave it out")
        if pooling.method is not None and self.config.layers and pooling.method not in self.config.methods:
            raise RequestError(
                f"method is {pooling.method!r}, the model's dense layers take {', '.join(self.config.methods)}: leave "
                "it out"
            )
        head = self.config.head
        columns = pooling.returned_token_ids or ()
        if head is not None and columns and max(columns) >= len(head.labels):
            raise RequestError(f"returned_token_ids has {max(columns)}, the head gives {len(head.labels)} numbers")

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        if dimensions > self._vector_size:
            raise RequestError(f"dimensions is {dimensions}, this model's vectors have {self._vector_size}")
        allowed = self.config.dimensions
        if allowed and dimensions not in allowed:
            raise RequestError(f"dimensions is {dimensions}, this model is trained for {allowed}: use one of these")
