"""Functions of the frontend's loop that read inputs of callers take time in proportion to it, and refuse what is nested
too deep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tokenloom.frontend.forms.media.data_url import decode_data_url
from tokenloom.frontend.forms.media_limits import MediaLimits
from tokenloom.frontend.forms.openai.messages import chat_input
from tokenloom.frontend.forms.openai.params import sampling_params
from tokenloom.frontend.forms.openai.schema import ChatRequest, CompletionRequest
from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.server.bodies.body_parser import parse_body
from tokenloom.frontend.server.bodies.form_data import boundary_of, form_parts
from tokenloom.frontend.server.http.invocations import top_level_fields
from tokenloom.frontend.server.media.images.image_header import read_header
from tokenloom.frontend.server.metrics.tracing import read_trace_context
from tokenloom.frontend.server.sources.media_url import parse_url
from tokenloom.frontend.sound.wav_file import open_wav
from tokenloom.ipc.errors import RequestError, TokenloomError
from tokenloom.ipc.params.json_schema import moved
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.tests.bounds.growth import fast_growth
from tokenloom.tests.support.engine_specs import new_spec

SIZE = 64_000  # characters, half of the largest body that the loop reads
LIMITS = PromptLimits(1 << 20, 64, 1 << 20, None)
MEDIA_LIMITS = MediaLimits.of(new_spec())


def completion(raw: bytes | str) -> object:
    return parse_body(raw.encode() if isinstance(raw, str) else raw, CompletionRequest, LIMITS)


def chat(raw: str) -> object:
    return chat_input(parse_body(raw.encode(), ChatRequest, LIMITS).body, MEDIA_LIMITS)


def params(raw: str) -> object:
    return sampling_params(parse_body(raw.encode(), CompletionRequest, LIMITS).body)


def with_content(content: str) -> str:
    return f'{{"messages":[{{"role":"user","content":{content}}}]}}'


Given = Callable[[int], Any]  # makes an input of about so many characters
SURROGATE = '"\\ud800"'
CASES: dict[str, tuple[Callable[[Any], object], Given]] = {
    "escapes": (completion, lambda n: '{"prompt":"' + '\\"' * (n // 2)),
    "brackets": (completion, lambda n: "[" * n),
    "bracket pairs": (completion, lambda n: '{"prompt":' + "[]," * (n // 3)),
    "a surrogate": (completion, lambda n: f'{{"prompt":"{"a" * n}{SURROGATE[1:]}}}'),
    "a surrogate behind a list": (completion, lambda n: f'{{"{"k" * n}":[{"1," * n}1],"prompt":{SURROGATE}}}'),
    "a surrogate in deep lists": (completion, lambda n: f'{{"prompt":{"[" * 400}{"1," * n}{SURROGATE}{"]" * 400}}}'),
    "no UTF-8": (completion, lambda n: b'{"prompt":"' + b"a" * n + b"\xff"),
    "unknown fields": (completion, lambda n: "{" + ",".join(f'"f{i}":1' for i in range(n // 8)) + "}"),
    "an unknown field": (completion, lambda n: f'{{"{"u" * n}":1}}'),
    "a value of another type": (
        completion,
        lambda n: '{"prompt":"x","truncation_side":"' + "' - at `$.tools" * (n // 15) + '"}',
    ),
    "a type that is not served": (chat, lambda n: f'{{"tools":[{{"type":"{"Invalid enum value " * (n // 19)}"}}]}}'),
    "messages": (
        chat,
        lambda n: '{"messages":[' + '{"role":"user","content":"a"},' * (n // 29) + '{"role":"user","content":"a"}]}',
    ),
    "parts": (
        chat,
        lambda n: with_content("[" + '{"type":"text","text":"a"},' * (n // 26) + '{"type":"text","text":"a"}]'),
    ),
    "URLs": (chat, lambda n: with_content(f'[{{"type":"image_url","image_url":{{"url":"{"a:" * (n // 2)}"}}}}]')),
    "logit_bias": (
        params,
        lambda n: '{"prompt":"x","logit_bias":{' + ",".join(f'"{i}":1' for i in range(n // 9)) + "}}",
    ),
    "stop": (params, lambda n: f'{{"prompt":"x","stop":["{"s" * n}"]}}'),
    "bad_words": (params, lambda n: f'{{"prompt":"x","bad_words":["{" " * n}a"]}}'),
    "allowed_token_ids": (params, lambda n: f'{{"prompt":"x","allowed_token_ids":[{"1," * (n // 2)}1]}}'),
    "vllm_xargs": (params, lambda n: f'{{"prompt":"x","vllm_xargs":{{"a":[{"1," * (n // 2)}1]}}}}'),
    "choice": (params, lambda n: '{"prompt":"x","guided_choice":[' + '"a",' * (n // 4) + '"a"]}'),
    "a schema with a string without end": (
        lambda text: StructuredOutputsParams(json=text),
        lambda n: "[" * 130 + '"' + '\\"' * (n // 2),
    ),
    "fields for SageMaker": (top_level_fields, lambda n: b'{"' + b'\\"' * (n // 2)),
    "a boundary": (boundary_of, lambda n: "multipart/form-data" + "; boundary" * (n // 10)),
    "boundaries": (lambda body: form_parts(body, "b"), lambda n: b"--b\r\n" + b"\r\n--" * (n // 4)),
    "parameters of a part": (
        lambda body: form_parts(body, "b"),
        lambda n: b'--b\r\nContent-Disposition: form-data; name="' + b'\\"' * 4000,
    ),
    "tracestate": (
        lambda value: read_trace_context([(b"traceparent", b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01"), value]),
        lambda n: (b"tracestate", b"a=" + b" " * n + b","),
    ),
    "a data: URL": (decode_data_url, lambda n: "data:" + ";a" * (n // 2) + ";base64," + "A=" * (n // 2)),
    "a URL": (parse_url, lambda n: "http://" + "a." * (n // 2) + "/" + "%41" * (n // 3)),
    "a GIF": (lambda data: read_header(data, 1 << 40), lambda n: b"GIF89a" + b"\1" * 7 + b"!\xfe" * (n // 2)),
    "a JPEG": (lambda data: read_header(data, 1 << 40), lambda n: b"\xff\xd8" + b"\xff\xe0\0\2" * (n // 4)),
    "a WAV": (lambda data: open_wav(memoryview(data)), lambda n: b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * (n // 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reader_takes_time_in_proportion_to_its_input(name: str) -> None:
    read, given = CASES[name]

    def reading(size: int) -> Callable[[], object]:
        value = given(size)

        def run() -> None:
            with suppress(TokenloomError):
                read(value)

        return run

    assert not fast_growth(reading, (SIZE,), quick_s=0.02)


@pytest.mark.parametrize("keyword", ["not", "properties", "allOf", "$defs"])
@pytest.mark.parametrize("depth", [100, 400, 900, 5000])
def test_a_schema_of_any_depth_is_moved_or_refused(keyword: str, depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {keyword: schema if keyword == "not" else [schema] if keyword == "allOf" else {"a": schema}}
    with suppress(RequestError):
        moved(schema, "#/$defs/f0")


def test_parameters_of_large_requests_are_refused_by_name() -> None:
    for name, value in (
        ("stop", ["a"] * 65),
        ("bad_words", ["a"] * 257),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
