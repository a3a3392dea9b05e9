"""Help of a command with many options: an overview, one group, the options that contain a word, or all options."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence

from ....ipc.params.public_struct import suggestion
from .vllm_options import VLLM_OPTIONS

WIDTH = 119
HINT = "--help=GROUP explains its options, --help=WORD those with a word, --help=all all of them"


class HelpAction(argparse.Action):
    """argparse action of --help[=WORD]: prints the help and ends the program."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        parser._print_message(help_text(parser, None if values is None else str(values)) + "\n", sys.stdout)
        parser.exit()


def help_text(parser: argparse.ArgumentParser, word: str | None) -> str:
    """Return the text of `--help=word`: all options ("all"), those of the group `word`, or those with `word` in their
    name or help, including vLLM's. If `word` is None, return an overview. Exit with code 2 if no option is found."""
    groups = {group.title: group for group in parser._action_groups[1:] if group.title and group._group_actions}
    if word is None:
        rows = "\n".join(_row(title, group._group_actions) for title, group in groups.items())
        return f"{parser.format_usage()}\n{parser.description}\n\noptions: {HINT}\n{rows}\n\n{parser.epilog}"
    if word == "all":
        return parser.format_help()
    formatter = parser._get_formatter()
    is_group, has_any = word in groups, False
    for title in [word] if is_group else groups:
        chosen = [each for each in groups[title]._group_actions if is_group or _has_word(each, word)]
        has_any = has_any or bool(chosen)
        formatter.start_section(title)
        formatter.add_arguments(chosen)
        formatter.end_section()
    others = [_about(name) for name in VLLM_OPTIONS if not is_group and word.replace("-", "_") in name]
    if not has_any and not others:
        parser.error(f"--help={word}: no option and no group has it{suggestion(word, groups)}; {HINT}")
    return "\n".join(filter(None, [formatter.format_help().rstrip(), *others]))


def _row(title: str, actions: Iterable[argparse.Action]) -> str:
    shown = [each for each in actions if each.option_strings and each.help is not argparse.SUPPRESS]
    text = f"  {title:11}" + " ".join(each.option_strings[-1 if title == "options" else 0] for each in shown)
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * 13, break_on_hyphens=False)


def _has_word(action: argparse.Action, word: str) -> bool:
    text = f"{' '.join(action.option_strings)} {action.help}".lower()
    return action.help is not argparse.SUPPRESS and word.lower() in text


def _about(name: str) -> str:
    option = VLLM_OPTIONS[name]
    verb = "is accepted without effect" if option.harmless is None else "is not served"
    return f"  --{name.replace('_', '-')} {verb}: {option.why}"
