"""The shown configuration has every option but the secrets."""

from __future__ import annotations

import msgspec

from tokenloom.frontend.server.http.server_info import InfoEndpoints
from tokenloom.ipc.spec.config.engine_config import SECRET_OPTIONS, EngineConfig
from tokenloom.scripts.bench.engine_steps import new_frontend


def test_no_secret_is_in_the_configuration_that_is_shown() -> None:
    secrets = dict.fromkeys(SECRET_OPTIONS, "redis://u:hunter2@127.0.0.1/0") | {"api_key": ["hunter2"]}
    config = EngineConfig(device="cpu", download_dir="https://u:hunter2@host/t", kv_host_bytes=1 << 20)
    frontend, spec = new_frontend(config)
    spec = msgspec.structs.replace(spec, config=msgspec.structs.replace(config, **secrets))
    shown = InfoEndpoints(frontend, spec, None)._groups()
    assert "hunter2" not in str(shown) and shown["engine_config"]["download_dir"] == "https://***@host/t"
    assert not SECRET_OPTIONS & {name for group in shown.values() for name in group}
