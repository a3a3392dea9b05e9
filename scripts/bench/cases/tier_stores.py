"""Compare stores of KV blocks: this engine's disk and Redis tiers, LMCache's `fs` and `resp`, and bare O_DIRECT loops.

    engine-launch bench tier_stores --lmcache PYTHON --rounds 5 --json FILE

Per round, in turn and after an untimed one: each stores the same 256 blocks of 360 KiB of random bytes under new names
and loads them. Then one bit is flipped in the content of 8 of its objects, and all are loaded again. Printed: medians
of GB/s and those of the best round, medians of the rounds' ratios to the bare loops, and how many damaged blocks were
refused and how many were loaded as good with other bytes. PYTHON has LMCache (lmcache_peer.py), whose `fs` uses the
page cache as it comes. The files lie in TMPDIR. One redis-server listens on a unix socket and on TCP; `resp` speaks TCP
alone.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from tokenloom.core.tiers.disk import DiskSource
from tokenloom.core.tiers.network.remote import RemoteSource
from tokenloom.scripts.bench.cases.tiers import redis_server
from tokenloom.scripts.bench.contestant import PEERS, Peer, median_ratio
from tokenloom.scripts.bench.inputs.tier_stores import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    Bare,
    Files,
    Ours,
    Place,
    Slots,
    Store,
    Theirs,
    Values,
)
from tokenloom.scripts.bench.report import Report, median
from tokenloom.scripts.bench.runner import Case, Setup

NUM_DAMAGED = 8
NUM_BYTES = NUM_BLOCKS * BLOCK_BYTES
BARE = "bare O_DIRECT loop"
DISK, FS, FS_DIRECT = "tokenloom disk", "LMCache fs, page cache", "LMCache fs, O_DIRECT"
UNIX, TCP, RESP = "tokenloom Redis, unix socket", "tokenloom Redis, TCP", "LMCache resp, TCP"
ORDER = (BARE, DISK, FS, FS_DIRECT, UNIX, TCP, RESP)


class Bench:
    """The stores by name with the places of their objects; seconds by round, and the fate of damaged blocks."""

    def __init__(self, cases: dict[str, tuple[Store, Place]]) -> None:
        self._cases = cases
        self.store_s: dict[str, list[float]] = defaultdict(list)
        self.load_s: dict[str, list[float]] = defaultdict(list)
        self.refused, self.wrong = Counter[str](), Counter[str]()

    def round(self, number: int, *, is_timed: bool) -> None:
        for name, (store, place) in self._cases.items():
            store_s = store.store(number)
            os.sync()  # what the page cache still holds is not written during the next measurement
            loaded = store.load(number)
            assert loaded.num_good == loaded.num_equal == NUM_BLOCKS, f"{name}: {loaded} of {NUM_BLOCKS} whole blocks"
            place.flip_bits(random.Random(number), NUM_DAMAGED)
            damaged = store.load(number)
            assert damaged.num_equal == NUM_BLOCKS - NUM_DAMAGED, f"{name}: {damaged}, {NUM_DAMAGED} damaged"
            place.clear()
            if is_timed:
                self.store_s[name].append(store_s)
                self.load_s[name].append(loaded.seconds)
                self.refused[name] += NUM_BLOCKS - damaged.num_good
                self.wrong[name] += damaged.num_good - damaged.num_equal

    def report(self, report: Report) -> None:
        for name in self._cases:
            report.add(
                store=name,
                store_gb_s=NUM_BYTES / 1e9 / median(self.store_s[name]),
                load_gb_s=NUM_BYTES / 1e9 / median(self.load_s[name]),
                best_store_gb_s=NUM_BYTES / 1e9 / min(self.store_s[name]),
                best_load_gb_s=NUM_BYTES / 1e9 / min(self.load_s[name]),
                store_of_bare=median_ratio(self.store_s[BARE], self.store_s[name]),
                load_of_bare=median_ratio(self.load_s[BARE], self.load_s[name]),
                damaged_refused=self.refused[name],
                damaged_loaded_as_good=self.wrong[name],
            )
        for ours, theirs in ((DISK, FS), (DISK, FS_DIRECT), (UNIX, RESP), (TCP, RESP)):
            if theirs in self._cases:
                report.note(f"{ours} / {theirs}, store", median_ratio(self.store_s[theirs], self.store_s[ours]))
                report.note(f"{ours} / {theirs}, load", median_ratio(self.load_s[theirs], self.load_s[ours]))
        report.note("seconds to store by round", dict(self.store_s))
        report.note("seconds to load by round", dict(self.load_s))


def our_cases(root: Path, content: bytes, port: int) -> dict[str, tuple[Store, Place]]:
    slots = Slots(content)
    disk = DiskSource(root / "disk", 1 << 40, 1.0, lambda: None)
    unix, tcp = (RemoteSource(url, lambda: None) for url in (f"unix://{root}/redis.sock", f"redis://127.0.0.1:{port}"))
    return {
        BARE: (Bare(root / "bare", slots), Files(root / "bare")),
        DISK: (Ours(disk, slots), Files(root / "disk")),
        UNIX: (Ours(unix, slots), Values(port)),
        TCP: (Ours(tcp, slots), Values(port)),
    }


def their_cases(peer: Peer, root: Path, port: int) -> dict[str, tuple[Store, Place]]:
    cached, direct = root / "fs", root / "fs-direct"
    return {
        FS: (Theirs(peer, FS, type="fs", base_path=str(cached)), Files(cached)),
        FS_DIRECT: (Theirs(peer, FS_DIRECT, type="fs", base_path=str(direct), use_odirect=True), Files(direct)),
        RESP: (Theirs(peer, RESP, type="resp", host="127.0.0.1", port=port), Values(port)),
    }


def measure(setup: Setup) -> None:
    asked, report, stack = setup.arguments, setup.report, setup.stack
    root = Path(tempfile.mkdtemp(prefix="bench-tier-stores-", dir=os.environ.get("TMPDIR")))
    content = random.Random(0).randbytes(NUM_BYTES)
    (root / "blocks").write_bytes(content)
    stack.callback(shutil.rmtree, root, ignore_errors=True)
    port = stack.enter_context(redis_server(asked.redis, root))
    cases = our_cases(root, content, port)
    if asked.lmcache:
        command = [asked.lmcache, str(PEERS / "lmcache_peer.py"), str(root / "blocks")]
        peer = Peer("LMCache", [*command, "--block-bytes", str(BLOCK_BYTES)])
        stack.callback(peer.close)
        cases |= their_cases(peer, root, port)
        report.note("LMCache", peer.facts["version"])
    bench = Bench(dict(sorted(cases.items(), key=lambda case: ORDER.index(case[0]))))
    for number in range(asked.rounds + 1):
        bench.round(number, is_timed=number > 0)
    bench.report(report)
    report.note("blocks, and bytes of each", [NUM_BLOCKS, BLOCK_BYTES])
    report.note("damaged blocks of each", NUM_DAMAGED * asked.rounds)


OPTIONS = {
    "--lmcache": (None, "the Python of an environment with LMCache"),
    "--redis": ("redis-server", "the redis-server to start"),
}
CASE = Case("stores of KV blocks", measure, OPTIONS, model="", rounds=5)
