"""AdapterFills: starts the fills of adapter slots that a step orders, and checks that new rows use filled slots."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ....ipc.errors import ProtocolError
from ....ipc.messages.workers import SchedulerOutput
from ...step.input_batch import InputBatch
from ...step.runner_feature import RunnerFeature
from .adapter_loader import AdapterLoader


class AdapterFills(RunnerFeature):
    """Feature that passes the fills of one runner's steps to the loader, which outlives the runner."""

    orders = ("fills",)

    def __init__(self, loader: AdapterLoader, batch: InputBatch, *, is_on_cpu: bool) -> None:
        """is_on_cpu: whether rows are computed on the CPU, so that fills must be slowed during a step."""
        self._loader, self._batch, self._is_on_cpu = loader, batch, is_on_cpu

    def beside(self, step: SchedulerOutput) -> AbstractContextManager[object]:
        """Return a context that slows fills if the step computes rows on the CPU."""
        return self._loader.beside_step() if step.rows and self._is_on_cpu else nullcontext()

    def update(self, step: SchedulerOutput) -> None:
        """Start the step's fills. ProtocolError if a row uses one of these slots, or a new row uses a slot that is not
        filled."""
        for order in step.fills:
            rows = self._batch.rows_of_adapter(order.slot)
            if len(rows):
                raise ProtocolError(f"step {step.step} fills adapter slot {order.slot}, row {rows[0]} uses it")
            self._loader.start(order, step)
        for new_row in step.new_rows:
            self._loader.check_filled(new_row.adapter_slot)
