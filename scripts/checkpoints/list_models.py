"""Write the table of native models into docs/learn/models.md, from the families and the models of the tests.

    python -m tokenloom.scripts.checkpoints.list_models [--check]

A row is an architecture: the published models whose config.json and tensor names the tests load at full size, and how a
CPU runs a step. `--check` writes nothing, and exits with 1 if the page has another table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from tokenloom.ipc.spec.models.model_file import ENCODERS, NATIVE, load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.tests.support.checkpoints import ENCODER_DECODERS, tiny_checkpoint, tiny_config
from tokenloom.tests.support.checkpoints import FAMILIES as FIRST_FAMILIES
from tokenloom.tests.support.families import CONFIGS
from tokenloom.tests.support.published_models import NAMES, read_published
from tokenloom.tests.support.recurrent_families import HYBRIDS, config_of, recurrent_checkpoint
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model

PAGE = Path(__file__).resolve().parents[2] / "docs/learn/models.md"
MARKS = ("<!-- native: begin -->\n", "<!-- native: end -->\n")
CPU = torch.device("cpu")
ARCHITECTURES = sorted(set(NATIVE) - ENCODERS.keys())  # encoders of text have a list of their own
STEPS = {  # by whether the steps of an architecture's tiny models are one call
    frozenset([True]): "one C call",
    frozenset([False]): "C kernels, layer by layer",
    frozenset([True, False]): "one C call, or layer by layer",
}


def tiny_families() -> dict[str, list[str]]:
    """Return the tiny models of the tests, by architecture."""
    found = defaultdict(list)
    for family in (*FIRST_FAMILIES, *CONFIGS, *ENCODER_DECODERS):
        listed = tiny_config(family)["architectures"]
        assert isinstance(listed, list)
        found[listed[0]].append(family)
    for family in HYBRIDS:
        found[config_of(family)["architectures"][0]].append(family)
    return found


def is_one_call(family: str) -> bool:
    """Whether a step of the family's tiny model is one call of the C kernels; else its layers run one by one."""
    with tempfile.TemporaryDirectory() as folder:
        write = recurrent_checkpoint if family in HYBRIDS else tiny_checkpoint
        checkpoint = write(Path(folder) / family, family)
        config, ops = load_model_config(checkpoint), select_ops(CPU, torch.float32)
        return load_model(checkpoint, config, 128, torch.float32, CPU, ops, ParallelGroup()).is_fused


def table() -> str:
    published, tiny = defaultdict(list), tiny_families()
    for name in NAMES:
        published[read_published(name).architecture].append(name)
    lines = ["| architecture | published models in the tests | a step on a CPU |", "|---|---|---|"]
    for architecture in ARCHITECTURES:
        how = {is_one_call(family) for family in tiny[architecture]}
        step = (
            "one C call"
            if how == {True}
            else "C kernels, layer by layer"
            if how == {False}
            else "one C call, or layers"
        )
        lines.append(f"| `{architecture}` | {', '.join(published[architecture]) or '–'} | {step} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    new = f"{head}{MARKS[0]}{table()}{MARKS[1]}{tail}"
    if options.check:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
