"""Hugging Face transformers: one padded batch after the other, no scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.base import Answer, Case, Generate, Peer, Row, Setup, drive
from peers.installing import (
    TORCH,
    make_environment,
    pip_install,
    size_mib,
    versions,
    write_marker,
)

BATCH = 32


class Transformers(Peer):
    """Peer of transformers' `generate` with scaled-dot-product attention."""

    name = "transformers"
    title = "transformers"

    def install(self, root: Path, models: Path) -> None:
        """Install transformers from the package index."""
        folder = root / "transformers"
        log = folder / "install.log"
        python = make_environment(folder / "env", log)
        pip_install(python, log, TORCH)
        pip_install(python, log, TORCH, "numpy", "transformers==5.23.0")
        found = versions(python, "torch", "transformers")
        note = {
            "version": f"transformers {found['transformers']}",
            "versions": found,
            "installed_mib": size_mib(folder / "env"),
        }
        write_marker(folder, note)

    def refusal(self, setup: Setup, case: Case) -> str | None:
        """Reject cases that need a scheduler, a prefix cache or quantization for CPUs."""
        if case.kind in ("serve", "search") or (case.kind == "start" and "server" in case.name):
            return "has no continuous batching on a CPU"
        if case.kind in ("cold", "cached"):
            return "has no prefix cache"
        if setup.weights != "bf16":
            return "does not quantize a checkpoint at load on a CPU"
        return None


def _load(setup: Setup) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        """Criteria that record the time of each token, and never stop."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    torch.set_num_threads(len(setup.cores))
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def batch(rows: Sequence[Row]) -> list[Answer]:
        width = max(len(row.prompt_token_ids) for row in rows)
        padding = [width - len(row.prompt_token_ids) for row in rows]
        ids = [[0] * pad + row.prompt_token_ids for pad, row in zip(padding, rows, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        clock = Clock()
        with torch.inference_mode():
            answer = model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(row.max_tokens for row in rows),
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        count = answer.shape[1] - width
        return [
            Answer(clock.times[0], clock.times[row.max_tokens - 1], min(count, row.max_tokens))
            for row in rows
        ]

    def generate(rows: Sequence[Row], timed: bool) -> list[Answer]:
        return [a for i in range(0, len(rows), BATCH) for a in batch(rows[i : i + BATCH])]

    return generate


PEER = Transformers()


if __name__ == "__main__":
    drive(_load)
