"""Errors have Anthropic's statuses and types."""

from __future__ import annotations

import pytest

from tokenloom.frontend.forms.anthropic.errors import has_message_errors, message_error
from tokenloom.frontend.forms.openai.errors import HttpError, to_http_error
from tokenloom.ipc.errors import EngineDead, Overloaded, RequestError

CASES: list[tuple[BaseException, int, str]] = [
    (RequestError("max_tokens is 0"), 400, "invalid_request_error"),
    (HttpError(401, "no key"), 401, "authentication_error"),
    (HttpError(403, "not you"), 403, "permission_error"),
    (HttpError(404, "no model"), 404, "not_found_error"),
    (HttpError(405, "no method"), 405, "invalid_request_error"),
    (HttpError(413, "too large"), 413, "request_too_large"),
    (HttpError(429, "slow down"), 429, "rate_limit_error"),
    (ValueError("unforeseen"), 500, "api_error"),
    (EngineDead("lost"), 503, "api_error"),
    (Overloaded("full"), 529, "overloaded_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), CASES, ids=[kind for *_, kind in CASES])
def test_errors_have_anthropics_status_and_type(error: BaseException, status: int, kind: str) -> None:
    body, found = message_error(to_http_error(error))
    assert (found, body.type, body.error.type) == (status, "error", kind)
    assert str(error) in body.error.message


@pytest.mark.parametrize(
    ("path", "is_always", "is_for_their_client"),
    [
        *((path, True, True) for path in ("/v1/messages", "/v1/messages/batches")),
        *((path, False, True) for path in ("/v1/models", "/v1/models/x")),
        *((path, False, False) for path in ("/v1/completions", "/v1/messagesx", "/")),
    ],
)
def test_paths_of_messages_and_their_client_that_asks_for_models_get_these_errors(
    path: str, is_always: bool, is_for_their_client: bool
) -> None:
    assert has_message_errors(path, [b"host"]) == has_message_errors(path) == is_always
    assert has_message_errors(path, [b"host", b"anthropic-version"]) == is_for_their_client
