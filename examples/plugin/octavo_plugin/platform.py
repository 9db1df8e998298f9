"""Custom kind of device: a processor that runs steps layer by layer from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.plan.setup import WorkerSetup
from octavo.platforms.cpu import CPUPlatform

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.worker.graphs import EagerSteps, StepRunner
    from octavo.worker.input_batch import InputBatch


class PatientPlatform(CPUPlatform):
    """Variant of `CPUPlatform`, which overrides the differences of the device."""

    name = "patient"
    server_batched_tokens = 128

    def make_steps(
        self,
        setup: WorkerSetup,
        ops: Ops,
        eager: EagerSteps,
        batch: InputBatch,
        *,
        capture: bool,
    ) -> StepRunner:
        """Return the eager runner: nothing is captured."""
        return eager
