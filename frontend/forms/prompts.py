"""Convert prompts, in all their forms, to Submit messages.

A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the dicts may also have "cache_salt" and
vLLM's "multi_modal_data" and "multi_modal_uuids". It may also be vLLM's pair of an "encoder_prompt" with media and a
"decoder_prompt". A chat is a list of messages. Forms and sizes are checked here, before a message is sent; the engine
checks what depends on its model and options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import msgspec

from ...ipc.codec import encode_ids
from ...ipc.errors import RequestError
from ...ipc.messages.client import ChatForm, ChatMessage, ContentPart, Medium, Submit, TextPart
from ...ipc.params.pooling_params import PoolingParams, PoolingTask
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.sockets.zmq_sockets import MAX_CLIENT_MESSAGE_BYTES
from .media.given_media import PART_KINDS, GivenMedia, is_number

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object]
Turn: TypeAlias = ChatMessage | Mapping[str, object]  # {"role": …, "content": …} and further fields for the template
Chat: TypeAlias = Sequence[Turn]

MAX_REQUEST_ID_CHARACTERS = 256  # limited since every delta repeats the id
MAX_PROMPT_BYTES = MAX_CLIENT_MESSAGE_BYTES - (1 << 20)  # space for the other fields and the tokens of a resubmission
_IDS = "prompt_token_ids"
_MEDIA = ("multi_modal_data", "multi_modal_uuids")
_OPTIONS = ("cache_salt", *_MEDIA, "mm_processor_kwargs")  # optional keys of a prompt that is a dict
_FORMS = "a prompt is text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


class CheckedChat(NamedTuple):
    """The messages of a conversation, and the media that their parts name by index."""

    turns: list[ChatMessage]
    media: list[Medium]


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list. An empty list means no prompts, a list whose first item is an integer means
    one prompt. RequestError unless it is text, a dict or an iterable other than bytes."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        raise RequestError(f"prompts is {_type_name(prompts)}: {_FORMS}, or a list of these")
    items: list[object] = list(prompts.tolist() if hasattr(prompts, "tolist") else prompts)
    if items and _is_integer(items[0]):
        return [items]  # type: ignore[list-item]  # check_token_ids checks each id
    return items  # type: ignore[return-value]  # new_submit checks each prompt


def list_chats(messages: Chat | Sequence[Chat]) -> list[Chat]:
    """Return one conversation or many as a list of conversations; RequestError unless it is a list."""
    if isinstance(messages, (str, Mapping, ChatMessage)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is {_type_name(messages)}: a chat is a list of {{'role': …, 'content': …}}, or a list of chats"
        )
    return [messages] if is_chat(messages) else list(messages)  # type: ignore[arg-type]


def list_clips(audio: object) -> list[object]:
    """Return one audio clip or many as a list. A tuple (samples, rate) is one clip, any other list or tuple is many."""
    is_pair = isinstance(audio, tuple) and len(audio) == 2 and is_number(audio[1])
    return [*audio] if isinstance(audio, list | tuple) and not is_pair else [audio]


def list_params(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """Return checked parameters for each prompt. `params`: one for all prompts, one each, or None for the defaults.
    RequestError if their number is another, or a value is invalid."""
    if params is None or isinstance(params, SamplingParams):
        return [check_params(params)] * num_prompts
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        raise RequestError(f"sampling_params is {_type_name(params)}: give one SamplingParams, or a list of one each")
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} SamplingParams for {num_prompts} prompts: give one for all, or one each")
    return [check_params(each) for each in params]


def check_params(params: SamplingParams | None) -> SamplingParams:
    """Return a checked copy of `params`, or the defaults for None; RequestError if a value is invalid."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {_type_name(params)}: it must be tokenloom.SamplingParams")
    params = params.checked()
    for string in (*params.stop_strings, params.cache_salt or ""):
        _check_encodable("stop or cache_salt", string)
    return params


def check_pooling(params: PoolingParams | None, task: PoolingTask | None) -> PoolingParams:
    """Return `params`, or the defaults for None, with `task` if that is given; RequestError for another type, or if
    the parameters have another task."""
    if not isinstance(params, PoolingParams | None):
        raise RequestError(f"pooling_params is {_type_name(params)}: it must be tokenloom.PoolingParams")
    params = params or PoolingParams()
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise RequestError(f"pooling_params has task {params.task}, the call is for {task}: leave it out")
    return msgspec.structs.replace(params, task=task)


