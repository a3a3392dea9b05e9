"""Any frontend shows the sums of all; a lost one's totals stay, its successor continues them, its gauges end."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tokenloom.frontend.server.metrics.shared_counts import NEVER, SharedCounts
from tokenloom.frontend.server.requests.engine_metrics import EngineMetrics
from tokenloom.ipc.messages.supervisor import Progress
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.engine_specs import new_spec

NOW = 1000.0
RUNNING = Progress(
    step=7,
    step_age_s=0.0,
    num_running=1,
    num_waiting=0,
    num_steps_in_flight=1,
    frontends=["frontend-0", "frontend-1-0"],
)


class OneFrontend:
    """Metrics and file of a frontend, without its process."""

    def __init__(self, folder: Path, place: int, number: int = 0, num_frontends: int = 2) -> None:
        config = EngineConfig(api_server_count=num_frontends)
        spec = new_spec(run_directory=str(folder), config=config)
        identity = f"frontend-{place}-{number}" if place else f"frontend-{number}"
        self.metrics = EngineMetrics(spec, lambda: {"clients": 3.0})
        self.num_open = 0
        self.shared: SharedCounts = self.metrics.share(spec, place, identity, lambda: self.num_open)
        self.metrics.on_progress(RUNNING)

    def count(self, number: int) -> None:
        self.metrics.generation_tokens.add(number)
        self.metrics.finished.add(number, "stop")
        self.metrics.first_token.observe(0.25, number)

    def sums(self) -> tuple[float, float, int]:
        joined = self.metrics.registry.joined
        tokens, finished = joined(self.metrics.generation_tokens), joined(self.metrics.finished)
        return tokens.sum, finished.get("stop"), joined(self.metrics.first_token).count


def value_of(metrics: EngineMetrics, name: str, **labels: str) -> float:
    found = [
        each
        for each in metrics.read()
        if each.name == f"tokenloom_{name}" and labels.items() <= each.labels.items() and hasattr(each, "value")
    ]
    assert len(found) == 1, found
    value: float = found[0].value
    return value


def test_any_frontend_shows_the_sums_of_all(tmp_path: Path) -> None:
    one, other = OneFrontend(tmp_path, 0), OneFrontend(tmp_path, 1)
    one.count(3)
    other.count(4)
    one.shared.tick(NOW)
    other.shared.tick(NOW)
    assert one.sums() == other.sums() == (7, 7, 7)
    assert value_of(one.metrics, "generation_tokens_total") == 7
    assert value_of(one.metrics, "engine_steps_total") == 7, "each frontend knows the engine's steps as a whole"
    assert value_of(one.metrics, "socket_queue_depth", socket="clients") == 6
    assert value_of(one.metrics, "socket_queue_depth", socket="workers") == 1
    counts = [line for line in one.metrics.render().splitlines() if "time_to_first_token_seconds_count" in line]
    assert [line.split()[-1] for line in counts] == ["7.0"]


def test_the_totals_of_a_lost_frontend_stay_and_its_successor_continues_them(tmp_path: Path) -> None:
    one, lost = OneFrontend(tmp_path, 0), OneFrontend(tmp_path, 1)
    lost.count(4)
    lost.num_open = 2
    lost.shared.tick(NOW)
    assert sum(each.num_open_requests for each in one.shared.others) == 2
    one.metrics.on_progress(msgspec.structs.replace(RUNNING, frontends=["frontend-0"]))
    assert one.sums() == (4, 4, 4)
    assert value_of(one.metrics, "socket_queue_depth", socket="clients") == 3
    assert sum(each.num_open_requests for each in one.shared.others) == 0
    successor = OneFrontend(tmp_path, 1, number=1)
    assert successor.sums() == (4, 4, 4)
    successor.count(1)
    successor.shared.tick(NOW)
    assert one.sums() == successor.sums() == (5, 5, 5)


def test_a_file_is_written_at_most_once_a_second_and_at_last(tmp_path: Path) -> None:
    one, other = OneFrontend(tmp_path, 0), OneFrontend(tmp_path, 1)
    one.count(1)
    one.shared.tick(NOW)
    assert one.shared.next_at == NEVER
    one.count(1)
    one.shared.tick(NOW + 0.3)
    assert other.sums()[0] == 1 and one.shared.next_at == NOW + 1
    one.shared.tick(NOW + 1)
    assert other.sums()[0] == 2 and one.shared.next_at == NEVER


def test_a_full_disk_is_logged_more_and_more_rarely(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = OneFrontend(tmp_path / "gone", 0)
    for second in range(20):
        first.count(1)
        first.shared.tick(NOW + 2 * second)
    assert len(caplog.messages) == 5, "the 1st, 2nd, 4th, 8th and 16th time"


def test_the_only_frontend_has_no_file(tmp_path: Path) -> None:
    one = OneFrontend(tmp_path, 0, num_frontends=1)
    one.count(2)
    one.shared.tick(NOW)
    assert one.sums() == (2, 2, 2) and one.shared.next_at == NEVER and not list(tmp_path.iterdir())
