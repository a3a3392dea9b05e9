"""`engine-launch explain FILE [FILE]`: shows where the prompts of two request bodies part, without an engine."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...ipc.codec import JsonObject, decode_ids, encode_ids
from ...ipc.errors import ConfigError, RequestError
from ...ipc.messages.client import Submit
from ...ipc.params.sampling_params import SamplingParams
from ..checkpoint.gguf.folder import add_tokenizer
from ..checkpoint.resolve import find_checkpoint
from .models.hub_options import FORMS, add_hub_options, hub_config

if TYPE_CHECKING:
    from ..server.text.chat_template import ChatTemplate
    from ..server.text.tokenizer import Tokenizer

DESCRIPTION = (
    "Compare the prompts of two request bodies (JSON files, or one file with a body a line): render them with the\n"
    "model's chat template, and show the first token that differs, the field in which it lies, and how many tokens\n"
    "behind it stand in both, which no prefix cache finds. Bodies are those of chats, completions, responses or\n"
    "Anthropic's messages. The exit code is 0 if one prompt continues the other, else 3."
)
EXAMPLES = ["--model Qwen/Qwen3-0.6B first.json second.json", "--model ./model.gguf two_bodies.jsonl"]
PARTED = 3  # exit code
SHOWN = 60  # characters on each side of the difference
MANY = 1 << 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="a body each, or one with two lines")
    parser.add_argument("--model", metavar="MODEL", help=f"a folder, a GGUF file, {FORMS} (default: the first body's)")
    parser.add_argument("--revision", metavar="NAME", help="a branch, tag or commit (default: the main branch)")
    parser.add_argument("--block-size", metavar="N", type=int, default=16, help="tokens of a block (default: 16)")
    add_hub_options(parser)


class Rendered(NamedTuple):
    """A body's prompt, and the Submit that has its fields."""

    token_ids: list[int]
    submit: Submit


def run(arguments: argparse.Namespace) -> int:
    from ..server.reuse.difference import place_of
    from ..server.reuse.moved_tokens import moved_tokens, num_common
    from ..server.reuse.seen_prompts import SeenPrompts
    from ..server.text.chat_template import ChatTemplate
    from ..server.text.tokenizer import Tokenizer

    raws = _bodies(arguments.files)
    model = arguments.model or msgspec.json.decode(raws[0], type=dict).get("model")
    if not isinstance(model, str):
        raise ConfigError("the first body names no model: name one with --model")
    config = hub_config(arguments)
    with tempfile.TemporaryDirectory() as spare:
        folder = find_checkpoint(model, arguments.revision, "--tokenizer", config, Path(spare))
        folder = add_tokenizer(folder, Path(spare))
        tokenizer = Tokenizer.load(folder, False)
        if tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer: name another --model")
        template = ChatTemplate.load(folder, tokenizer, config)
        one, other = (_rendered(raw, template, tokenizer) for raw in raws)
    memory = SeenPrompts()
    earlier, _ = memory.visit("", one.submit, encode_ids(one.token_ids))
    later, _ = memory.visit("", other.submit, encode_ids(other.token_ids))
    first = num_common(earlier.token_ids, later.token_ids)
    num_found = first // arguments.block_size * arguments.block_size
    print(f"{len(one.token_ids)} and {len(other.token_ids)} tokens, the first {first} are equal: {num_found} in blocks")
    if first == min(len(one.token_ids), len(other.token_ids)):
        print("one prompt continues the other")
        return 0
    moved = moved_tokens(earlier.token_ids, later.token_ids, first)
    kind, field = place_of(earlier, later, first, is_cut=moved.is_cut)
    print(f"they part at token {first}, in {field} ({kind}); {moved.num_tokens} tokens behind it stand in both")
    before = tokenizer.decode(one.token_ids[:first][-SHOWN:], skip_special_tokens=False)
    print(f"  both  …{before[-SHOWN:]!r}")
    for name, prompt in (("first", one), ("second", other)):
        text = tokenizer.decode(prompt.token_ids[first : first + SHOWN], skip_special_tokens=False)
        print(f"  {name:6} {text[:SHOWN]!r}")
    return PARTED


def _bodies(files: list[Path]) -> list[bytes]:
    """Return the two bodies."""
    raws = [path.read_bytes() for path in files]
    if len(raws) == 1:
        raws = [line for line in raws[0].splitlines() if line.strip()]
    if len(raws) != 2:
        raise ConfigError(f"{len(raws)} bodies are given, two are compared: name two files, or one with two lines")
    return raws


def _rendered(raw: bytes, template: ChatTemplate | None, tokenizer: Tokenizer) -> Rendered:
    """Render and tokenize a body. ConfigError if it is not one."""
    from ..forms.anthropic.request_body import MessagesRequest
    from ..forms.anthropic.request_body import chat_request as of_messages
    from ..forms.media_limits import MediaLimits
    from ..forms.openai.messages import chat_input
    from ..forms.openai.response_body import ResponsesRequest
    from ..forms.openai.response_body import chat_request as of_response
    from ..forms.openai.schema import ChatRequest, CompletionRequest
    from ..forms.prompt_limits import PromptLimits
    from ..server.bodies.body_error import BodyError
    from ..server.bodies.body_parser import parse_body

    limits = PromptLimits(MANY, MANY, MANY)
    try:
        fields: JsonObject = msgspec.json.decode(raw, type=dict)
        if "prompt" in fields:
            (given,) = parse_body(raw, CompletionRequest, limits).inputs
            token_ids = tokenizer.encode(given.text or "") if given.token_ids is None else decode_ids(given.token_ids)
            return Rendered(list(token_ids), Submit(request_id="", params=SamplingParams()))
        if template is None:
            raise ConfigError("the model has no chat template: name another --model")
        if "input" in fields:
            body = of_response(parse_body(raw, ResponsesRequest, limits).body)
        elif "system" in fields or "stop_sequences" in fields:
            body = of_messages(parse_body(raw, MessagesRequest, limits).body)
        else:
            body = parse_body(raw, ChatRequest, limits).body
        chat = chat_input(body, MediaLimits("", None, {}, None, 0))
        token_ids = tokenizer.encode(template.render(chat.turns, chat.form), add_special_tokens=False)
        return Rendered(
            list(token_ids),
            Submit(request_id="", params=SamplingParams(), chat=chat.turns, chat_form=chat.form),
        )
    except (BodyError, RequestError, msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"a body cannot be read: {error}") from None
