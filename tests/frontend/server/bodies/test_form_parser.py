"""Forms are decoded with the checks and errors of JSON bodies; the bytes of a file go into the blob store."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.frontend.forms.media.media_sender import held_media
from tokenloom.frontend.forms.openai.transcription_body import TranscriptionRequest
from tokenloom.frontend.server.bodies.body_error import UNKNOWN_FIELD, BodyError
from tokenloom.frontend.server.bodies.body_parser import ParsedBody
from tokenloom.frontend.server.bodies.form_data import boundary_of
from tokenloom.frontend.server.bodies.form_parser import MAX_FIELD_BYTES, parse_form
from tokenloom.frontend.server.helpers.intake import ask_intake, new_intake_helper
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.messages.client import Medium
from tokenloom.ipc.messages.intake import BodyRead, NotRead, ReadBody
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.engine_specs import in_folder, new_spec

FILE = ("file", ("speech.wav", b"RIFF"))
Field = tuple[str, Any]


def sent(*fields: Field) -> tuple[bytes, str]:
    """Return the form that an HTTP client sends, and its boundary. A field is a text, bytes, or (filename, content)."""
    files = [(name, value if isinstance(value, tuple) else (None, value)) for name, value in fields]
    request = httpx2.Request("POST", "http://app", files=files)
    return request.read(), boundary_of(request.headers["content-type"])


def parse(*fields: Field, is_strict: bool = False) -> ParsedBody[TranscriptionRequest]:
    return parse_form(*sent(*fields), TranscriptionRequest, is_strict=is_strict)


def error(*fields: Field, is_strict: bool = False) -> BodyError:
    with pytest.raises(BodyError) as caught:
        parse(*fields, is_strict=is_strict)
    return caught.value


def test_fields_have_the_types_of_the_struct_and_the_file_is_a_medium() -> None:
    parsed = parse(
        FILE,
        ("model", "sample"),
        ("temperature", "0.25"),
        ("seed", "-3"),
        ("stream", "true"),
        ("language", "en"),
        ("timestamp_granularities[]", "segment"),
        ("timestamp_granularities[]", "word"),
        ("prompt", "Größe\r\n漢字"),
    )
    digest = hashlib.sha256(b"RIFF").digest()
    assert parsed.body == TranscriptionRequest(
        file=digest.hex(),
        model="sample",
        temperature=0.25,
        seed=-3,
        stream=True,
        language="en",
        timestamp_granularities=["segment", "word"],
        prompt="Größe\r\n漢字",
    )
    (medium,) = held_media(parsed.inputs[0].media)
    assert (medium.kind, medium.digest, bytes(medium.data)) == ("audio", digest, b"RIFF")
    assert len(parsed.inputs) == 1 and not parsed.ignored
    assert parse(FILE, ("timestamp_granularities", "word")).body.timestamp_granularities == ["word"]


def test_unknown_fields_are_dropped_and_named_or_refused() -> None:
    unknown = ("temprature", "1"), ("x[y]", ("a.bin", b"\xff"))
    assert parse(FILE, *unknown).ignored == ["temprature (did you mean temperature?)", "x[y]"]
    refused = error(FILE, *unknown, is_strict=True)
    assert (refused.code, refused.param) == (UNKNOWN_FIELD, "temprature") and "did you mean" in str(refused)


@pytest.mark.parametrize(
    ("fields", "complaint", "param"),
    [
        ([("model", "a")], "missing required field `file`", "file"),
        ([FILE, FILE], "file is given twice: give it once", "file"),
        ([FILE, ("seed", "1"), ("seed", "1")], "seed is given twice", "seed"),
        ([("file", "RIFF")], r"file has no filename, .* \(curl: -F file=@PATH\)", "file"),
        ([("file", ("a.wav", b""))], "file is empty", "file"),
        ([FILE, ("language", ("a", b"en"))], "language is sent as a file", "language"),
        ([FILE, ("temperature", "warm")], r"Expected `float.*` - at `\$.temperature`", "temperature"),
        ([FILE, ("stream", "maybe")], r"Expected `bool.*` - at `\$.stream`", "stream"),
        ([FILE, ("response_format", "diarized_json")], "Invalid enum value 'diarized_json'", "response_format"),
        ([FILE, ("timestamp_granularities[]", "hour")], "Invalid enum value 'hour'", "timestamp_granularities"),
        ([FILE, ("prompt", b"a\xff")], "prompt is not UTF-8 at byte 1", "prompt"),
        ([FILE, ("prompt", "x" * (MAX_FIELD_BYTES + 1))], f"prompt has {MAX_FIELD_BYTES + 1} bytes, at most", "prompt"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: list[Field], complaint: str, param: str) -> None:
    refused = error(*fields)
    assert refused.status == 400 and refused.param is not None and refused.param.startswith(param)
    with pytest.raises(BodyError, match=complaint):
        raise refused


BODY, BOUNDARY = sent(FILE, ("language", "en"), ("timestamp_granularities[]", "word"), ("unknown", ("a", b"x")))
FRAGMENTS = [b"\r\n", b"--", b'"', b"\\", b";", b"=", b"\xff", b"\0", b"[]", b"name", BOUNDARY.encode(), BODY]
EDITS = st.tuples(st.integers(0, len(BODY)), st.integers(0, 40), st.sampled_from(FRAGMENTS) | st.binary(max_size=8))


@settings(max_examples=400)
@given(st.lists(EDITS, min_size=1, max_size=4))
def test_no_damage_to_a_form_causes_another_error(edits: list[tuple[int, int, bytes]]) -> None:
    body = BODY
    for place, num_removed, put in edits:
        body = body[:place] + put + body[place + num_removed :]
    with contextlib.suppress(BodyError):
        parsed = parse_form(body, BOUNDARY, TranscriptionRequest)
        (medium,) = held_media(parsed.inputs[0].media)
        assert bytes(medium.data) in body and parsed.body.file == medium.digest.hex()


def test_an_intake_process_stores_the_file_and_gives_back_the_rest(tmp_path: Path) -> None:
    content = bytes(range(256)) * 1024
    spec = in_folder(new_spec(config=EngineConfig(max_media_bytes=len(content))), tmp_path)
    helper = new_intake_helper(spec)

    def ask(*fields: Field) -> BodyRead | NotRead:
        body, boundary = sent(*fields)
        question = ReadBody(body_type="TranscriptionRequest", boundary=boundary, max_bytes_per_token=None)
        answer = ask_intake(helper, question, [body[:1000], body[1000:]])
        assert isinstance(answer, BodyRead | NotRead)
        return answer

    try:
        read = ask(("file", ("a.wav", content)), ("language", "en"), ("sead", "1"))
        assert isinstance(read, BodyRead) and read.ignored == ["sead (did you mean seed?)"]
        assert b'"language":"en"' in read.rest and len(read.rest) < 2000
        ((medium,),) = (each.media for each in read.inputs)
        assert medium == Medium(kind="audio", digest=hashlib.sha256(content).digest())
        stored = BlobStore(tmp_path / "media", 1 << 20).open(medium.digest)
        assert stored is not None and bytes(stored) == content
        refused = ask(("file", ("a.wav", content + b"!")))
        assert isinstance(refused, NotRead)
        assert refused.message.startswith("file: ")
        assert f"has {len(content) + 1} bytes, at most {len(content)} are read" in refused.message
        half = ReadBody(body_type="TranscriptionRequest", boundary="x", max_bytes_per_token=None)
        cut = ask_intake(helper, half, [b"--x\r\nContent-"])
        assert isinstance(cut, NotRead) and "ends in the midst of part 1" in cut.message
    finally:
        helper.stop()
