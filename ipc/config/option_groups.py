"""The groups of the engine's options in --help, and the metadata of an option in one."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Meta

GROUPS = {  # of options in --help
    "model": "the model and its files",
    "answers": "templates, defaults and parsers of answers",
    "devices": "devices, threads and kernels",
    "memory": "lengths and the KV cache",
    "tiers": "KV blocks outside the pool: host memory, disk, Redis, other engines",
    "adapters": "LoRA adapters",
    "media": "images and audio in prompts",
    "scheduling": "how much a step computes",
    "http": "the HTTP server with OpenAI's API",
    "clients": "the address of Client and AsyncClient",
    "limits": "queues and times",
    "logging": "log, metrics and spans",
}


def in_group(group: str) -> Callable[[str], Meta]:
    """Return a function from an option's help text to its metadata, for options of `group`."""
    return lambda text: Meta(description=text, extra={"group": group})