def list_pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of texts to score: one text with each of many, or two lists of equal length item by item.
    RequestError for other forms."""
    first, second = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
    if not first or not second:
        raise RequestError("a list of texts to score is empty: give at least one on each side")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError(f"{len(first)} and {len(second)} texts make no pairs: give one first text, or equally many")
    for text in (*first, *second):
        if not isinstance(text, str):
            raise RequestError(f"a text to score is {_type_name(text)}: it must be a str")
        check_text(text)
    return list(zip(first, second, strict=True))


def distinct_texts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return each text of the pairs once, in the order of its first place: a model that embeds reads it once."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def new_submit(
    request_id: str,
    prompt: Prompt | Chat | CheckedChat,
    params: SamplingParams,
    pooling: PoolingParams | None = None,
    form: ChatForm | None = None,
) -> Submit:
    """Return the Submit for a prompt or a chat. `form`: how the chat is rendered; `pooling`: return a vector instead of
    tokens. RequestError if the id or the prompt is invalid."""
    check_request_id(request_id)
    if isinstance(prompt, CheckedChat) or is_chat(prompt):
        turns, media = prompt if isinstance(prompt, CheckedChat) else read_chat(prompt)
        return Submit(request_id=request_id, params=params, chat=turns, chat_form=form, pooling=pooling, media=media)
    content: object = prompt
    given = GivenMedia()
    if isinstance(prompt, Mapping):
        prompt = _joined(prompt)
        content = _unwrap(prompt)
        if (salt := prompt.get("cache_salt")) is not None:
            params = check_params(params.replace(cache_salt=salt))
        if prompt.get("mm_processor_kwargs"):
            raise RequestError("mm_processor_kwargs are those of the engine: start it with --mm-processor-kwargs")
        given.add_data(prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"))
    text, token_ids = None, None
    if isinstance(content, str):
        text = check_text(content)
    else:
        token_ids = check_token_ids(content)
    return Submit(
        request_id=request_id,
        params=params,
        prompt=text,
        prompt_token_ids=token_ids,
        pooling=pooling,
        media=given.media,
    )


def check_request_id(request_id: object) -> None:
    """Raise RequestError if `request_id` is not a string, is empty or too long."""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_REQUEST_ID_CHARACTERS:
        most = MAX_REQUEST_ID_CHARACTERS
        raise RequestError(f"request_id is {request_id!r:.80}: it must be text and must have 1 to {most} characters")


def id_is_open(request_id: str) -> RequestError:
    """Return the error for a request_id that another open request has; the caller has checked that."""
    return RequestError(f"request_id {request_id} is open already: choose another")


def check_text(text: str) -> str:
    """Return `text` unchanged; RequestError if it has a lone surrogate or exceeds MAX_PROMPT_BYTES. It may be empty:
    many tokenizers put a token before every text."""
    _check_encodable("the prompt", text)
    return text


def check_token_ids(ids: object) -> bytes:
    """Return token ids, given as a list, a numpy array or a tensor, as int32 bytes. RequestError if there are none or
    too many, or one is not an integer from 0 to 2^31 - 1."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
        raise RequestError(f"a prompt is {_type_name(ids)}: {_FORMS}")
    listed = list(ids)
    if not listed:
        raise RequestError("the prompt has no tokens: give at least one")
    if len(listed) > MAX_PROMPT_BYTES // 4:
        raise RequestError(f"the prompt has {len(listed)} tokens, at most {MAX_PROMPT_BYTES // 4} can be sent")
    try:
        frame = encode_ids(listed)
    except (TypeError, OverflowError):
        bad = next((item for item in listed if not _is_integer(item) or not -(2**31) <= item < 2**31), None)
        raise RequestError(f"a prompt holds {bad!r:.80}, which is not a token id: {_FORMS}") from None
    if min(listed) < 0:
        raise RequestError(f"a prompt holds token id {min(listed)}, which is out of vocabulary: ids begin at 0")
    return frame


def is_chat(prompt: object) -> TypeGuard[Chat]:
    """Return whether `prompt` is a sequence, other than str, with a chat message as its first item: a ChatMessage, or a
    mapping with a role. The other items are not checked."""
    if isinstance(prompt, (str, Mapping)) or not isinstance(prompt, Sequence) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first, ChatMessage) or (isinstance(first, Mapping) and "role" in first)


def check_chat(messages: Chat) -> list[ChatMessage]:
    """Return the messages of a conversation as ChatMessages. RequestError if it has no message, an invalid one, or
    media."""
    turns, media = read_chat(messages)
    if media:
        raise RequestError(f"the chat has {len(media)} media, only text is taken here: leave them out")
    return turns


