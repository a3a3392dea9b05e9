"""A worker whose model writes given answers: the real worker, with logits that favor the next token of a script.

PLAY in the environment names a JSON file with scripts. The script whose `when` stands in the prompt behind those of all
others gives the answer: its text, then the end of the turn. A mask holds as always: if it forbids the script's token,
the model writes another one, and the script goes on behind the place in it where the written text stands. A prompt
without a script gets the model's own answer, and so does a text that is no part of its script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from torch import Tensor

from tokenloom.ipc.messages.workers import NewRow
from tokenloom.ipc.spec.models.model_config import OutputRules
from tokenloom.workers import process
from tokenloom.workers.sampling.logits_processors import LogitsProcessors
from tokenloom.workers.sampling.row_processors import CustomLogitsProcessor
from tokenloom.workers.step import input_batch

VARIABLE = "PLAY"  # of the environment
FAVOR = 1e4  # added to a logit


class Script(msgspec.Struct, frozen=True):
    """An answer, and the text of a prompt that it answers."""

    when: str
    answer: str


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """The scripts of an engine."""

    scripts: list[Script]
    tokenizer: str  # path of tokenizer.json
    end: str  # text of the token that ends a turn


class Scripted:
    """A logits processor that favors the tokens of the scripts."""

    def __init__(self, play: Play) -> None:
        self._scripts, self._end = play.scripts, play.end
        self._tokenizer = Tokenizer.from_file(play.tokenizer)

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
        """Favor the next token of the script in logits [vocab], in place."""
        token = self._next(prompt_ids, output_ids)
        if token is not None:
            logits[token] += FAVOR  # a masked one stays at -inf
        return logits

    def _next(self, prompt_ids: list[int], output_ids: list[int]) -> int | None:
        """Return the next token of the prompt's script; None if it has none, or the output is no part of it."""
        prompt = self._text(prompt_ids)
        places = [(prompt.rfind(each.when), each.answer + self._end) for each in self._scripts]
        place, answer = max(places, default=(-1, ""))
        if place < 0:
            return None
        whole = len(output_ids)  # tokens up to the last whole character
        while (text := self._text(output_ids[:whole])).endswith("\N{REPLACEMENT CHARACTER}"):
            whole -= 1
        begin = answer.find(text)
        if begin < 0:  # a mask may allow white space that the script has not
            text = text.lstrip()
            begin = answer.find(text)
        if begin < 0:
            return None
        ids = self._ids(answer[begin:])
        if ids[: len(output_ids)] != output_ids:  # a mask has split the text elsewhere
            ids = [*output_ids[:whole], *self._ids(answer[begin + len(text) :])]
        return ids[len(output_ids)] if len(ids) > len(output_ids) else None

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class ScriptedProcessors(LogitsProcessors):
    """The processors of each row, and for every row the scripts."""

    def __init__(
        self, vocab_size: int, processors: Sequence[CustomLogitsProcessor] = (), rules: OutputRules | None = None
    ) -> None:
        play = msgspec.json.decode(Path(os.environ[VARIABLE]).read_bytes(), type=Play)
        super().__init__(vocab_size, [*processors, Scripted(play)], rules)
        self._place = len(processors)

    def admit(self, new_row: NewRow) -> None:
        sampling = new_row.sampling
        named = msgspec.structs.replace(sampling, logits_processors=[*sampling.logits_processors, self._place])
        super().admit(msgspec.structs.replace(new_row, sampling=named))


def environment(play: Play, folder: Path) -> dict[str, str]:
    """Write a play into `folder`; return the variables of the engine that is to follow it."""
    path = folder / "play.json"
    path.write_bytes(msgspec.json.encode(play))
    return {VARIABLE: str(path)}


if __name__ == "__main__":
    input_batch.__dict__["LogitsProcessors"] = ScriptedProcessors
    sys.exit(process.main())
