"""Messages between a frontend and its intake process, over a stream socket: the frontend sends large HTTP bodies and
long texts, the intake process replies with tokens."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..params.sampling_params import CutSide
from .base import Message
from .client import ChatField, ChatForm, ChatMessage, Medium


class ReadBody(Message, frozen=True, kw_only=True, tag="read_body"):
    """Order to decode and check an HTTP body and to tokenize its long texts. The bytes of the body follow."""

    body_type: str  # name of the struct that the body is decoded to
    boundary: str = ""  # boundary of a multipart form; empty: the body is JSON
    max_bytes_per_token: int | None  # see PromptLimits
    now: float = 0.0  # as in ReadPrompt


class ReadPrompt(Message, frozen=True, kw_only=True, tag="read_prompt"):
    """Order to tokenize a prompt. Exactly one of prompt, token_ids and chat is set. With token_ids the order is
    not sent: the frontend carries it out itself."""

    prompt: str | None = None
    token_ids: bytes | None = None
    chat: list[ChatMessage] | None = None
    chat_form: ChatForm | None = None
    add_special_tokens: bool = True
    cut_side: CutSide | None = None  # truncate a prompt above max_model_len on this side
    text_pair: str | None = None  # the second text of a pair; `prompt` is the first
    num_kept: int | None = None  # of a pair: its tokens after truncation at cut_side, at most
    max_bytes_per_token: int | None = None  # see PromptLimits
    now: float = 0.0  # the time for the chat template, unix seconds; 0: that of the rendering


class LearnForm(Message, frozen=True, kw_only=True, tag="learn_form"):
    """Order to find the form of answers of a chat template."""

    template: str
    is_of_model: bool = False  # otherwise it is of a request
    max_bytes_per_token: int | None = None  # see PromptLimits


class CheckBatch(Message, frozen=True, kw_only=True, tag="check_batch"):
    """Order to check the next lines of a batch's input file."""

    path: str
    offset: int  # of the first line to check
    number: int  # of that line, from 1
    endpoint: str  # that every line must name
    max_line_bytes: int


IntakeQuestion: TypeAlias = ReadBody | ReadPrompt | LearnForm | CheckBatch


class BodyInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt of an HTTP body, or tokens to detokenize: text, token ids, or both.

    For a chat, `text` is the start of its answers.
    """

    text: str | None = None
    token_ids: bytes | None = None
    is_of_chat: bool = False
    is_inside_thought: bool = False  # the chat's prompt ends inside a <think> block
    media: list[Medium] = []  # media of a chat, each with a marker in `token_ids`; or the file of a form
    chat_fields: list[ChatField] = []


class BodyRead(Message, frozen=True, kw_only=True, tag="body_read"):
    """Reply to ReadBody: the body's fields, and its texts as tokens."""

    rest: bytes  # JSON: the body without its inputs
    inputs: list[BodyInput]  # in the body's order; a chat has one, its prompt
    ignored: list[str]  # unknown fields, removed from `rest`


class PromptRead(Message, frozen=True, kw_only=True, tag="prompt_read"):
    """Reply to ReadPrompt: the prompt's tokens."""

    token_ids: bytes
    text: str | None = None  # the rendered chat; None if it is long
    first_type_tokens: int | None = None  # as in PoolingParams


class FormLearned(Message, frozen=True, kw_only=True, tag="form_learned"):
    """Reply to LearnForm."""

    choice: bytes  # JSON: the form, and what became of the probes


class FoundLine(msgspec.Struct, frozen=True, array_like=True):
    """A request in a batch's input file."""

    number: int  # of the line, from 1
    offset: int  # of the request's body in the file
    length: int
    custom_id: str


class FoundFault(msgspec.Struct, frozen=True, array_like=True):
    """Why a line of a batch's input file cannot be run, in OpenAI's form."""

    number: int
    code: str
    message: str
    param: str | None = None


class BatchChecked(Message, frozen=True, kw_only=True, tag="batch_checked"):
    """Reply to CheckBatch: some lines, in the order of the file."""

    lines: list[FoundLine]
    faults: list[FoundFault]
    offset: int  # of the next line to check
    number: int  # of that line
    is_end: bool  # the file has no more lines


class NotRead(Message, frozen=True, kw_only=True, tag="not_read"):
    """Reply to an order that failed: the body or text is invalid (status 4xx), or the process is short
    of something (503)."""

    message: str
    status: int = 400  # of the HTTP response
    param: str | None = None  # the invalid field; None: `message` begins with its name, if a field is invalid
    code: str | None = None


IntakeAnswer: TypeAlias = BodyRead | PromptRead | FormLearned | BatchChecked | NotRead
