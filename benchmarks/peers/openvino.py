"""OpenVINO GenAI: its continuous-batching pipeline on models exported by optimum."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.base import Answer, Case, Generate, Peer, Row, Setup, drive
from peers.installing import (
    TORCH,
    make_environment,
    pip_install,
    run,
    size_mib,
    versions,
    write_marker,
)
from peers.models import plain_models

VERSION = "2026.4.1"
# optimum-cli does not support bf16, and without a format converts models over 10^9 parameters to
# int8; a config without quantization keeps the checkpoint's type.
_EXPORT = """
import sys
from optimum.exporters.openvino.__main__ import main_export
from optimum.intel import OVConfig
model, output = sys.argv[1:]
task = "text-generation-with-past"
main_export(model, output, task=task, ov_config=OVConfig(dtype="bf16"), convert_tokenizer=True)
"""


class OpenVino(Peer):
    """Peer of OpenVINO GenAI's continuous-batching pipeline."""

    name = "openvino"
    title = "OpenVINO"

    def install(self, root: Path, models: Path) -> None:
        """Install the runtime and an exporter; export the models."""
        folder = root / "openvino"
        log = folder / "install.log"
        python = make_environment(folder / "env", log)
        runtime = ("openvino", "openvino-genai", "openvino-tokenizers")
        pip_install(python, log, f"openvino=={VERSION}", *runtime[1:], "numpy")

        exporter = make_environment(folder / "export-env", log)
        pip_install(exporter, log, TORCH)
        tools = ("optimum-intel", "nncf", f"openvino=={VERSION}", "openvino-tokenizers")
        pip_install(exporter, log, TORCH, *tools)
        # pip installs it as a CUDA build that the CPU build of torch cannot load.
        run([exporter, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], log)
        (folder / "models").mkdir(exist_ok=True)
        for model in plain_models(models):
            formats = ("bf16", "int8", "int4") if model == "tinyllama-1.1b" else ("bf16",)
            for weights in formats:
                target = model_folder(root, model, weights)
                if target.exists():
                    continue
                part = target.with_name("part-" + target.name)
                shutil.rmtree(part, ignore_errors=True)
                export(root, models / model, weights, part, log)
                part.rename(target)
        note = {
            "version": f"openvino-genai {versions(python, 'openvino-genai')['openvino-genai']}",
            "versions": {
                **versions(python, *runtime),
                **versions(exporter, "optimum-intel", "nncf", "torch", "transformers"),
            },
            "installed_mib": size_mib(folder / "env"),
        }
        write_marker(folder, note)

    def refusal(self, setup: Setup, case: Case) -> str | None:
        """Reject servers, as it is a library, and checkpoints that it does not read."""
        if setup.weights not in ("bf16", "int8", "int4"):
            return "quantizes weights itself"
        if case.kind in ("serve", "search") or (case.kind == "start" and "server" in case.name):
            return "has no server in the package index"
        return None

    def model(self, root: Path, setup: Setup) -> str:
        """Return the exported model."""
        return str(model_folder(root, Path(setup.model).name, setup.weights))


def model_folder(root: Path, model: str, weights: str) -> Path:
    """Return the path of the exported model."""
    return root / "openvino" / "models" / f"{model}-{weights}"


def export(root: Path, model: Path, weights: str, target: Path, log: Path) -> None:
    """Export a checkpoint for OpenVINO, with bf16, int8 or int4 weights.

    int4 has groups of 128. A matrix that does not support them has smaller groups, down to 32, or
    else int8: by default the exporter would reject the model.
    """
    exporter = root / "openvino" / "export-env" / "bin" / "python"
    if weights == "bf16":
        run([exporter, "-c", _EXPORT, model, target], log)
        return
    words = ["--task", "text-generation-with-past", "--weight-format", weights]
    if weights == "int4":
        words += ["--group-size-fallback", "adjust"]
    command = [exporter.with_name("optimum-cli"), "export", "openvino", "--model", model]
    run([*command, *words, target], log)


def properties(num_threads: int) -> dict[str, Any]:
    """Return the properties of the CPU device."""
    return {
        "INFERENCE_NUM_THREADS": num_threads,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": True,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
    }


def _load(setup: Setup) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = setup.kv_gib
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = setup.max_num_seqs
    scheduler.enable_prefix_caching = setup.prefix_caching
    scheduler.dynamic_split_fuse = True
    options = properties(len(setup.cores))
    pipeline = genai.ContinuousBatchingPipeline(setup.model, scheduler, "CPU", options)
    request_ids = itertools.count()

    def add(row: Row) -> genai.GenerationHandle:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = row.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        prompt = openvino.Tensor(np.array([row.prompt_token_ids], dtype=np.int64))
        return pipeline.add_request(next(request_ids), prompt, config)

    def generate(rows: Sequence[Row], timed: bool) -> list[Answer]:
        handles = [add(row) for row in rows]
        answers = [Answer(0.0, 0.0, 0) for _ in rows]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            if timed:
                collect(handles, answers)
        collect(handles, answers)
        return answers

    def collect(handles: list[genai.GenerationHandle], answers: list[Answer]) -> None:
        now = time.perf_counter()
        for i, handle in enumerate(handles):
            while handle.can_read():
                old = answers[i]
                count = sum(len(output.generated_ids) for output in handle.read().values())
                if count:
                    first = old.first if old.num_tokens else now
                    answers[i] = Answer(first, now, old.num_tokens + count)

    return generate


PEER = OpenVino()


if __name__ == "__main__":
    drive(_load)
