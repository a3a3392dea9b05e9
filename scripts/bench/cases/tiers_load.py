"""Measure an engine under load with a disk tier that gets every block and gives none, beside one without tiers.

    engine-launch bench tiers_load 135m 16 128 64 --rounds 20

Both engines stay open; per round each runs N requests of IN new random tokens and OUT answer tokens, in turn, first one
and then the other. Printed: seconds and the 99th percentile of the time between tokens, the median ratio with the tier
to without, and the interval of that median (95 %, by the order of the ratios). Then, with --preempt, a pool that holds
half of the requests: the share of preempted tokens that are computed again, with a host tier and without.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path

from tokenloom import LLM, SamplingParams
from tokenloom.frontend.client.transport import Transport
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.llm import open_private
from tokenloom.scripts.bench.cases.mixed import Load, between
from tokenloom.scripts.bench.report import median, percentile
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import Workload

NUM_PREEMPTED, PREEMPTED_OUT = 16, 192  # requests that are too many for the pool, and tokens of their answers


def run(transport: Transport, prompts: list[list[int]], num_out: int) -> tuple[float, float]:
    """Run requests at once; return the seconds to the last token, and the 99th percentile between tokens of one
    request."""
    load, begun = Load(transport), time.perf_counter()
    for prompt in prompts:
        load.submit(prompt, num_out)
    load.run_until(lambda: all(len(times) >= num_out for times in load.times))
    ended = max(times[-1] for times in load.times)
    gaps = [gap for times in load.times for gap in between(times, 0.0, ended)]
    return ended - begun, percentile(gaps, 99)


def recomputed_share(setup: Setup, **options: object) -> tuple[float, int]:
    """Run requests that preempt one another; return the share of preempted tokens that were computed again, and the
    number of preempted tokens."""
    workload = Workload(NUM_PREEMPTED, setup.workload.num_in, PREEMPTED_OUT, setup.workload.vocab_size)
    num_each = workload.num_in + PREEMPTED_OUT
    pool = NUM_PREEMPTED * num_each // 16 // 2
    params = SamplingParams(max_tokens=PREEMPTED_OUT, temperature=0, ignore_eos=True)
    with LLM(
        setup.folder, **{**setup.options, "num_kv_blocks": pool, "max_model_len": num_each + 16, **options}
    ) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts("preempted")]
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        time.sleep(1.0)  # the core reports its totals twice a second
        values = {metric.name.removeprefix("tokenloom_"): getattr(metric, "value", 0) for metric in llm.get_metrics()}
    num_computed, num_preempted = int(values["scheduled_tokens_total"]), int(values["recomputed_tokens_total"])
    return (num_computed - NUM_PREEMPTED * (num_each - 1)) / max(num_preempted, 1), num_preempted


def measure(setup: Setup) -> None:
    workload, folder = setup.workload, Path(tempfile.mkdtemp(prefix="bench-tiers-"))
    setup.stack.callback(shutil.rmtree, folder, ignore_errors=True)
    options = {"max_model_len": workload.num_in + workload.num_out + 16, **setup.options}
    seconds: dict[str, list[float]] = {"without": [], "with a disk": []}
    gaps: dict[str, list[float]] = {"without": [], "with a disk": []}
    with contextlib.ExitStack() as stack:
        engines: dict[str, Transport] = {}
        for name, more in (("without", {}), ("with a disk", {"kv_disk": str(folder)})):
            transport, close = open_private(config_from_keywords("LLM", setup.folder, {**options, **more}))
            stack.callback(close)
            engines[name] = transport
            run(transport, workload.prompts("warm-up"), 2)
        for number in range(setup.arguments.rounds):
            order = list(engines) if number % 2 else list(reversed(engines))
            for name in order:
                took, gap = run(engines[name], workload.prompts(f"{number} {name}"), workload.num_out)
                seconds[name].append(took)
                gaps[name].append(gap)
        num_objects = sum(path.is_file() for path in folder.glob("*/*/*"))
    for name in engines:
        setup.report.add(engine=name, seconds=median(seconds[name]), p99_between_tokens_ms=1e3 * median(gaps[name]))
    with_disk = "with the disk, of that without"
    setup.report.note_ratios(f"throughput {with_disk}", seconds["without"], seconds["with a disk"])
    setup.report.note_ratios(f"p99 between tokens {with_disk}", gaps["with a disk"], gaps["without"])
    setup.report.note("blocks written", num_objects)
    setup.report.note("seconds by round", seconds)
    setup.report.note("p99 by round", gaps)
    if setup.arguments.preempt:
        for name, more in (("without tiers", {}), ("with a host tier", {"kv_host_bytes": 2 << 30})):
            share, num = recomputed_share(setup, **more)
            setup.report.note(f"preempted tokens computed again, {name}", share)
            setup.report.note(f"preempted tokens, {name}", num)


OPTIONS = {"--preempt": (False, "also run requests that preempt one another")}
CASE = Case("tiers under load", measure, OPTIONS, num_requests=16, dtype="bfloat16")
