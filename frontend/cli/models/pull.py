"""`engine-launch pull MODEL`: fetches a model of the hub into its cache, before it is served."""

from __future__ import annotations

import argparse
import sys

from ....ipc.errors import ConfigError
from ...checkpoint.downloads.cached import CachedRepository
from ...checkpoint.downloads.fetch import carry_out, describe, plan
from ...checkpoint.downloads.repository import ask_hub, hub_errors
from .hub_options import FORMS, add_hub_options, check_online, hub_config, model_named

DESCRIPTION = (
    "Fetch a model of the Hugging Face hub into its cache. A fetch that was broken off goes on where it ended.\n"
    "Of a repository of GGUF files one is taken: the one that :TAG names, else Q4_K_M or the usual one."
)
WEIGHTS = (".safetensors", ".gguf")
EXAMPLES = ["Qwen/Qwen3-0.6B", "hf.co/bartowski/Qwen3-8B-GGUF:Q4_K_M", "owner/name --revision v2"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=FORMS)
    parser.add_argument("--revision", metavar="NAME", help="a branch, tag or commit (default: the main branch)")
    add_hub_options(parser)


def run(arguments: argparse.Namespace) -> int:
    config = hub_config(arguments)
    path, name = model_named(arguments.model)
    if name is None:
        raise ConfigError(f"{path} is here already: engine-launch serve {arguments.model}")
    check_online()
    revision = arguments.revision or name.revision
    place = CachedRepository(name.repository, config)
    with hub_errors(arguments.model, revision, place.cache):
        repository = ask_hub(name.repository, revision, config.hf_token)
        planned = plan(name, revision, arguments.model, config, repository, more=("README.md",))
        if not any(file.name.endswith(WEIGHTS) for file in planned.files):
            shown = ", ".join(repository.names)
            raise ConfigError(f"{arguments.model} has neither safetensors nor GGUF files, only {shown:.300}")
        print(describe(planned), flush=True)
        try:
            fetched = carry_out(planned, arguments.model, config)
        except KeyboardInterrupt:
            print("\nstopped: the same command goes on from here", file=sys.stderr)
            return 130
    print(f"{fetched.place}\nnow: engine-launch serve {arguments.model}")
    return 0
