"""The chat templates in a folder, by name: those of chat_template.jinja, additional_chat_templates/, chat_template.json
and tokenizer_config.json."""

from __future__ import annotations

from pathlib import Path

from ....ipc.errors import ConfigError
from ....ipc.spec.models.config_file import read_json
from .tokenizer import read_tokenizer_config

DEFAULT, TOOL_USE = "default", "tool_use"  # names that have a meaning
MAX_CHARACTERS = 4 << 20  # limit for a template file


def stored_templates(folder: Path) -> dict[str, str]:
    """Return the texts of the templates in `folder`. ConfigError if a file cannot be read or is too long."""
    found = _of_value(read_tokenizer_config(folder).get("chat_template"))
    processor = folder / "chat_template.json"  # where media processors keep theirs
    if processor.is_file():
        found |= _of_value(read_json(processor).get("chat_template"))
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    return found | {name: read_file(path) for name, path in files.items()}


def read_file(path: Path | str) -> str:
    """Return the text of a template file. ConfigError if it cannot be read or is too long."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            source = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from None
    if len(source) > MAX_CHARACTERS:
        raise ConfigError(f"the chat template {path} has more than {MAX_CHARACTERS} characters: it is no template")
    return source


def chosen(templates: dict[str, str], name: str | None, folder: Path) -> dict[str, str]:
    """Return the templates that an engine uses: those named DEFAULT and TOOL_USE, or `name` alone. ConfigError if there
    is none of that name."""
    if name is None:
        return {each: text for each, text in templates.items() if each in (DEFAULT, TOOL_USE)}
    if name not in templates:
        known = f"known are {', '.join(sorted(templates))}" if templates else "it has none"
        raise ConfigError(f"--chat-template-name {name}: {folder} has no chat template of this name, {known}")
    return {DEFAULT: templates[name]}


def _of_value(value: object) -> dict[str, str]:
    """Return the templates of a config's value: a text, or a list of {name, template}."""
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    named = [(each.get("name"), each.get("template")) for each in entries]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
