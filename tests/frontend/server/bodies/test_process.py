"""The intake process reads as the frontend would, and a request that ends it fails alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.forms.openai.embedding_body import EmbeddingRequest
from tokenloom.frontend.forms.openai.generation import Body
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest
from tokenloom.frontend.forms.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokenloom.frontend.server.bodies.body_packer import MAX_REST_BYTES, MAX_VALUES, BodyPacker
from tokenloom.frontend.server.bodies.body_parser import SMALL_BYTES, parse_body
from tokenloom.frontend.server.helpers.intake import ANSWER_S, IntakeHelper, ask_intake, new_intake_helper
from tokenloom.frontend.server.prompts.input_processor import InputProcessor
from tokenloom.frontend.server.prompts.prompt_reader import TURN_CHARACTERS, characters_of
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.codec import JsonObject, encode_ids
from tokenloom.ipc.errors import Overloaded, RequestError
from tokenloom.ipc.messages.client import ChatForm, ChatMessage
from tokenloom.ipc.messages.intake import BodyInput, BodyRead, NotRead, PromptRead, ReadBody, ReadPrompt
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.shortages import few_descriptors, num_descriptors
from tokenloom.tests.support.waiting import wait_until

TEXT = "The capital of Peru is Lima. " * 4


def demo_spec(**changes: object) -> EngineSpec:
    return new_spec(vocab_size=2048, max_model_len=2048, tokenizer_folder=str(DEMO_FOLDER), **changes)


def load_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    return tokenizer


TOKENIZER = load_tokenizer()
INPUTS = InputProcessor(demo_spec(), TOKENIZER, ChatTemplate.load(DEMO_FOLDER, TOKENIZER))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the processes look for faults."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def helper(faults: Path) -> Iterator[IntakeHelper]:
    """One helper for all tests: a process that one test leaves serves the next."""
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TOKENLOOM_FAULTS", str(faults))
        helper = new_intake_helper(demo_spec())
        yield helper
        helper.stop()


def read(helper: IntakeHelper, answer_s: float = ANSWER_S) -> PromptRead:
    answer = ask_intake(helper, ReadPrompt(prompt=TEXT, cut_side="left"), answer_s=answer_s)
    assert isinstance(answer, PromptRead)
    return answer


def intake_pid() -> int:
    (pid,) = (child.pid for child in psutil.Process().children() if "intake" in command_of(child))
    return int(pid)


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # ended
        return ""


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────

QUESTION = ReadBody(body_type="CompletionRequest", max_bytes_per_token=None)
SHORT = ReadBody(body_type="CompletionRequest", max_bytes_per_token=8)


def test_the_process_imports_only_modules_that_a_body_needs(helper: IntakeHelper) -> None:
    assert isinstance(ask_intake(helper, SHORT, [b'{"prompt": "%s"}' % (b"a " * 40_000)]), NotRead)
    libraries = Path(f"/proc/{intake_pid()}/maps").read_text()
    assert "msgspec" in libraries and "tokenizers" not in libraries and "torch" not in libraries


def test_texts_chats_and_bodies_are_read_by_one_process(helper: IntakeHelper) -> None:
    assert read(helper).token_ids == INPUTS.tokenize(ReadPrompt(prompt=TEXT)).token_ids
    pid, chat = intake_pid(), [ChatMessage("user", TEXT)]
    here = INPUTS.tokenize(ReadPrompt(chat=chat))
    assert ask_intake(helper, ReadPrompt(chat=chat)) == PromptRead(token_ids=here.token_ids, text=here.text)
    answer = ask_intake(helper, QUESTION, [b'{"prompt": [5, ', b'6], "n": 2}'])
    assert isinstance(answer, BodyRead) and answer.inputs == [BodyInput(token_ids=encode_ids([5, 6]))]
    assert json.loads(answer.rest)["n"] == 2 and intake_pid() == pid
    answer = ask_intake(helper, QUESTION, [b'{"prompt": "x", "nope": 1}'])
    assert isinstance(answer, BodyRead) and answer.ignored == ["nope"] and b"nope" not in answer.rest
    answer = ask_intake(helper, QUESTION, [b'{"prompt": "x", "seed": "many"}'])
    assert isinstance(answer, NotRead) and (answer.param, answer.code) == ("seed", None)


@pytest.mark.parametrize(
    "content",
    [b'{"prompt": "%s"}' % (b"x" * (30 << 20)), b'{"prompt": [%s"x"]}' % (b'"x",' * (1 << 20)), b"{" * (30 << 20)],
    ids=["text", "list", "nest"],
)
def test_the_memory_of_a_large_question_is_returned_while_the_process_waits_for_the_next(
    helper: IntakeHelper, content: bytes
) -> None:
    read(helper)
    process = psutil.Process(intake_pid())
    before = process.memory_info().rss
    assert isinstance(ask_intake(helper, SHORT, [content]), NotRead)
    wait_until(lambda: process.memory_info().rss <= before + (12 << 20))


def test_integers_beyond_64_bits_are_rendered_here_and_refused_by_name_there(helper: IntakeHelper) -> None:
    form = ChatForm(variables={"id": 2**70})
    question = ReadPrompt(chat=[ChatMessage("user", "x", {"ids": [-(2**64)]})], chat_form=form)
    assert characters_of(question) > 30 and INPUTS.tokenize(question).token_ids
    with pytest.raises(RequestError, match="an integer beyond 64 bits: give it as a text"):
        ask_intake(helper, question)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("kill", r"could not be read: the process .* was ended by SIGKILL, .* send less"),
        ("interrupt", "could not be read"),
        ("wait", r"\d+ bytes could not be read within 0.3 s: send less"),
    ],
)
def test_a_killed_interrupted_or_slow_process_fails_one_request_and_none_while_idle(
    end: str, reason: str, helper: IntakeHelper, faults: Path
) -> None:
    helper.stop()  # a process that has answered may have died before the question
    if end == "wait":
        read(helper)
    fault = inject(faults, "intake.read", "hang")

    def end_when_it_hangs() -> None:
        wait_until(lambda: not fault.exists())
        if end == "kill":
            os.kill(intake_pid(), signal.SIGKILL)
        elif end == "interrupt":
            helper.interrupt()

    thread = threading.Thread(target=end_when_it_hangs)
    thread.start()
    with pytest.raises(RequestError, match=reason):
        read(helper, 0.3 if end == "wait" else ANSWER_S)
    thread.join()
    helper.stop()
    read(helper)
    second = intake_pid()
    os.kill(second, signal.SIGKILL)
    read(helper)
    assert intake_pid() != second


def test_a_template_that_never_ends_fails_only_its_own_request_by_its_cpu_time(helper: IntakeHelper) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    question = ReadPrompt(chat=[ChatMessage("user", "x")], chat_form=ChatForm(template=loops))
    with pytest.raises(RequestError, match="the chat template of the request takes too much CPU time"):
        ask_intake(helper, question)


def test_a_process_that_could_not_be_started_is_no_fault_of_the_request_and_started_for_the_next(
    monkeypatch: pytest.MonkeyPatch, helper: IntakeHelper
) -> None:
    helper.stop()
    with monkeypatch.context() as context:
        context.setattr(sys, "executable", "/nowhere")
        with pytest.raises(Overloaded, match="could not be started: No such file or directory: check /nowhere"):
            read(helper)
    with monkeypatch.context() as context:
        context.setenv("PYTHONHOME", "/nonexistent")
        with pytest.raises(Overloaded, match="exited with code 1 at its start: see its log"):
            read(helper)
    before = num_descriptors()
    for num_left in range(6):
        with few_descriptors(num_left), pytest.raises(Overloaded, match=r"could not be started: .* \(ulimit -n"):
            read(helper)
        assert num_descriptors() <= before
    assert read(helper).token_ids


# ── packed bodies ────────────────────────────────────────────────────────────────────────────────────────────────────


def packer() -> BodyPacker:
    return BodyPacker(INPUTS.limits, INPUTS.media_limits, lambda: INPUTS, lambda medium: None)


def pack(body_type: type[Body], **fields: Any) -> BodyRead:
    parsed = parse_body(json.dumps(fields).encode(), body_type, INPUTS.limits)
    return packer().pack(parsed)


def test_short_texts_stay_texts_and_token_ids_become_bytes() -> None:
    packed = pack(CompletionRequest, prompt=["a", "b"], n=3)
    assert packed.inputs == [BodyInput(text="a"), BodyInput(text="b")]
    assert json.loads(packed.rest) | {"prompt": "", "n": 3} == json.loads(packed.rest)
    assert pack(EmbeddingRequest, input=[[5, 6], [7]]).inputs[1] == BodyInput(token_ids=encode_ids([7]))
    assert pack(DetokenizeRequest, tokens=[5, 6]).inputs == [BodyInput(token_ids=encode_ids([5, 6]))]


def test_a_packed_answer_that_continues_a_thought_begins_inside_it() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>so far"}]
    for is_continued in (False, True):
        packed = pack(ChatRequest, messages=messages, continue_final_message=is_continued)
        assert packed.inputs[0].is_inside_thought is is_continued


def test_a_chat_becomes_its_token_ids() -> None:
    messages = [{"role": "user", "content": "x"}]
    expected = INPUTS.tokenize(ReadPrompt(chat=[ChatMessage("user", "x")])).token_ids
    for body_type, fields in (
        (ChatRequest, {"messages": messages}),
        (ResponsesRequest, {"input": "x"}),
        (ResponsesRequest, {"input": messages}),
        (TokenizeRequest, {"messages": messages}),
    ):
        packed = pack(body_type, **fields)
        (found,) = packed.inputs
        assert found == BodyInput(token_ids=expected, is_of_chat=True, chat_fields=found.chat_fields)
        assert found.chat_fields[-1].name == "messages[0].content"
        assert b"content" not in packed.rest


@pytest.mark.parametrize("num_characters", [70_000, 400_000])
def test_a_long_text_that_is_truncated_becomes_its_last_tokens(num_characters: int) -> None:
    text = (TEXT * 4000)[:num_characters]
    (found,) = pack(CompletionRequest, prompt=text, truncate_prompt_tokens=100, echo=True).inputs
    assert found.text == text and found.token_ids is not None and len(found.token_ids) == 4 * 2048
    assert found.token_ids[-400:] == encode_ids(TOKENIZER.encode(text)[-100:])


@pytest.mark.parametrize(
    ("body_type", "fields", "reason"),
    [
        (CompletionRequest, {"prompt": "a " * 40_000}, "80000 bytes of text"),
        (CompletionRequest, {"prompt": [5] * 3000}, "maximum context length is 2048 tokens, but the prompt has 3000"),
        (ChatRequest, {"messages": [{"role": "user", "content": "a " * 40_000}]}, "bytes of text"),
        (ResponsesRequest, {"input": "a " * 40_000}, "bytes of text"),
        (TokenizeRequest, {"prompt": "a " * 40_000}, "80000 bytes of text"),
        (
            CompletionRequest,
            {"prompt": "a", "guided_json": {"enum": [{}] * MAX_VALUES}},
            f"guided_json .* {MAX_VALUES}",
        ),
        (CompletionRequest, {"prompt": "a", "user": "u" * MAX_REST_BYTES}, f"user has {MAX_REST_BYTES + 2} bytes"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused(body_type: type[Body], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        pack(body_type, **fields)


def test_no_small_body_can_exceed_the_limit_of_values() -> None:
    body = {"prompt": "a", "guided_json": {"enum": [1] * ((SMALL_BYTES - 100) // 2)}}
    raw = json.dumps(body, separators=(",", ":")).encode()
    assert SMALL_BYTES - 100 < len(raw) <= SMALL_BYTES
    packer().pack(parse_body(raw, CompletionRequest, INPUTS.limits))


# ── the size of a chat ───────────────────────────────────────────────────────────────────────────────────────────────


def size_of(more: JsonObject, place: str) -> int:
    """Return the counted size of `more` in a chat."""
    message = ChatMessage("user", "x", more if place == "message" else {})
    form = ChatForm(variables=more if place == "variables" else {})
    return characters_of(ReadPrompt(chat=[message], chat_form=form)) - 1 - TURN_CHARACTERS


@pytest.mark.parametrize("place", ["variables", "message"])
def test_values_that_json_or_64_bits_cannot_hold_are_counted(place: str) -> None:
    for number in (2**64, -(2**63) - 1, 10**40):
        assert size_of({"a": [{"b": number}]}, place) == len('{"a":[{"b":}]}') + len(str(number))
    for value in ({None: 1}, {b"key": 1}, {(1, 2): 3}, msgspec.msgpack.Ext(5, b"xx")):
        assert size_of({"a": value}, place) == len(msgspec.msgpack.encode({"a": value}))
