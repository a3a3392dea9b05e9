"""Options of the HTTP server that contradict each other are refused with one line."""

from __future__ import annotations

from typing import Any

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"state_dir": "/state"}, "--state-dir /state is for the HTTP server: give --http or --uds too"),
        ({"ssl_certfile": "a.pem"}, "--ssl-certfile is for --http, which is not given: give both, or neither"),
        ({"http": "0", "ssl_keyfile": "a.pem"}, "--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need"),
        ({"http": "0", "root_path": "llm"}, "--root-path llm must begin with / and not end with it, such as /llm"),
        ({"uds": "/s", "uds_mode": "rw"}, "--uds-mode rw must be 3 or 4 octal digits, such as 660"),
    ],
)
def test_an_option_without_its_other_half_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as found:
        EngineConfig(**options)
    assert str(found.value).startswith(line)


def test_a_state_folder_goes_with_each_kind_of_http_socket() -> None:
    for options in ({"http": "0"}, {"uds": "/s"}):
        EngineConfig(state_dir="/state", **options)
