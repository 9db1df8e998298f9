"""Octavo itself, by its public API."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.base import NGRAM, Answer, Generate, Peer, Row, Setup, drive


class Octavo(Peer):
    """Peer of the project's own engine.

    Args:
        interpreter: interpreter of the environment with the build to measure.
        isa: the instruction set to use; None: the best of this machine.
    """

    name = "octavo"
    title = "Octavo"
    drafts = True
    ready_path = "/ready"

    def __init__(self, interpreter: str = sys.executable, isa: str | None = None) -> None:
        self._interpreter = interpreter
        self._isa = isa
        if isa is not None:
            self.name = f"octavo-{isa}"

    def install(self, root: Path, models: Path) -> None:
        """Do nothing: it is installed already."""

    def python(self, root: Path) -> str:
        """Return the interpreter of the build."""
        return self._interpreter

    def driver(self, root: Path) -> list[str]:
        """Return the command of this module."""
        return [self._interpreter, "-m", "peers.octavo"]

    def environment(self, root: Path, setup: Setup) -> dict[str, str]:
        """Set the instruction set."""
        return {} if self._isa is None else {"OCTAVO_ISA": self._isa}

    def server(self, root: Path, setup: Setup, port: int) -> list[str]:
        """Return the command of `octavo serve`."""
        command = [self._interpreter, "-m", "octavo", "serve", setup.model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        for name, value in _settings(setup).items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                command.append(flag if value else "--no-" + flag[2:])
            elif isinstance(value, dict):
                command += [flag, json.dumps(value)]
            else:
                command += [flag, str(value)]
        return command


def _settings(setup: Setup) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": setup.max_model_len,
        "max_num_seqs": setup.max_num_seqs,
        "kv_cache_memory_bytes": f"{setup.kv_gib}G",
        "enable_prefix_caching": setup.prefix_caching,
    }
    if setup.weights in ("int8", "int4"):
        settings["quantization"] = setup.weights
    if setup.draft == NGRAM:
        settings["speculative_config"] = {"method": "ngram"}
    elif setup.draft:
        settings["speculative_config"] = {"method": "draft_model", "model": setup.draft}
    return settings


def _load(setup: Setup) -> Generate:
    from octavo import LLM, SamplingParams

    llm = LLM(setup.model, **_settings(setup))

    def generate(rows: Sequence[Row], timed: bool) -> list[Answer]:
        outputs = llm.generate(
            [{"prompt_token_ids": row.prompt_token_ids} for row in rows],
            [
                SamplingParams(
                    temperature=0.0, max_tokens=row.max_tokens, ignore_eos=True, detokenize=False
                )
                for row in rows
            ],
            use_tqdm=False,
        )
        answers = []
        for output in outputs:
            # Seconds of `time.monotonic`, which is the clock of `time.perf_counter` on Linux.
            first, last = output.metrics.first_token_time, output.metrics.last_token_time
            if first is None or last is None:
                raise RuntimeError(f"request {output.request_id} has no first or last token time")
            answers.append(Answer(first, last, len(output.outputs[0].token_ids)))
        return answers

    return generate


class Before(Octavo):
    """Another build of Octavo, such as the commit that a change began from."""

    name = "before"
    title = "Octavo before"


PEER = Octavo()

if __name__ == "__main__":
    drive(_load)
