"""The keywords of `generate`, `chat` and `embed` beside prompts and parameters, checked in one place for all clients.

Names are vLLM's. Those that can only be None ask for what no engine of ours serves, and are there so that programs
which name them run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from ...ipc.errors import RequestError
from ...ipc.messages.client import ChatForm
from ...ipc.sampling_params import SamplingParams

JsonMapping = Mapping[str, object]


class UnservedOptions(TypedDict, total=False):
    """None, or as good as none."""

    lora_request: None
    prompt_adapter_request: None
    mm_processor_kwargs: None
    tokenization_kwargs: None
    trace_headers: None
    data_parallel_rank: None


class CallOptions(UnservedOptions, total=False):
    """Keywords of `generate`."""

    priority: int | Sequence[int] | None  # one for all prompts or one each; None: as in their SamplingParams


class ChatOptions(CallOptions, total=False):
    """Keywords of `chat`."""

    chat_template: str | None  # Jinja, in place of the model's own
    chat_template_content_format: Literal["auto", "string"] | None  # templates get texts
    chat_template_kwargs: JsonMapping | None  # what else the template may use
    tools: Sequence[JsonMapping] | None  # functions in OpenAI's form
    documents: Sequence[JsonMapping] | None
    reasoning_effort: str | None
    add_generation_prompt: bool | None  # None: unless the last turn is continued
    continue_final_message: bool | None  # the answer goes on with the text of the last turn


_PASSED = ("tools", "documents", "reasoning_effort", "add_generation_prompt")  # to the template, by these names


def check_options(method: str, options: Mapping[str, object], known: type[UnservedOptions]) -> None:
    """TypeError for a keyword that `method` does not have, RequestError for one that asks for what is not served."""
    for name, value in options.items():
        if name not in known.__annotations__:
            raise TypeError(f"{method}() has no keyword {name!r}; it has {', '.join(sorted(known.__annotations__))}")
        if name in UnservedOptions.__annotations__ and value is not None and value != {}:
            raise RequestError(f"{name} is {value!r:.80}: this engine does not serve it, leave it out")


def with_priority(params: list[SamplingParams], options: CallOptions) -> list[SamplingParams]:
    """The parameters of each prompt with the priority that was given beside them, if any."""
    priority = options.get("priority")
    if priority is None:
        return params
    listed = [priority] * len(params) if isinstance(priority, int) else list(priority)
    if len(listed) != len(params):
        raise RequestError(f"{len(listed)} priorities for {len(params)} prompts: give one for all, or one each")
    return [each.replace(priority=value) for each, value in zip(params, listed, strict=True)]


def chat_form(options: CallOptions | ChatOptions) -> ChatForm | None:
    """How the chats of a call become prompts; None for the model's own way."""
    given: JsonMapping = options
    content_format, template = given.get("chat_template_content_format"), given.get("chat_template")
    if content_format not in (None, "auto", "string"):
        raise RequestError(f"chat_template_content_format is {content_format!r:.40}: it must be auto or string")
    if not isinstance(template, str | None):
        raise RequestError(f"chat_template must be the template's text, got {template!r:.80}")
    others = given.get("chat_template_kwargs") or {}
    if not isinstance(others, Mapping):
        raise RequestError(f"chat_template_kwargs must be a dict, got {others!r:.80}")
    if taken := sorted(others.keys() & {"messages", "tools", "documents", "add_generation_prompt"}):
        raise RequestError(f"chat_template_kwargs holds {', '.join(taken)}: use the keywords of chat()")
    variables = {**others, **{name: given[name] for name in _PASSED if given.get(name) is not None}}
    form = ChatForm(template=template, variables=variables, is_continued=bool(given.get("continue_final_message")))
    return None if form == ChatForm() else form
