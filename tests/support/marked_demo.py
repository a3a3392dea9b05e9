"""The demo model with further special tokens, such as the markers of a model family's calls, and a chat template.

A marker takes the place of one of the last tokens of the vocabulary, which no other token is made of, so that the
weights stay as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER


def write_marked_demo(folder: Path, template: str, markers: Sequence[str], end: str) -> Path:
    """Write the demo into a new `folder` with a chat template and these special tokens; return the folder. `end`: the
    marker, or special token of the demo, that ends a turn."""
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("facts", "adapters", "audio", "vision"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    stored = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    stored.pop("chat_template")
    stored["extra_special_tokens"] += markers
    (folder / "tokenizer_config.json").write_text(json.dumps(stored), encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    last = sorted(model["vocab"], key=model["vocab"].__getitem__)[len(model["vocab"]) - len(markers) :]
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) not in last]
    for marker, replaced in zip(markers, last, strict=True):
        model["vocab"][marker] = model["vocab"].pop(replaced)
        added.append(added[0] | {"id": model["vocab"][marker], "content": marker})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    ends = [model["vocab"][end]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    return folder
