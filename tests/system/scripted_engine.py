"""An engine whose demo model writes given answers, with a chat template and the special tokens of a model family.

The server, the intake, the core, its grammars and the worker's sampling are those of every engine; tests/support has
the worker that favors the next token of a script.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokenloom.tests.support.marked_demo import write_marked_demo
from tokenloom.tests.support.scripted_worker import Play, Script, environment
from tokenloom.tests.system.launched import LaunchedEngine

NAME = "tokenloom-demo"


class ScriptedEngine(LaunchedEngine):
    """Owner of its checkpoint, too."""

    program: ClassVar = "tokenloom.tests.support.scripted_launch"

    def __init__(
        self, runtime: Path, template: str, scripts: Sequence[Script], markers: Sequence[str], end: str, *options: str
    ) -> None:
        """Start the engine with its HTTP server. `markers`: special tokens of the template and of the answers; `end`
        is the one that ends an answer."""
        folder = write_marked_demo(runtime / "model", template, markers, end)
        play = Play(scripts=list(scripts), tokenizer=str(folder / "tokenizer.json"), end=end)
        super().__init__(
            runtime,
            *("serve", str(folder), "--http", "0", "--served-model-name", NAME, *options),
            more=environment(play, runtime),
        )
