"""The YAML file of `--config`: options of the engine as `name: value` lines, with `-` or `_` in names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import yaml

from ....ipc.errors import ConfigError
from ....ipc.params.public_struct import suggestion
from .options import KINDS, OPTION_NAMES, Given
from .synonyms import NAMES

MAX_BYTES = 1 << 20
_NULL_TAG = "tag:yaml.org,2002:null"


def read_config_file(path: Path) -> dict[str, Given]:
    """Return a file's options by name, with unchecked values; {} for an empty file. ConfigError, with the file and the
    line, if the file cannot be read, a name is unknown, or an option is given twice."""
    try:
        with path.open("rb") as file:  # UTF-8 in any locale; the file may be a pipe of the shell
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"--config {path} has more than {MAX_BYTES} bytes: it is no file of options")
        loader = yaml.SafeLoader(content)
        return _options_of(path, loader, loader.get_single_node())
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f" line {mark.line + 1}"
        raise ConfigError(f"--config {path} cannot be read:{line} {error.problem or error.context}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None


def _options_of(path: Path, loader: yaml.SafeLoader, root: yaml.Node | None) -> dict[str, Given]:
    if root is None or root.tag == _NULL_TAG:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path} must hold options as `name: value` lines")
    options: dict[str, Given] = {}
    line_by_name: dict[str, int] = {}
    for key, value in root.value:
        written, line = str(key.value), key.start_mark.line + 1
        name, where = written.replace("-", "_"), f"{path} line {line}: "
        if name not in OPTION_NAMES:
            names = OPTION_NAMES if "_" in written else [name.replace("_", "-") for name in OPTION_NAMES]
            raise ConfigError(f"{where}unknown option {written}{suggestion(written, names)}")
        if name in options:
            raise ConfigError(f"{path} lines {line_by_name[name]} and {line} both give {written}: keep one of them")
        line_by_name[name] = line
        _check_keys(where, value)
        options[name] = Given(_value_of(loader, name, value), written, where)
    return options


def _check_keys(where: str, root: yaml.Node) -> None:
    """Raise ConfigError if an object in the value, at any depth, has a key twice, of which YAML keeps the last. Each
    node is visited once, however many aliases it has."""
    rest, seen = [root], {id(root)}
    while rest:
        node = rest.pop()
        inner: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            keys = Counter(str(key.value) for key, _ in node.value)
            if twice := next((key for key, count in keys.items() if count > 1), None):
                raise ConfigError(f"{where}{twice} is given twice: keep one of them")
            inner = [value for _, value in node.value]
        new = [each for each in inner if id(each) not in seen]
        seen.update(map(id, new))
        rest.extend(reversed(new))


def _value_of(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> object:
    """Return the value of a node. A text option keeps its spelling in the file: YAML would read 8000 as a number, 1.10
    as 1.1, 2024-01-01 as a date and `on` as true."""
    kind = KINDS.get(NAMES.get(name, name))
    if kind is not None and kind.type in (str, list) and node.tag != _NULL_TAG:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        if isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
            return [str(each.value) for each in node.value]
    return loader.construct_object(node, deep=True)
