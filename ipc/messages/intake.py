"""frontend → intake process and back, a stream socket: large bodies and long texts in, tokens out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..params.sampling_params import CutSide
from .base import Message
from .client import ChatForm, ChatMessage, Medium


class ReadBody(Message, frozen=True, kw_only=True, tag="read_body"):
    """Order to decode and check an HTTP body and to tokenize its long texts. The bytes of the body follow."""

    body_type: str  # name of the struct to decode
    boundary: str = ""  # of a form; empty: the body is JSON
    max_bytes_per_token: int | None  # see PromptLimits


class ReadPrompt(Message, frozen=True, kw_only=True, tag="read_prompt"):
    """Order to tokenize a prompt. Exactly one of prompt, token_ids and chat is set; token_ids stay in the frontend."""

    prompt: str | None = None
    token_ids: bytes | None = None
    chat: list[ChatMessage] | None = None
    chat_form: ChatForm | None = None
    add_special_tokens: bool = True
    cut_side: CutSide | None = None  # truncate a prompt above max_model_len on this side
    max_bytes_per_token: int | None = None  # see PromptLimits


IntakeQuestion: TypeAlias = ReadBody | ReadPrompt


class BodyInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt of an HTTP body, or tokens to detokenize: text, token ids, or both.

    With a chat `text` is the beginning of its answers.
    """

    text: str | None = None
    token_ids: bytes | None = None
    is_of_chat: bool = False
    is_inside_thought: bool = False  # the chat's prompt ends inside a <think> block
    media: list[Medium] = []  # of a chat: `token_ids` has a marker for each; or the file of a form


class BodyRead(Message, frozen=True, kw_only=True, tag="body_read"):
    """Reply to ReadBody."""

    rest: bytes  # JSON: the body without its inputs
    inputs: list[BodyInput]  # in order; a chat has one, its prompt
    ignored: list[str]  # unknown fields, removed from `rest`


class PromptRead(Message, frozen=True, kw_only=True, tag="prompt_read"):
    """Reply to ReadPrompt."""

    token_ids: bytes
    text: str | None = None  # the rendered chat, unless it is long


class NotRead(Message, frozen=True, kw_only=True, tag="not_read"):
    """Reply to ReadBody or ReadPrompt: the caller's body or text is invalid."""

    message: str
    status: int = 400  # of the HTTP response
    param: str | None = None  # the invalid field; None: the message begins with its name, if any
    code: str | None = None


IntakeAnswer: TypeAlias = BodyRead | PromptRead | NotRead
