"""Secrets are marked where an option is declared, and no view shows them."""

from __future__ import annotations

import re

import msgspec
import pytest

from tokenloom.frontend.launcher.options.options import KINDS
from tokenloom.ipc.spec.config.engine_config import SECRET_OPTIONS, EngineConfig

# names that sound like a secret, of options that hold none: files, limits, and addresses without a user's part
PUBLIC = {
    *(
        "key_file",
        "api_key_file",
        "hosts_key_file",
        "kv_key_file",
        "ssl_keyfile",
        "kv_remote_salted",
        "trust_remote_code",
    ),
    *(
        "enable_tokenizer_info_endpoint",
        "tokenizer",
        "tokenizer_revision",
        "default_max_tokens",
        "max_num_batched_tokens",
        "max_waiting_tokens",
    ),
    *(
        "long_prefill_token_threshold",
        "encoder_cache_tokens",
        "num_speculative_tokens",
        "speculation_corpus_tokens",
        "return_tokens_as_token_ids",
    ),
}


def test_each_option_that_sounds_like_a_secret_is_marked_or_known_as_public() -> None:
    names = {field.name for field in msgspec.structs.fields(EngineConfig)}
    suspects = {name for name in names if re.search("key|token|secret|password|remote|endpoint|auth|url", name)}
    assert suspects - PUBLIC == SECRET_OPTIONS and names >= PUBLIC
    assert {"api_key", "hf_token", "kv_remote", "otlp_endpoint"} <= SECRET_OPTIONS


@pytest.mark.parametrize("name", sorted(SECRET_OPTIONS))
def test_an_error_about_a_secret_does_not_show_it(name: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        KINDS[name].checked({"x": "hunter2"})
    assert "hunter2" not in str(caught.value)
