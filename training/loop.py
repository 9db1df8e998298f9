"""Training loop: time-budgeted schedule, checkpoints, progress bar, loss curve."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from training.checkpoint import load_checkpoint, save_checkpoint
from training.data import IGNORE

Batch = tuple[Tensor, ...]
"""Tokens, targets, and further tensors, all with as many rows."""


class BatchStream(Protocol):
    """Source of batches; assigning ``state`` moves it, ``progress`` is the run's."""

    state: Any
    progress: float

    def next(self) -> Batch: ...


@dataclass(frozen=True)
class Plan:
    """Duration and rates of the training. The run ends at ``minutes`` or ``steps``."""

    minutes: float = 60.0
    steps: int | None = None
    # Muon for the matrices inside layers, AdamW for embeddings and norms.
    matrix_rate: float = 0.02
    vector_rate: float = 3e-3
    weight_decay: float = 0.05
    # Shares of the budget: the rate rises at first, stays, and falls in the last part.
    warmup: float = 0.015
    decay: float = 0.3
    final_rate: float = 0.01
    clip: float = 1.0
    checkpoint_minutes: float = 3.0
    # Elapsed minutes before the first preliminary export, then before each further one.
    first_export_minutes: float = 2.0
    export_minutes: float = 10.0
    bfloat16: bool = True
    workers: int = 2


@dataclass
class History:
    """Record of the training; the loss curve and the model card are made of it."""

    tokens: int = 0
    seconds: float = 0.0
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)


