"""`engine-launch form MODEL`: shows the form of a model's answers, and the result of each probe."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import msgspec

from ...ipc.codec import JsonObject
from ...ipc.errors import ConfigError
from ...ipc.spec.config.engine_config import EngineConfig
from ..checkpoint.gguf.folder import add_tokenizer
from ..checkpoint.resolve import find_checkpoint
from .models.hub_options import FORMS, add_hub_options, hub_config

DESCRIPTION = (
    "Show how a model writes thoughts and calls: the form that is learned from its chat template, as JSON,\n"
    "and whether each probe that goes into the template comes out of the form's parser again.\n"
    "A last line names the first answer that the prompt of the next turn shows otherwise than it was generated.\n"
    "The exit code is 0 if every probe returns, 3 if not or if the form is unknown."
)
EXAMPLES = ["Qwen/Qwen3-0.6B", "./chat_template.jinja", "./model.gguf --json"]
UNPROVED = 3  # exit code
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}  # of a template without a tokenizer
MARKS = {"returned": "ok", "different": "DIFFERENT", "not shown": "not shown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"a template file, a folder, a GGUF file, {FORMS}")
    parser.add_argument("--revision", metavar="NAME", help="a branch, tag or commit (default: the main branch)")
    parser.add_argument("--chat-template-name", metavar="NAME", help="the one of this name among a model's templates")
    parser.add_argument(
        "--default-chat-template-kwargs", metavar="JSON", default="{}", help="variables of the template, as with serve"
    )
    parser.add_argument("--tool-call-parser", metavar="NAME", default="auto", help="prove this form (default: auto)")
    parser.add_argument("--reasoning-parser", metavar="NAME", default="auto", help="with these thoughts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    add_hub_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..server.answer_forms.shown_form import form_line, history_line  # imports jinja2
    from ..server.answer_forms.template_choice import TemplateChoice
    from ..server.text.chat_template import ChatTemplate, read_template
    from ..server.text.tokenizer import Tokenizer

    config = msgspec.structs.replace(
        hub_config(arguments),
        chat_template_name=arguments.chat_template_name,
        default_chat_template_kwargs=_variables(arguments.default_chat_template_kwargs),
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
    )
    with tempfile.TemporaryDirectory() as spare:
        folder: Path | None = None
        template: ChatTemplate | None
        if _is_template(Path(arguments.model)):
            source, origin = read_template(arguments.model)
            template = ChatTemplate(source, SPECIAL_TOKENS, origin, config.default_chat_template_kwargs)
        else:
            folder = _tokenizer_folder(arguments, config, Path(spare))
            template = ChatTemplate.load(folder, Tokenizer.load(folder, False), config)
        if template is None:
            raise ConfigError(f"{arguments.model} has no chat template: name a file with one")
        maker = TemplateChoice(template, config, folder)
        choice = maker.choose(maker.of_model, is_of_model=True)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(choice), ensure_ascii=False))
    else:
        print(json.dumps(msgspec.to_builtins(choice.form), ensure_ascii=False, indent=2))
        width = max((len(each.probe) for each in choice.results), default=0)
        for each in choice.results:
            print(f"{each.probe:{width}}  {MARKS[each.outcome]}  {each.difference}".rstrip())
        for each in choice.different[:1]:
            print(f"the template writes: {each.text!r}")
        for line in filter(None, (form_line(choice), history_line(choice))):
            print(line)
    is_proved = choice.origin != "unknown" and choice.num_returned > 0 and not choice.different
    return (UNPROVED, 0)[is_proved]


def _is_template(path: Path) -> bool:
    """Return whether a path is a template's file: any file that is not of GGUF."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) != b"GGUF"


def _tokenizer_folder(arguments: argparse.Namespace, config: EngineConfig, spare: Path) -> Path:
    """Return a folder with the model's tokenizer and template; of a hub's model only these are fetched."""
    folder = find_checkpoint(arguments.model, arguments.revision, "--tokenizer", config, spare)
    return add_tokenizer(folder, spare)


def _variables(text: str) -> JsonObject:
    try:
        return msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--default-chat-template-kwargs {text!r:.100} is not a JSON object: {error}") from None
