"""Run random token sequences through the detokenizer, one process per kind of tokenizer: the long form of its test.

    python scripts/chaos/fuzz_detokenizer.py --sequences 1000000

Byte-level BPE, BPE with byte fallback, unigram and WordPiece, trained on the spot
(tests/frontend/server/text/samples.py). Each sequence mixes pieces of real text, bytes, special tokens and unknown ids,
at the start of an answer or after a prompt; its deltas must join to the text of all tokens. Exit code 1 and the case if
any does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from tokenloom.tests.frontend.server.text.detokenizer_cases import check_sequences
from tokenloom.tests.frontend.server.text.samples import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1_000_000, help="over all kinds")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--kind", choices=KINDS, help="run only this kind, in this process")
    arguments = parser.parse_args()
    begun = time.monotonic()
    if arguments.kind is not None:
        check_sequences(arguments.kind, arguments.seed, arguments.sequences)
        print(f"{arguments.kind}: {arguments.sequences} sequences in {time.monotonic() - begun:.0f} s", flush=True)
        return 0
    share = -(-arguments.sequences // len(KINDS))
    command = [sys.executable, "-P", __file__, "--sequences", str(share), "--seed", str(arguments.seed), "--kind"]
    processes = [subprocess.Popen([*command, kind]) for kind in KINDS]
    num_failed = sum(process.wait() != 0 for process in processes)
    print(f"{num_failed} of {len(KINDS)} kinds failed; {share * len(KINDS)} sequences")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