def rate_factor(progress: float, plan: Plan) -> float:
    """Return the factor: linear warm-up, a plateau, then a cosine to ``final_rate``.

    ``progress`` is the used share of the budget.
    """
    if progress < plan.warmup:
        return max(progress / plan.warmup, 0.02)
    done = min(max(1 - (1 - progress) / plan.decay, 0.0), 1.0)
    return plan.final_rate + (1 - plan.final_rate) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizers(module: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    matrices = [
        p
        for n, p in named
        if p.ndim == 2
        and not any(part in n for part in ("embed", "lm_head", "lora_", "classifier"))
    ]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in chosen]
    decayed = [p for p in others if p.ndim >= 2]
    plain = [p for p in others if p.ndim < 2]
    optimizers: list[torch.optim.Optimizer] = []
    # A share of the matrices for each worker: all optimizers step concurrently.
    for share in (matrices[i :: plan.workers] for i in range(plan.workers)):
        if share:
            optimizers.append(
                torch.optim.Muon(share, lr=plan.matrix_rate, weight_decay=plan.weight_decay)
            )
    if others:
        groups = [
            {"params": decayed, "weight_decay": plan.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        optimizers.append(torch.optim.AdamW(groups, lr=plan.vector_rate, betas=(0.9, 0.95)))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return optimizers


class Loop:
    """Trainer of the parameters of ``module`` that require gradients.

    ``loss`` maps a batch to a scalar; ``export`` is called with the loop at the preliminary
    exports and at the end; ``evaluate`` returns the held-out loss in nats per token.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Batch], Tensor],
        stream: BatchStream,
        plan: Plan,
        folder: Path,
        export: Callable[[Loop], None] | None = None,
        evaluate: Callable[[], float] | None = None,
        name: str = "main",
    ):
        self.module, self.loss, self.stream, self.plan = module, loss, stream, plan
        self.folder, self.export, self.evaluate, self.name = folder, export, evaluate, name
        self.optimizers = make_optimizers(module, plan)
        self.history = History()
        self.step = 0
        self._pool = ThreadPoolExecutor(
            plan.workers, initializer=torch.set_num_threads, initargs=(1,)
        )
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def progress(self) -> float:
        """Used share of the budget."""
        share = self.history.seconds / (60 * self.plan.minutes)
        if self.plan.steps is not None:
            share = self.step / self.plan.steps
        return min(share, 1.0)

    def save(self) -> None:
        save_checkpoint(
            self.checkpoint,
            {
                "module": self.module.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "random": torch.get_rng_state(),
                "stream": self.stream.state,
                "step": self.step,
                "history": asdict(self.history),
            },
        )

    def resume(self) -> None:
        """Continue from the checkpoint."""
        state = load_checkpoint(self.checkpoint)
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["random"])
        self.stream.state = state["stream"]
        self.step = state["step"]
        self.history = History(**state["history"])

    def train_step(self) -> float:
        factor = rate_factor(self.progress, self.plan)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * factor
        self.stream.progress = self.progress
        batch = self.stream.next()
        loss = self._gradients(batch)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        norm = nn.utils.clip_grad_norm_(parameters, self.plan.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient is not finite at step {self.step}")
        list(self._pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.history.tokens += batch[0].numel()
        return loss

    def _gradients(self, batch: Batch) -> float:
        """Add up the gradients of the batch; each worker computes a share of its rows.

        Each worker computes on one core alone. On cores shared with other work this is much faster
        than many threads for one operation, which wait for each other all the time.
        """
        rows, shares = len(batch[0]), min(self.plan.workers, len(batch[0]))
        cuts = [rows * i // shares for i in range(shares + 1)]
        parts = [tuple(tensor[a:b] for tensor in batch) for a, b in itertools.pairwise(cuts)]
        counts = [int((part[1] != IGNORE).sum()) for part in parts]

        # The sum of two gradients does not depend on their order, so two workers are still
        # reproducible bit for bit.
        def gradients(part: Batch, count: int) -> float:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.plan.bfloat16):
                loss = self.loss(part) * (count / sum(counts))
            loss.backward()
            return loss.item()

        work = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
        return sum(self._pool.map(gradients, *zip(*work, strict=True)))

    def _measure(self) -> None:
        measured = self.history.heldout[-1][0] if self.history.heldout else None
        if self.evaluate is not None and measured != self.step:
            self.history.heldout.append((self.step, self.evaluate()))

    def run(self, until_step: int | None = None) -> History:
        """Train to the end of the budget, or stop (with a checkpoint) at ``until_step``."""
        plan, history = self.plan, self.history
        next_save = history.seconds + 60 * plan.checkpoint_minutes
        next_export = 60 * plan.first_export_minutes
        while next_export <= history.seconds:
            next_export += 60 * plan.export_minutes
        smooth = history.losses[-1] if history.losses else 0.0
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[rate]:.0f} tok/s  {task.fields[left]:.1f} min left"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, refresh_per_second=1) as bar:
            task = bar.add_task(self.name, total=1.0, step=0, loss=0.0, rate=0.0, left=0.0)
            while self.progress < 1.0 and self.step != until_step:
                began = time.monotonic()
                loss = self.train_step()
                took = time.monotonic() - began
                history.seconds += took
                smooth = loss if self.step == 1 else 0.95 * smooth + 0.05 * loss
                if self.step % 10 == 1:
                    history.steps.append(self.step)
                    history.losses.append(smooth)
                rate = history.tokens / history.seconds
                left = history.seconds * (1 / max(self.progress, 1e-6) - 1) / 60
                bar.update(
                    task, completed=self.progress, step=self.step, loss=smooth, rate=rate, left=left
                )
                if self.step % 25 == 0:
                    self._log(smooth, rate)
                if history.seconds >= next_export and self.progress < 1.0:
                    next_export += 60 * plan.export_minutes
                    self._measure()
                    if self.export is not None:
                        self.export(self)
                if history.seconds >= next_save:
                    next_save = history.seconds + 60 * plan.checkpoint_minutes
                    self.save()
        if self.progress >= 1.0:
            self._measure()
            self._log(smooth, history.tokens / max(history.seconds, 1e-9))
            if self.export is not None:
                self.export(self)
        self.save()
        return history

    def _log(self, loss: float, rate: float) -> None:
        entry: dict[str, Any] = {
            "step": self.step,
            "minutes": round(self.history.seconds / 60, 2),
            "tokens": self.history.tokens,
            "loss": round(loss, 4),
            "tokens_per_second": round(rate),
        }
        if self.history.heldout:
            entry["heldout"] = self.history.heldout[-1]
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def draw_losses(history: History, path: Path, title: str) -> None:
    """Draw the loss curve, with measured held-out losses, as a small PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), dpi=90)
    axes.plot(history.steps, history.losses, label="training (all kinds of text)")
    if history.heldout:
        steps, losses = zip(*history.heldout, strict=True)
        axes.plot(steps, losses, "o-", label="held-out stories")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.set_ylim(0, min(6.0, max(history.losses, default=6.0)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def heldout_loss(forward: Callable[[Tensor], Tensor], rows: Sequence[Tensor]) -> float:
    """Return the mean loss in nats per token over rows; ``forward`` maps tokens to logits."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = forward(row[None, :-1])[0].float()
            total += nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
            count += len(row) - 1
    return total / max(count, 1)
