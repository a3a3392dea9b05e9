"""The prompts of a request that may hold many, as texts or as token ids, made into Submit messages.

Of the ids `cmpl-…` is the answer's, and `cmpl-…/3` that of its fourth prompt.
"""

from __future__ import annotations

import secrets
from typing import cast

import msgspec

from ..ipc.errors import RequestError
from ..ipc.messages import Submit
from ..ipc.pooling_params import PoolingParams
from ..ipc.sampling_params import SamplingParams
from .input_processor import InputProcessor
from .openai_schema import MAX_ID_CHARACTERS, MAX_PROMPTS, Prompts
from .prompts import new_submit


def answer_id(prefix: str, given: str | None) -> str:
    """A fresh id, or one of the caller's own."""
    if given is None:
        return f"{prefix}-{secrets.token_hex(16)}"
    if not 0 < len(given) <= MAX_ID_CHARACTERS or not given.isprintable() or "/" in given:
        raise RequestError(f"request_id must have 1 to {MAX_ID_CHARACTERS} printable characters other than /")
    return f"{prefix}-{given}"


def prompt_submits(
    request_id: str,
    field: str,
    prompts: Prompts,
    params: SamplingParams,
    inputs: InputProcessor,
    add_special_tokens: bool | None,
    pooling: PoolingParams | None = None,
) -> list[Submit]:
    """One Submit for each prompt, in their order. `field` names the prompts in errors."""
    listed = _listed(field, prompts)
    if len(listed) > MAX_PROMPTS:
        raise RequestError(f"{field} holds {len(listed)} prompts, at most {MAX_PROMPTS} are served at once")
    submits = []
    for position, prompt in enumerate(listed):
        submit_id = request_id if len(listed) == 1 else f"{request_id}/{position}"
        submit = new_submit(submit_id, prompt, params, pooling)
        if submit.prompt is not None and add_special_tokens is False:
            token_ids = inputs.encode(submit.prompt, add_special_tokens=False).token_ids
            submit = msgspec.structs.replace(submit, prompt=None, prompt_token_ids=token_ids)
        submits.append(submit)
    return submits


def _listed(field: str, prompts: Prompts) -> list[str | list[int]]:
    if prompts and isinstance(prompts, str):
        return [prompts]
    if not prompts:
        raise RequestError(f"{field} is empty: give text, token ids, or a list of these")
    num_ids = sum(isinstance(each, int) for each in prompts)
    if num_ids == len(prompts):
        return [cast("list[int]", prompts)]
    if num_ids:
        raise RequestError(
            f"{field} holds token ids beside texts or lists: give one prompt of ids, or a list of prompts"
        )
    return cast("list[str | list[int]]", prompts)
