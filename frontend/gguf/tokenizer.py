"""Writes the tokenizer of a GGUF file as tokenizer.json and its kin: python -m tokenloom.frontend.gguf.tokenizer FILE
FOLDER

A process of its own, since transformers, which knows how to read it, takes seconds to import.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def main(file: Path, folder: Path) -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        tokenizer.save_pretrained(made)
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name == "tokenizer_config.json"):
            path.rename(folder / path.name)  # the last one says that all are there


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
