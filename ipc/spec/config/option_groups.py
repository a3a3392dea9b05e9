"""The groups of the engine's options in --help, and the metadata of an option: group, help text, and secrecy."""

from __future__ import annotations

from typing import get_args

from msgspec import Meta, Struct, structs

GROUPS = {  # group of options in --help → its title
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
    "limits": "queues, times and quotas",
    "logging": "log, metrics and spans",
}


class InGroup:
    """Factory of metadata for the options of one group."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __call__(self, text: str, *, is_secret: bool = False) -> Meta:
        """Return the metadata of an option with this help text. `is_secret`: no output shows its value."""
        return Meta(description=text, extra={"group": self._group, "is_secret": is_secret})


def secret_options(config_type: type[Struct]) -> frozenset[str]:
    """Return the names of the options that are secrets."""
    named = ((field.name, get_args(field.type)) for field in structs.fields(config_type))
    return frozenset(name for name, (_, meta, *_) in named if meta.extra["is_secret"])
