"""Each faulty line of a batch gets a message with the fault and the mend, with OpenAI's code and field."""

from __future__ import annotations

import json

import msgspec
import pytest

from tokenloom.frontend.forms.openai.batches.batch import BatchRequest
from tokenloom.frontend.forms.openai.batches.line import (
    BatchLine,
    LineFault,
    OutputId,
    answered_line,
    read_line,
    unanswered_line,
    url_fault,
)
from tokenloom.ipc.errors import RequestError

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.mark.parametrize(
    ("line", "code", "param", "message"),
    [
        (b"{", "invalid_json_line", None, "is not JSON"),
        (b"\xff\xfe{}", "invalid_json_line", None, "is not JSON"),
        (b"[" * 100_000, "invalid_type", None, "object"),
        (b"[]", "invalid_type", None, "write it so"),
        (json.dumps({"url": "/v1/x", "body": {}}).encode(), "missing_required_parameter", "custom_id", "add it"),
        (json.dumps({"custom_id": "a", "body": {}}).encode(), "missing_required_parameter", "url", "add it"),
        (json.dumps({"custom_id": "a", "url": "/v1/x"}).encode(), "missing_required_parameter", "body", "add it"),
        (json.dumps(GOOD | {"custom_id": ""}).encode(), "missing_required_parameter", "custom_id", "one of its own"),
        (json.dumps(GOOD | {"custom_id": 5}).encode(), "invalid_type", "custom_id", "str"),
        (json.dumps(GOOD | {"method": "GET"}).encode(), "invalid_method", "method", "must be POST"),
        (json.dumps(GOOD | {"body": "x"}).encode(), "invalid_type", "body", "must be an object"),
        (json.dumps(GOOD | {"body": {"stream": True}}).encode(), "invalid_request", "body.stream", "leave it out"),
        (json.dumps(GOOD | {"body": {"background": True}}).encode(), "invalid_request", "body.background", "leave it"),
    ],
)
def test_a_faulty_line_is_named_with_its_mend(line: bytes, code: str, param: str | None, message: str) -> None:
    fault = read_line(line)
    assert isinstance(fault, LineFault)
    assert (fault.code, fault.param) == (code, param)
    assert message in fault.message and "\n" not in fault.message and len(fault.message) < 600


def test_a_line_for_another_endpoint_than_its_batch_is_a_fault() -> None:
    line = read_line(json.dumps(GOOD).encode())
    assert isinstance(line, BatchLine) and url_fault(line, "/v1/completions") is None
    fault = url_fault(line, "/v1/embeddings")
    assert fault is not None and fault.code == "invalid_url" and "/v1/embeddings" in fault.message


def test_lines_of_output_files_have_the_fields_of_openai() -> None:
    ids = OutputId("batch_req_1", 'quote " and ä')
    found = json.loads(answered_line(ids, 200, "req", b'{"a":1}'))
    assert found == {
        "id": "batch_req_1",
        "custom_id": 'quote " and ä',
        "response": {"status_code": 200, "request_id": "req", "body": {"a": 1}},
        "error": None,
    }
    found = json.loads(unanswered_line(ids, "batch_expired", "late"))
    assert found["response"] is None and found["error"] == {"code": "batch_expired", "message": "late"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"completion_window": "24 h"}, "give 24h, or 1h to 30d"),
        ({"completion_window": "31d"}, "give 24h, or 1h to 30d"),
        ({"completion_window": "0h"}, "give 24h, or 1h to 30d"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 59}}, "must be in .3600, 2592000., got 59"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "17 entries"),
        ({"metadata": {"a" * 65: "x"}}, "65 characters"),
        ({"metadata": {"a": "x" * 513}}, "513"),
    ],
)
def test_a_batch_with_a_value_out_of_range_is_refused(fields: dict[str, object], message: str) -> None:
    given = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"} | fields
    with pytest.raises(RequestError, match=message):
        msgspec.convert(given, BatchRequest).check()


def test_windows_are_hours_and_days() -> None:
    for text, seconds in (("1h", 3600), ("24h", 86400), ("1d", 86400), ("30d", 30 * 86400), ("720h", 30 * 86400)):
        request = BatchRequest(input_file_id="f", endpoint="e", completion_window=text)
        request.check()
        assert request.window_s == seconds
