"""BodyPacker: reduces a large parsed body, so that the frontend's loop decodes it within milliseconds.

Runs in the intake process. Prompts are taken out of the body: long texts and chats become token ids, and token ids
become bytes; texts to score, or to embed for Cohere, stay texts. Of the others, a text that cannot fit the model is
refused, unless it is truncated. The rest of the body is bounded in bytes and in values. A body of at most SMALL_BYTES
is always within these bounds, so the frontend does not check them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ....ipc.codec import num_ids
from ....ipc.messages.intake import BodyInput, BodyRead, ReadPrompt
from ....ipc.params.sampling_params import CutSide
from ...forms.anthropic.request_body import CountTokensRequest, MessagesRequest, tokenize_request
from ...forms.anthropic.request_body import chat_request as chat_of_messages
from ...forms.media.held_medium import HeldMedium
from ...forms.media.media_sender import held_media
from ...forms.media_limits import MediaLimits
from ...forms.ollama.request_body import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from ...forms.openai.embedding_body import (
    CohereEmbedRequest,
    EmbeddingRequest,
    GenerativeScoringRequest,
    PooledInput,
)
from ...forms.openai.generation import Body, Scheduled
from ...forms.openai.messages import chat_input
from ...forms.openai.params import errors_about
from ...forms.openai.response_body import ResponsesRequest, chat_request, without_input
from ...forms.openai.schema import BatchChatRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ...forms.openai.transcription_body import Form, TranscriptionRequest, TranslationRequest
from ...forms.pooling.pooling_body import ClassificationRequest, PoolingRequest, ScoreRequest
from ...forms.pooling.rerank_body import RerankRequest
from ...forms.pooling.tei_body import TeiEmbedRequest
from ...forms.prompt_limits import PromptLimits
from .body_error import BodyError
from .body_parser import ParsedBody

if TYPE_CHECKING:
    from ..prompts.input_processor import InputProcessor

LONG_CHARACTERS = 64 << 10  # longer texts are tokenized here
MAX_VALUES = 64 << 10  # numbers, texts, lists and objects beside the prompts: 20 ms of the loop
MAX_REST_BYTES = 8 << 20  # of JSON beside the prompts: 10 ms of the loop
_EMPTIED: dict[type[Body], dict[str, object]] = {  # empty values of the fields with prompts
    ChatRequest: {"messages": []},
    MessagesRequest: {"messages": [], "system": None},
    CountTokensRequest: {"messages": [], "system": None},
    CohereEmbedRequest: {"texts": []},
    CompletionRequest: {"prompt": ""},
    DetokenizeRequest: {"tokens": []},
    GenerativeScoringRequest: {"query": "", "items": []},
    OllamaChatRequest: {"messages": []},
    OllamaEmbedRequest: {"input": ""},
    OllamaEmbeddingsRequest: {"prompt": ""},
    OllamaGenerateRequest: {"prompt": "", "system": None, "images": None},
    TokenizeRequest: {"prompt": None, "messages": None},
    TranscriptionRequest: {},  # their files are not in the struct
    TranslationRequest: {},
    TeiEmbedRequest: {"inputs": ""},
    BatchChatRequest: {},  # these depend on the body
    EmbeddingRequest: {},
    PoolingRequest: {},
    ClassificationRequest: {},
    ScoreRequest: {},
    RerankRequest: {},
    ResponsesRequest: {},
}
LARGE_TYPES: dict[str, type[Body]] = {each.__name__: each for each in _EMPTIED}


class BodyPacker:
    """Packer of HTTP request bodies for one model: it separates a body's prompts, long ones as token ids, from the
    rest. `new_inputs` returns the InputProcessor, which loads the tokenizer; it is called only for text to tokenize."""

    def __init__(
        self,
        limits: PromptLimits,
        media_limits: MediaLimits,
        new_inputs: Callable[[], InputProcessor],
        keep: Callable[[HeldMedium], None],
        now: float = 0.0,
    ) -> None:
        """`keep` puts the bytes of a medium where the frontend finds them. `now`: as in ReadPrompt."""
        self._limits, self._media_limits = limits, media_limits
        self._new_inputs, self._keep, self._now = new_inputs, keep, now

    def pack(self, parsed: ParsedBody[Body]) -> BodyRead:
        """Separate a body into its prompts, tokenized except short texts, and the rest.

        RequestError if a prompt is too long for the model and is not truncated, or if the rest is too large for the
        loop.
        """
        body = parsed.body
        rest = _rest(body)
        if isinstance(body, ResponsesRequest):
            is_part = body.previous_response_id is not None  # packed later, joined with the stored response
            inputs = [] if is_part else [self._chat(chat_request(body), body)]
        elif isinstance(body, Form):
            inputs = parsed.inputs
            for medium in held_media(medium for each in inputs for medium in each.media):
                with errors_about("file: ", ""):
                    self._media_limits.check_bytes(len(medium.data))
                self._keep(medium)
        elif isinstance(body, CohereEmbedRequest | GenerativeScoringRequest | ScoreRequest | RerankRequest):
            inputs = parsed.inputs  # remain texts; the frontend tokenizes them
        elif isinstance(body, BatchChatRequest):
            inputs = [self._chat(each, body) for each in body.chats]
        elif isinstance(body, PooledInput) and body.messages is not None:
            inputs = [self._chat(body.chat, body)]
        elif isinstance(body, CountTokensRequest):
            inner = chat_of_messages(body) if isinstance(body, MessagesRequest) else tokenize_request(body)
            inputs = [self._chat(inner, inner)]
        elif isinstance(body, OllamaChatRequest) or (isinstance(body, OllamaGenerateRequest) and not body.raw):
            inputs = [self._chat(body.chat, body.chat)]
        elif isinstance(body, ChatRequest) or (isinstance(body, TokenizeRequest) and body.messages is not None):
            inputs = [self._chat(body, body)]
        else:
            inputs = [self._input(each, body) for each in parsed.inputs]
        return BodyRead(rest=rest, inputs=inputs, ignored=list(parsed.ignored))

    def _chat(self, of_body: ChatRequest | TokenizeRequest, body: Body) -> BodyInput:
        """Tokenize a body's chat. Of the rendered text only one fact is kept: whether it ends inside reasoning."""
        cut_side = self._cut_side(body)
        chat, inputs = chat_input(of_body, self._media_limits), self._new_inputs()
        inputs.check_template(chat.form)
        question = ReadPrompt(chat=chat.turns, chat_form=chat.form, cut_side=cut_side, now=self._now)
        prompt = inputs.tokenize(question)
        for medium in held_media(chat.media):
            self._keep(medium)
        return chat.prompt(self._fitting(prompt.token_ids, cut_side, body), prompt.text)

    def _input(self, given: BodyInput, body: Body) -> BodyInput:
        cut_side = self._cut_side(body)
        token_ids, text = given.token_ids, given.text
        if text is not None:
            if cut_side is None:
                self._limits.check_text(text)
            if len(text) <= LONG_CHARACTERS:
                return given
            adds = getattr(body, "add_special_tokens", None) is not False
            token_ids = self._new_inputs().encode(text, adds, cut_side=cut_side).token_ids
        assert token_ids is not None
        token_ids = self._fitting(token_ids, cut_side, body)
        return BodyInput(text=text if getattr(body, "echo", None) else None, token_ids=token_ids)

    def _cut_side(self, body: Body) -> CutSide | None:
        if not isinstance(body, Scheduled):
            return None
        return self._limits.cut_side(body.truncate_prompt_tokens, body.truncation_side)

    def _fitting(self, token_ids: bytes, cut_side: CutSide | None, body: Body) -> bytes:
        """Return the tokens that a truncation may keep. Without a truncation, return all; RequestError if they do not
        fit."""
        if cut_side is None and isinstance(body, Scheduled):
            self._limits.check_length(num_ids(token_ids), is_answered=not isinstance(body, PooledInput))
        return self._limits.kept(token_ids, cut_side)


