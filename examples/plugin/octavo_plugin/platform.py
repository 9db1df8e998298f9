"""A kind of device: processors again, with steps run layer by layer from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.plan.setup import WorkerSetup
from octavo.platforms.cpu import CPUPlatform

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.worker.graphs import EagerSteps, StepRunner
    from octavo.worker.input_batch import InputBatch


class PatientPlatform(CPUPlatform):
    """See `CPUPlatform`; what a device has of its own is what it overrides."""

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
        """Nothing is captured."""
        return eager
