"""An engine with an option of each kind that changes its doors, its limits or its answers, as a user of vLLM starts it.

The files about such options share it, so that each finds what the others' options do to its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import TracebackType

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.launch import main
from tokenloom.frontend.server.bodies.body_parser import SMALL_BYTES
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.span_collector import SPANS_A_MESSAGE, Collector

ROOT = "/llm"
MAX_BODY_BYTES = 2 * SMALL_BYTES
TEMPLATE = (
    "{{ bos_token }}{{ opening }}{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{# <think> </think> #}"
)
PROCESSOR = "tokenloom.tests.system.test_http_params:only"
NAMES = ("first", "second")
NUM_DESCRIPTORS = 256  # the soft limit of the shell that starts it
OPTIONS = (
    *("--host", "127.0.0.1", "--port", "0", "--root-path", ROOT, "--listen", "tcp://127.0.0.1:0"),
    *("--access-log", "all", "--strict-fields", "--max-body-bytes", str(MAX_BODY_BYTES)),
    *("--served-model-name", *NAMES, "--max-model-len", "1K", "-tp", "1"),
    *(
        "--tool-call-parser",
        "hermes",
        "--reasoning-parser",
        "think",
    ),  # the template shows tools last: no form is proved
    *("--chat-template", TEMPLATE, "--default-chat-template-kwargs", '{"opening": "The capital of "}'),
    *("--trust-request-chat-template", "--override-generation-config", '{"temperature": 0.0}'),
    *("--return-tokens-as-token-ids", "--enable-force-include-usage", "--enable-per-request-metrics"),
    *("--max-logprobs", "-1", "--allowed-logits-processors", PROCESSOR),
    *("--swap-space", "4", "--enable-chunked-prefill"),  # without effect here
)


class EquippedEngine(LaunchedEngine):
    """Owns the collector of its spans, too. `key_file` has the key of its clients, `socket` is the HTTP server's."""

    def __init__(self, runtime: Path) -> None:
        self.collector = Collector()
        self.key_file, self.socket = runtime / "keys", runtime / "http.sock"
        assert main(["keygen", str(self.key_file)]) == 0
        super().__init__(
            runtime,
            *("serve", str(_checkpoint(runtime / "model")), *OPTIONS, "--otlp-endpoint", self.collector.endpoint),
            *("--key-file", str(self.key_file), "--uds", str(self.socket)),
            more={"OTEL_SERVICE_NAME": "loom", **SPANS_A_MESSAGE},
            prefix=["sh", "-c", f'ulimit -S -n {NUM_DESCRIPTORS} && exec "$@"', "sh"],
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self.collector.close()


def _checkpoint(folder: Path) -> Path:
    """Return the demo with its own sampling defaults, and with prompts for embeddings."""
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("facts"))
    for file, more in (
        ("generation_config.json", {"temperature": 0.7, "top_k": 3, "max_new_tokens": 5, "do_sample": True}),
        ("config.json", {"task_instructions": {"query": "Find: ", "document": ""}}),
    ):
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | more))
    return folder
