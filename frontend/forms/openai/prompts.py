"""Convert the prompts of a request, texts or token ids, to Submit messages.

A single prompt is submitted under the request's id, `cmpl-…`; of several prompts, the fourth has the id `cmpl-…/3`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from ....ipc.errors import RequestError
from ....ipc.messages.client import Submit
from ....ipc.messages.intake import BodyInput
from ....ipc.params.pooling_params import PoolingParams
from ....ipc.params.sampling_params import MAX_CHILDREN, SamplingParams
from ..prompt_limits import PromptLimits
from ..prompts import check_text, check_token_ids
from .generation import MAX_ID_CHARACTERS, MAX_PROMPTS, Prompts

_SECRET = re.compile("_[0-9a-f]{32}$")


def answer_id(prefix: str, given: str | None, drawn: str) -> str:
    """Return `prefix-ID`, with the caller's id or else the one `drawn`; RequestError if the caller's is invalid."""
    if given is None:
        return f"{prefix}-{drawn}"
    if not 0 < len(given) <= MAX_ID_CHARACTERS or not given.isprintable() or "/" in given:
        raise RequestError(f"request_id must have 1 to {MAX_ID_CHARACTERS} printable characters other than /")
    return f"{prefix}-{given}"


def response_id(chat_id: str, secret: str) -> str:
    """Return the id of the response to the chat chatcmpl-X: resp_X_SECRET. X may be chosen by the caller and is shown
    in logs and traces; without the secret, 32 digits (base 16), others cannot read a stored response."""
    return f"resp_{chat_id.partition('-')[2]}_{secret}"


def submitted_id(answer_id: str) -> str:
    """Return the id under which an answer was submitted: chatcmpl-X for resp_X, with a secret or not, and for msg_X;
    any other id unchanged."""
    kind, _, unique = answer_id.partition("_")
    if kind == "resp":
        unique = _SECRET.sub("", unique)
    return f"chatcmpl-{unique}" if kind in ("resp", "msg") else answer_id


def body_inputs(field: str, prompts: Prompts, limits: PromptLimits, n: int | None = None) -> list[BodyInput]:
    """Return the prompts, after the checks that need no model; RequestError if one fails. `field`: the prompts' field,
    for errors; `n`: answers per prompt."""
    listed = _listed(field, prompts)
    if len(listed) > MAX_PROMPTS:
        raise RequestError(f"{field} holds {len(listed)} prompts, at most {MAX_PROMPTS} are served at once")
    num_answers = n if n and 0 < n <= MAX_CHILDREN else 1  # SamplingParams refuses any other n
    num_tokens = sum(len(each) for each in listed if not isinstance(each, str))
    limits.check_share(len(listed), num_answers, num_tokens)
    return [
        BodyInput(text=check_text(each)) if isinstance(each, str) else BodyInput(token_ids=check_token_ids(each))
        for each in listed
    ]


def prompt_submits(
    request_id: str,
    inputs: Sequence[BodyInput],
    params: SamplingParams,
    add_special_tokens: bool | None,
    pooling: PoolingParams | None = None,
) -> list[Submit]:
    """Return one Submit per prompt, in order."""
    return [
        Submit(
            request_id=request_id if len(inputs) == 1 else f"{request_id}/{position}",
            params=params,
            prompt=each.text if each.token_ids is None else None,
            prompt_token_ids=each.token_ids,
            pooling=pooling,
            media=each.media,
            add_special_tokens=add_special_tokens is not False,
        )
        for position, each in enumerate(inputs)
    ]


def _listed(field: str, prompts: Prompts) -> list[str | list[int]]:
    if isinstance(prompts, str):
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
