"""`engine-launch show MODEL`: shows what a model is, from its files or the hub's, and whether it fits this machine."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import msgspec

from ....ipc.errors import ConfigError
from ....ipc.process.machine_memory import gib
from ....ipc.spec.config.engine_config import EngineConfig
from ...checkpoint.downloads.cached import CachedRepository
from ...checkpoint.downloads.fetch import FetchPlan, fetch_elsewhere, plan
from ...checkpoint.downloads.hub_name import HubName
from ...checkpoint.downloads.listing import CachedModel, cached_model, cached_models
from ...checkpoint.downloads.repository import HubRepository, ask_hub, hub_errors, is_offline
from ...checkpoint.gguf.choice import all_parts, first_parts
from ...checkpoint.machine import NUM_TOKENS, this_machine
from ...checkpoint.model_facts import SMALL_FILES, ModelFacts, facts_of, facts_of_repository
from ...forms.parsers.names import find_form
from .hub_options import FORMS, add_hub_options, hub_config, model_named

DESCRIPTION = (
    "Show a model: its shape, size and defaults, and whether it fits this machine. One that was not fetched, too."
)
EXAMPLES = ["./model.gguf", "Qwen/Qwen3-0.6B", "hf.co/bartowski/Qwen3-8B-GGUF:Q4_K_M --json"]
WEIGHTS = (".safetensors", ".gguf")


class GgufChoice(msgspec.Struct, frozen=True):
    """A GGUF file of a repository; `is_taken`: the name as it was given means this one."""

    file: str
    num_bytes: int
    is_taken: bool


class Shown(msgspec.Struct, frozen=True):
    """What is shown: the facts, where the model is, and what else its repository has."""

    model: str
    place: str
    facts: ModelFacts | None  # None: no file of the repository is meant
    choices: list[GgufChoice] = []
    are_fetched: bool = False  # the choices, which are then all that are in the cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"a folder, a GGUF file, {FORMS}")
    parser.add_argument("--revision", metavar="NAME", help="a branch, tag or commit (default: the main branch)")
    parser.add_argument("--remote", action="store_true", help="ask the hub, even if the model was fetched")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    add_hub_options(parser)


def run(arguments: argparse.Namespace) -> int:
    config = hub_config(arguments)
    path, name = model_named(arguments.model)
    if name is None:
        assert path is not None
        shown = Shown(arguments.model, str(path), facts_of(path))
    else:
        revision = arguments.revision or name.revision
        found = None if arguments.remote or revision is not None else cached_model(name, config)
        if found is not None and found.place is not None:
            shown = Shown(
                str(found.name), f"{found.place}", facts_of(found.place), _cached_choices(found, config), True
            )
        else:
            shown = _of_the_hub(name, arguments.model, revision, config)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(shown)))
    else:
        print("\n".join(lines(shown)))
    return 0


def _of_the_hub(name: HubName, given: str, revision: str | None, config: EngineConfig) -> Shown:
    """Describe a model by what the hub says of it."""
    place = CachedRepository(name.repository, config)
    with hub_errors(given, revision, place.cache):
        if is_offline():
            raise ConfigError(
                f"{given} is not in {place.cache}, and HF_HUB_OFFLINE forbids to ask the hub: unset it, or see "
                "engine-launch ls"
            )
        repository = ask_hub(name.repository, revision, config.hf_token)
        try:
            planned = plan(name, revision, given, config, repository)
        except ConfigError:
            if not (choices := _choices(repository, None)):
                raise
            return Shown(name.repository, "on the hub, not fetched", None, choices)
        facts = _remote_facts(repository, planned, config)
    return Shown(str(name), "on the hub, not fetched", facts, _choices(repository, planned.first))


def _remote_facts(repository: HubRepository, planned: FetchPlan, config: EngineConfig) -> ModelFacts:
    """Return the facts of a model that was not fetched. The small files that are needed go to a folder for a while."""
    num_bytes = sum(file.num_bytes for file in planned.files if file.name.endswith(WEIGHTS))
    with tempfile.TemporaryDirectory() as folder:
        if planned.first is not None:
            return facts_of_repository(repository, planned.first, num_bytes, Path(folder))
        snapshot = fetch_elsewhere(repository, SMALL_FILES, Path(folder), config.hf_token)
        return facts_of_repository(repository, None, num_bytes, snapshot)


def _cached_choices(found: CachedModel, config: EngineConfig) -> list[GgufChoice]:
    """Return the GGUF files of the repository that were fetched, if there are several."""
    models = [each for each in cached_models(config) if each.name.repository == found.name.repository and each.first]
    return [GgufChoice(each.first or "", each.num_bytes, each == found) for each in models] if models[1:] else []


def _choices(repository: HubRepository, taken: str | None) -> list[GgufChoice]:
    names = repository.names
    size_by_name = {file.name: file.num_bytes for file in repository.files}
    return [
        GgufChoice(first, sum(size_by_name[part] for part in all_parts(names, first)), first == taken)
        for first in first_parts(names)
    ]


def lines(shown: Shown) -> list[str]:
    """Format what is shown for people."""
    rows = [("model", shown.model), ("place", shown.place), *([] if shown.facts is None else _rows(shown.facts))]
    width = max(len(name) for name, _ in rows) + 2
    found = [f"{name:{width}}{value}" for name, value in rows]
    if shown.choices:
        found += ["", "GGUF files of the repository" + ", of those that are here" * shown.are_fetched]
        longest = max(len(each.file) for each in shown.choices)
        for each in shown.choices:
            mark = "  taken" if each.is_taken else ""
            found.append(f"  {each.file:{longest}}  {gib(each.num_bytes)}{mark}")
        if not any(each.is_taken for each in shown.choices):
            found.append(f"none is the usual one: name one, as {shown.model}:TAG")
    return found


def _rows(facts: ModelFacts) -> list[tuple[str, str]]:
    count, length = facts.num_parameters, facts.context_length
    sampling = ", ".join(f"{name} {value:g}" for name, value in facts.sampling.items())
    return [
        ("architecture", facts.architecture or "not known before it is fetched"),
        ("parameters", "not known" if count is None else _short_count(count)),
        ("context", "not known" if length is None else f"{length} tokens"),
        ("format", facts.format),
        ("size", gib(facts.num_bytes)),
        ("sampling", sampling or "names no defaults"),
        ("chat template", "no: it completes texts" if facts.template is None else "yes"),
        ("can", ", ".join(_abilities(facts))),
        ("license", facts.license or "not named in its files"),
        ("fits here", _fit(facts)),
    ]


def _abilities(facts: ModelFacts) -> list[str]:
    template = facts.template or ""
    found = {
        "tools": "tools" in template,
        "tools (by a general instruction)": bool(template) and "tools" not in template,
        "thinking": find_form(template).has_thoughts,
        "images": facts.media == "image",
        "audio": facts.media == "audio",
    }
    return ["text", *(name for name, is_there in found.items() if is_there)]


def _fit(facts: ModelFacts) -> str:
    if not facts.needs:
        return "not known before it is fetched"
    try:
        machine = this_machine()
    except ConfigError as error:
        return f"not known: {error}"
    fit = machine.fit(facts.needs)
    rest = "" if fit.is_fit else "; a smaller model or one with fewer bits would"
    others = [f"{gib(need.num_bytes)} with {need.options}" for need in facts.needs[1:]]
    return f"{fit} for weights and {NUM_TOKENS} tokens{rest}" + (f" ({', '.join(others)})" if others else "")


def _short_count(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