def read_chat(messages: Chat) -> CheckedChat:
    """Return the messages of a conversation as ChatMessages, and its media. RequestError if there is no message, one
    is invalid (it needs a role, and content or tool calls), or a medium cannot be read."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("a chat must be a list of at least one message {'role': …, 'content': …}")
    given = GivenMedia()
    return CheckedChat([_check_turn(position, turn, given) for position, turn in enumerate(messages)], given.media)


def _check_turn(position: int, turn: Turn, given: GivenMedia) -> ChatMessage:
    if isinstance(turn, ChatMessage):
        role: object = turn.role
        content: object = turn.content
        more = turn.more
    elif isinstance(turn, Mapping) and "role" in turn and ("content" in turn or turn.get("tool_calls")):
        role, content = turn["role"], turn.get("content")
        more = {str(name): value for name, value in turn.items() if name not in ("role", "content") and value}
    else:
        raise RequestError(f"message {position} of the chat must be {{'role': …, 'content': …}}, got {turn!r:.80}")
    if given_calls := more.get("tool_calls"):
        calls = given_calls if isinstance(given_calls, list) else [given_calls]
        more = more | {"tool_calls": calls}
        for call in calls:
            _check_call(position, call)
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = [_part(position, part, given) for part in content]
    if not isinstance(role, str) or not isinstance(content, str | list | None) or (content is None and not given_calls):
        raise RequestError(f"message {position} of the chat needs text for role and content, got {turn!r:.80}")
    message = ChatMessage(role, content, more)
    _check_encodable(f"message {position} of the chat", role + message.text)
    return message


def _check_call(position: int, call: object) -> None:
    """Raise RequestError if a tool call's arguments are a text that is not JSON: templates may expect an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        msgspec.json.decode(text or "{}" if isinstance(text, str) else "{}")
    except (msgspec.DecodeError, RecursionError):
        where = f"message {position} of the chat"
        raise RequestError(f"{where} has a tool call whose arguments are not JSON: {text!r:.80}") from None


def _part(position: int, part: object, given: GivenMedia) -> ContentPart:
    if isinstance(part, ContentPart):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return TextPart(str(part["text"]))
    where = f"message {position} of the chat"
    if isinstance(part, Mapping) and part.get("type") in PART_KINDS:
        return given.add_part(where, part)
    kind = f"of type {part.get('type')!r:.40}" if isinstance(part, Mapping) else f"{part!r:.80}"
    raise RequestError(f"{where} holds a part {kind}: only text and {', '.join(PART_KINDS)} are served")


def _joined(prompt: Mapping[str, object]) -> Mapping[str, object]:
    """Return {"encoder_prompt": …, "decoder_prompt": …} as one prompt: the decoder's text with the encoder's media.
    Return other prompts unchanged. RequestError if the encoder's has text or token ids, or the decoder's has media."""
    if "encoder_prompt" not in prompt:
        return prompt
    encoder, decoder = prompt["encoder_prompt"], prompt.get("decoder_prompt")
    others = prompt.keys() - {"encoder_prompt", "decoder_prompt", "cache_salt"}
    own = decoder if isinstance(decoder, Mapping) else {"prompt" if isinstance(decoder, str) else _IDS: decoder}
    if others or not isinstance(encoder, Mapping) or encoder.get("prompt") or encoder.get(_IDS) or _has_media(own):
        raise RequestError(
            "encoder_prompt must be {'multi_modal_data': …} without text, and beside it there is a decoder_prompt with "
            "none: " + _FORMS
        )
    outer = {name: value for name, value in prompt.items() if name == "cache_salt"}
    return {**own, **{name: encoder.get(name) for name in _MEDIA}, **outer}


def _has_media(prompt: Mapping[str, object]) -> bool:
    return any(prompt.get(name) for name in _MEDIA)


def _unwrap(prompt: Mapping[str, object]) -> object:
    """Return the text of {"prompt": …} or the ids of {"prompt_token_ids": …}; RequestError for other dicts."""
    given = {name for name, value in prompt.items() if value is not None and name not in _OPTIONS}
    for name, is_text in (("prompt", True), ("prompt_token_ids", False)):
        if given == {name} and isinstance(prompt[name], str) == is_text:
            return prompt[name]
    described = ", ".join(f"{name}: {type(value).__name__}" for name, value in prompt.items())
    raise RequestError(f"a prompt is a dict of {{{described}}}: {_FORMS}")


def _check_encodable(name: str, text: str) -> None:
    try:
        num_bytes = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} holds a lone surrogate at character {error.start}: give valid Unicode") from None
    if num_bytes > MAX_PROMPT_BYTES:
        raise RequestError(f"{name} has {num_bytes} bytes, at most {MAX_PROMPT_BYTES} can be sent")


def _is_integer(value: object) -> TypeGuard[int]:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _type_name(value: object) -> str:
    return f"of type {type(value).__name__}"