def _rest(body: Body) -> bytes:
    """Encode the body without its prompts as JSON; BodyError if it has too many values or bytes."""
    if isinstance(body, BatchChatRequest):
        bare: Body = msgspec.structs.replace(body, messages=[[] for _ in body.messages])
    elif isinstance(body, ScoreRequest):
        bare = msgspec.structs.replace(body, **{body.names[1]: ""})
    elif isinstance(body, RerankRequest):
        bare = msgspec.structs.replace(body, documents=body.documents and [], texts=body.texts and [])
    elif isinstance(body, PooledInput):
        bare = msgspec.structs.replace(body, input=body.input and "", messages=body.messages and [])
    elif isinstance(body, ResponsesRequest):
        bare = without_input(body)
    else:
        bare = msgspec.structs.replace(body, **_EMPTIED[type(body)])
    field, num_values = _num_values(bare)
    if num_values > MAX_VALUES:
        raise BodyError(
            f"{field} and the fields before it hold over {MAX_VALUES} values beside the prompts: send fewer",
            param=field,
        )
    rest = msgspec.json.encode(bare)
    if len(rest) > MAX_REST_BYTES:
        sizes = {name: len(msgspec.json.encode(getattr(bare, name))) for name in bare.__struct_fields__}
        field = max(sizes, key=sizes.__getitem__)
        raise BodyError(
            f"{field} has {sizes[field]} bytes, and all fields beside the prompts may have {MAX_REST_BYTES}: send less",
            param=field,
        )
    return rest


def _num_values(body: Body) -> tuple[str, int]:
    """Return the last field counted and the number of values up to it; counting stops soon after MAX_VALUES."""
    num_values, name = 0, ""
    for name in body.__struct_fields__:
        stack: list[object] = [value for value in (getattr(body, name),) if value is not None]
        while stack and num_values <= MAX_VALUES:
            value = stack.pop()
            num_values += 1
            if isinstance(value, msgspec.Struct):
                stack.extend(getattr(value, each) for each in value.__struct_fields__)
            elif isinstance(value, dict):
                stack.extend(value.values())
            elif isinstance(value, list):
                stack.extend(value)
        if num_values > MAX_VALUES:
            break
    return name, num_values
