"""question_of: the prompt of a Submit as an order to tokenize it.

The text of an embedding model may get one of the checkpoint's prompts before it, named by the request or the default.
"""

from __future__ import annotations

from ....ipc.errors import RequestError
from ....ipc.messages.client import Submit
from ....ipc.messages.intake import ReadPrompt
from ....ipc.params.pooling_params import EMBEDDING_TASKS, PoolingParams
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.spec.models.pooling.pooling_config import PoolingConfig
from ...forms.prompt_limits import PromptLimits


def question_of(submit: Submit, limits: PromptLimits, config: PoolingConfig) -> ReadPrompt:
    """Return the order to tokenize a request's prompt. RequestError for a pair that is not to be scored, or a name of
    no prompt."""
    params, pooling, prompt = submit.params, submit.pooling, submit.prompt
    num_kept = num_kept_of(params, pooling)
    if submit.text_pair is not None and (pooling is None or prompt is None):
        raise RequestError("text_pair is given, which needs a prompt and pooling: leave it out")
    if prompt is not None and pooling is not None and submit.text_pair is None:
        prompt = prefix_of(pooling, config) + prompt
    return ReadPrompt(
        prompt=prompt,
        text_pair=submit.text_pair,
        num_kept=limits.max_model_len if num_kept == -1 else num_kept,
        token_ids=submit.prompt_token_ids,
        chat=submit.chat,
        chat_form=submit.chat_form,
        add_special_tokens=submit.add_special_tokens,
        cut_side=limits.cut_side(num_kept, params.truncation_side),
    )


def num_kept_of(params: SamplingParams, pooling: PoolingParams | None) -> int | None:
    """Return the truncation of a request, which may stand in either of its parameters."""
    if params.truncate_prompt_tokens is not None or pooling is None:
        return params.truncate_prompt_tokens
    return pooling.truncate_prompt_tokens


def prefix_of(pooling: PoolingParams, config: PoolingConfig) -> str:
    """Return the checkpoint's prompt before a text, by its name in the request; by default that of the checkpoint."""
    if pooling.task is not None and pooling.task not in EMBEDDING_TASKS:
        return ""
    name = config.default_prompt if pooling.prompt_name is None else pooling.prompt_name
    if not name:
        return ""
    if name not in config.prompts:
        mend = "leave it out"
        if config.prompts:
            mend = f"name one of {', '.join(config.prompts)}, or leave it out"
        raise RequestError(f"prompt_name is {name!r:.80}, which the model does not have: {mend}")
    return config.prompts[name]
