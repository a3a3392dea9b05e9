"""frontend → intake process and back, a stream socket: large bodies and long texts in, tokens out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..sampling_params import CutSide
from .base import Message
from .client import ChatForm, ChatMessage


class ReadBody(Message, frozen=True, kw_only=True, tag="read_body"):
    """Decode and check an HTTP body, whose bytes follow, and tokenize what is long of it."""

    body_type: str  # name of the struct that it is decoded as
    max_bytes_per_token: int | None  # as in PromptLimits


class ReadPrompt(Message, frozen=True, kw_only=True, tag="read_prompt"):
    """Tokenize a long prompt. Exactly one of prompt and chat is given."""

    prompt: str | None = None
    chat: list[ChatMessage] | None = None
    chat_form: ChatForm | None = None
    add_special_tokens: bool = True
    cut_side: CutSide | None = None  # of a prompt that may be longer than max_model_len, since this side is cut off
    max_bytes_per_token: int | None = None  # as in PromptLimits


IntakeQuestion: TypeAlias = ReadBody | ReadPrompt


class BodyInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt of an HTTP body, or the tokens to detokenize: text, token ids, or a text with its token ids. Of a chat
    the text is what its answers begin with."""

    text: str | None = None
    token_ids: bytes | None = None
    is_of_chat: bool = False
    is_inside_thought: bool = False  # of a chat's: its text ends inside a <think> block


class BodyRead(Message, frozen=True, kw_only=True, tag="body_read"):
    """Answers ReadBody."""

    rest: bytes  # JSON: the body without its inputs
    inputs: list[BodyInput]  # in their order; of a chat, its prompt
    ignored: list[str]  # unknown fields that it does not have any more


class PromptRead(Message, frozen=True, kw_only=True, tag="prompt_read"):
    """Answers ReadPrompt."""

    token_ids: bytes
    text: str | None = None  # of a chat, unless it is long


class NotRead(Message, frozen=True, kw_only=True, tag="not_read"):
    """Answers either: the caller's body or text is at fault."""

    message: str
    status: int = 400  # of the HTTP answer
    param: str | None = None  # the field that it is about; None: the message begins with it, if any
    code: str | None = None


IntakeAnswer: TypeAlias = BodyRead | PromptRead | NotRead
