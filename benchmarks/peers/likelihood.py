"""Perplexity of token rows in other engines, with each of their weight formats.

The checkpoint is converted as by `compare.py install`, into a folder that is deleted afterwards.
Each format is then loaded by a process in the engine's environment, `python -m peers.likelihood
NAME ROOT MODEL ROWS OUT`, which writes the sum of the negative log-likelihoods of all tokens except
each row's first.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peers import llama, openvino
from peers.installing import CompareError, read_marker, run, write_json

if TYPE_CHECKING:
    import numpy as np

WEIGHTS = ("bf16", "int8", "int4")
ENGINES = ("llama", "openvino")
Logits = Callable[[Sequence[int]], "np.ndarray"]
"""Function from the tokens of a row to float32 logits, [tokens, vocabulary]."""


@dataclass(frozen=True)
class Figure:
    """Result of one weight format."""

    perplexity: float
    mib: float
    """Size of the file with the weights, MiB."""
    note: str
    """Types of the converted weights, as shares of all."""


def measure(
    name: str, root: Path, model: Path, weights: str, rows: list[list[int]], work: Path
) -> Figure:
    """Measure the perplexity of `rows` in an engine.

    `work` is an empty folder, which the formats share.

    Raises:
        CompareError: the engine is not installed, or rejects the model.
    """
    if read_marker(root / name) is None:
        raise CompareError(
            f"{name} is not installed; python benchmarks/compare.py install --peers {name} "
            f"--into {root}"
        )
    log = work / f"{weights}.log"
    if name == "llama":
        file = work / f"{weights}.gguf"
        if weights == "bf16":
            llama.convert(root, model, file, log)
        else:
            llama.quantize(root, work / "bf16.gguf", weights, file, log)
        mib = file.stat().st_size / 2**20
        note = llama_note(log.read_text(errors="replace")) or "bf16"
    else:
        file = work / weights
        openvino.export(root, model, weights, file, log)
        mib = (file / "openvino_model.bin").stat().st_size / 2**20
        note = openvino_note(log.read_text(errors="replace")) or "the checkpoint's, run as bf16"
    inputs, out = work / "rows.json", work / f"{weights}.json"
    write_json(inputs, rows)
    python = root / name / "env" / "bin" / "python"
    folder = str(Path(__file__).parent.parent)
    command = [python, "-m", "peers.likelihood", name, root, file, inputs, out]
    run(command, log, env={"PYTHONPATH": folder})
    count = sum(len(row) - 1 for row in rows)
    return Figure(math.exp(json.loads(out.read_text()) / count), mib, note)


def llama_note(log: str) -> str:
    """Parse the types of the matrices from llama-quantize's output."""
    counts: Counter[str] = Counter()
    for shape, kind in re.findall(r"\[([ \d,]+)\], type = +\w+, converting to (\w+)", log):
        counts[kind] += math.prod(map(int, shape.split(",")))
    total = counts.total()
    return ", ".join(f"{n / total:.0%} {kind}" for kind, n in counts.most_common())


def openvino_note(log: str) -> str:
    """Parse the types of the matrices from the first column of the exporter's table."""
    found = re.findall(r"^│ (\w+, [^│]*?) *│ (\d+%)", log, re.MULTILINE)
    return ", ".join(f"{part} {kind.replace(',', '')}" for kind, part in found)


def negative_log_likelihood(logits: np.ndarray, row: Sequence[int]) -> float:
    """Sum over all tokens of a row except its first, in float64; logits [tokens, vocabulary]."""
    import numpy as np

    scores = logits[: len(row) - 1].astype(np.float64)
    highest = scores.max(axis=1)
    totals = np.log(np.exp(scores - highest[:, None]).sum(axis=1)) + highest
    return float((totals - scores[np.arange(len(scores)), row[1:]]).sum())


def _llama(root: Path, model: Path, context: int) -> Logits:
    import numpy as np

    # The package's own __init__ imports modules that only its server and chat formats need.
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(llama.bindings_folder(root) / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    os.environ["LLAMA_CPP_LIB_PATH"] = str(llama.build_folder(root) / "bin")
    import llama_cpp.llama_cpp as api

    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(str(model).encode(), api.llama_model_default_params())
    options = api.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = context
    options.n_threads = options.n_threads_batch = len(os.sched_getaffinity(0))
    state = api.llama_init_from_model(loaded, options)
    if not loaded or not state:
        raise CompareError(f"llama.cpp cannot load {model}.")
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))
    batch = api.llama_batch_init(context, 0, 1)

    def logits(row: Sequence[int]) -> np.ndarray:
        for i, token in enumerate(row):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(row)
        api.llama_memory_clear(api.llama_get_memory(state), True)
        status = api.llama_decode(state, batch)
        if status != 0:
            raise CompareError(f"llama_decode failed with status {status}.")
        shape = (len(row), vocabulary)
        return np.ctypeslib.as_array(api.llama_get_logits(state), shape=shape)

    return logits


def _openvino(root: Path, model: Path, context: int) -> Logits:
    import numpy as np
    import openvino as api

    options = openvino.properties(len(os.sched_getaffinity(0)))
    compiled = api.Core().compile_model(model / "openvino_model.xml", "CPU", options)
    request = compiled.create_infer_request()

    def logits(row: Sequence[int]) -> np.ndarray:
        shape = (1, len(row))
        request.reset_state()  # the KV cache
        found = request.infer(
            {
                "input_ids": np.array([row], dtype=np.int64),
                "attention_mask": np.ones(shape, dtype=np.int64),
                "position_ids": np.arange(len(row), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        return np.asarray(found["logits"][0])

    return logits


def _main() -> None:
    name, root, model, inputs, out = sys.argv[1:]
    rows = json.loads(Path(inputs).read_text())
    context = max(map(len, rows))
    logits = {"llama": _llama, "openvino": _openvino}[name](Path(root), Path(model), context)
    write_json(Path(out), sum(negative_log_likelihood(logits(row), row) for row in rows))


if __name__ == "__main__":
    _main()
