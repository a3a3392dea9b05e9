"""Keyword arguments of `generate`, `embed` and others besides prompts and parameters, with their checks.

Names are vLLM's. A keyword of type None is a feature that this engine does not have: only None and {} are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from ...ipc.errors import RequestError
from ...ipc.messages.client import ChatForm
from ...ipc.params.lora_request import LoRARequest
from ...ipc.params.pooling_params import PoolingParams
from ...ipc.params.public_struct import suggestion
from ...ipc.params.sampling_params import SamplingParams

JsonMapping = Mapping[str, object]


class UnservedOptions(TypedDict, total=False):
    """Keywords of features that this engine does not have; only None or {} is accepted."""

    prompt_adapter_request: None
    mm_processor_kwargs: None
    tokenization_kwargs: None
    trace_headers: None
    data_parallel_rank: None


class AdapterOptions(UnservedOptions, total=False):
    """Keywords that choose a LoRA adapter; at most one of them may be given."""

    lora_request: LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts or for each
    model: str | None  # name of a loaded adapter, or of the served model


class PoolOptions(AdapterOptions, total=False):
    """Keywords of `embed`, `classify`, `score` and the other methods that pool, besides prompts and pooling parameters.
    Each means the same as in SamplingParams."""

    truncate_prompt_tokens: int | None
    priority: int
    timeout_s: float | None


class CallOptions(AdapterOptions, total=False):
    """Keywords of `generate` besides prompts and sampling parameters."""

    priority: int | Sequence[int] | None  # for all prompts or for each; None: the priority in SamplingParams


class ChatOptions(CallOptions, total=False):
    """Keywords of `chat` besides messages and sampling parameters."""

    chat_template: str | None  # Jinja, in place of the model's own
    chat_template_content_format: Literal["auto", "string"] | None  # has no effect: templates get content as text
    chat_template_kwargs: JsonMapping | None  # further variables of the template
    tools: Sequence[JsonMapping] | None  # functions in OpenAI's form; calls of strict ones satisfy their schemas
    tool_choice: Literal["none", "auto", "required"] | JsonMapping | None  # as in OpenAI's API; None: auto
    parallel_tool_calls: bool | None  # False: one call at most
    documents: Sequence[JsonMapping] | None
    reasoning_effort: str | None
    add_generation_prompt: bool | None  # None: True unless continue_final_message
    continue_final_message: bool | None  # the completion continues the last message


class TranscribeOptions(CallOptions, total=False):
    """Keywords of `transcribe` besides the audio. Each value holds for all clips."""

    sampling_params: SamplingParams | None  # None: the model's defaults, with temperature 0
    language: str | None  # code or English name of the spoken language; None: unknown
    prompt: str | None  # names and words that may occur
    to_language: str | None  # translate into it
    return_timestamps: bool  # return segments with the model's times


_PARAMETERS = {  # keywords beside the options, by method
    **dict.fromkeys(("generate", "chat"), ("sampling_params", "use_tqdm")),
    **dict.fromkeys(("submit", "stream"), ("sampling_params", "request_id")),
    **dict.fromkeys(("embed", "classify", "score", "reward"), ("pooling_params", "use_tqdm")),
    "encode": ("pooling_params", "pooling_task", "use_tqdm"),
    "rerank": ("top_n", "pooling_params", "use_tqdm"),
    "transcribe": ("use_tqdm",),
}
_TEMPLATE_VARIABLES = ("tools", "documents", "reasoning_effort", "add_generation_prompt")


def check_options(method: str, options: Mapping[str, object], known: type[UnservedOptions]) -> None:
    """Raise TypeError for a keyword that `method` does not have, RequestError for a feature that is not served."""
    for name, value in options.items():
        if name not in known.__annotations__:
            raise TypeError(f"{method}() has no keyword {name!r}{_mend(method, name, known)}")
        if name in UnservedOptions.__annotations__ and value is not None and value != {}:
            raise RequestError(f"{name} is {value!r:.80}: this engine does not serve it, leave it out")


def _mend(method: str, name: str, known: type[UnservedOptions]) -> str:
    """Return a hint for an unknown keyword of a method: the right keyword, or all keywords that the method has."""
    own = _PARAMETERS.get(method, ())
    if name in SamplingParams.__struct_fields__ and "sampling_params" in {*own, *known.__annotations__}:
        return f": it is a sampling parameter, write SamplingParams({name}=…)"
    if name in PoolingParams.__struct_fields__ and "pooling_params" in own:
        return f": it is a pooling parameter, write PoolingParams({name}=…)"
    served = sorted({*known.__annotations__, *own} - UnservedOptions.__annotations__.keys())
    return suggestion(name, served) or f"; it has {', '.join(served)}"


def adapters_of(options: AdapterOptions, num_prompts: int) -> list[LoRARequest | None]:
    """Return the adapter of each prompt; None where no keyword names one. The keyword `model` becomes a LoRARequest,
    even if it is the name of the served model. RequestError if a value is invalid."""
    given, model = options.get("lora_request"), options.get("model")
    if model is not None and (given is not None or not isinstance(model, str)):
        raise RequestError(
            f"model is {model!r:.80}, lora_request {given!r:.80}: give the name of one, or a LoRARequest"
        )
    if model is not None:
        given = LoRARequest(model)
    listed = list(given) if isinstance(given, Sequence) else [given] * num_prompts
    if len(listed) != num_prompts:
        raise RequestError(f"{len(listed)} LoRA requests for {num_prompts} prompts: give one for all, or one each")
    for each in listed:
        if each is not None and not isinstance(each, LoRARequest):
            raise RequestError(f"lora_request is {each!r:.80}: it must be tokenloom.LoRARequest")
    return listed


def with_priority(params: list[SamplingParams], options: CallOptions) -> list[SamplingParams]:
    """Return the parameters with their priorities replaced by the `priority` keyword, if it is given: one integer for
    all prompts, or one for each. RequestError if a list has another length."""
    priority = options.get("priority")
    if priority is None:
        return params
    listed = [priority] * len(params) if isinstance(priority, int) else list(priority)
    if len(listed) != len(params):
        raise RequestError(f"{len(listed)} priorities for {len(params)} prompts: give one for all, or one each")
    return [each.replace(priority=value) for each, value in zip(params, listed, strict=True)]


def pool_params(options: PoolOptions) -> SamplingParams:
    """Return the sampling parameters of a call that pools."""
    return SamplingParams(
        truncate_prompt_tokens=options.get("truncate_prompt_tokens"),
        priority=options.get("priority", 0),
        timeout_s=options.get("timeout_s"),
        max_tokens=1,
    )


def chat_form(options: CallOptions | ChatOptions) -> ChatForm | None:
    """Return the ChatForm for a call's keywords; None if they change nothing. RequestError if a value is invalid."""
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
    variables = {**others, **{name: given[name] for name in _TEMPLATE_VARIABLES if given.get(name) is not None}}
    form = ChatForm(template=template, variables=variables, is_continued=bool(given.get("continue_final_message")))
    return None if form == ChatForm() else form
