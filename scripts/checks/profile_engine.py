"""Profile the core's and the frontend's steps: cProfile over many steps of 256 growing answers.

    python scripts/checks/profile_engine.py --rows 256 --steps 300 [--sort tottime]

cProfile makes calls more expensive than they are: it shows hot spots, cases/engine.py the real cost.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys

import msgspec

from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import CoreSteps, FrontendSteps
from tokenloom.scripts.bench.workload import find_checkpoint


def profile_core(config: EngineConfig, num_rows: int, num_steps: int) -> cProfile.Profile:
    steps, profile = CoreSteps(config, num_rows, num_steps), cProfile.Profile()
    for _ in range(num_steps):
        profile.runcall(steps.schedule)
        profile.runcall(steps.update, steps.execute())
    return profile


def profile_frontend(config: EngineConfig, num_answers: int, num_steps: int) -> cProfile.Profile:
    steps, profile = FrontendSteps(config, num_answers), cProfile.Profile()
    for _ in range(num_steps):
        profile.runcall(steps.turn, steps.message())
    return profile


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sort", default="tottime", choices=("tottime", "cumtime", "ncalls"))
    parser.add_argument("--lines", type=int, default=25)
    arguments = parser.parse_args()
    config = msgspec.convert({"model": str(find_checkpoint("demo")), "max_num_seqs": arguments.rows}, EngineConfig)
    for name, profiler in (("core", profile_core), ("frontend", profile_frontend)):
        profile = profiler(config, arguments.rows, arguments.steps)
        print(f"\n{name}: {arguments.steps} steps of {arguments.rows} rows")
        pstats.Stats(profile).strip_dirs().sort_stats(arguments.sort).print_stats(arguments.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
