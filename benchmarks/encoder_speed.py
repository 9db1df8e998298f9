"""Texts per second of an encoder, side by side with sentence-transformers in its own environment.

    python benchmarks/encoder_speed.py MODEL --peer-python ENV/bin/python --peers torch,onnx

MODEL is a sentence-transformers folder, or a reranker without modules.json, for which the texts
are pairs of a query and a document. `encoder_shapes.py` makes models of some shapes. Each engine
has a process of its own, which loads the model once and waits while another one computes. The
engines take turns; the medians of all rounds count. Texts are random words, the same for all
engines; `Octavo` is this Python's.

sentence-transformers prepares the texts and pools for all peers: torch computes the model itself,
onnx (ONNX Runtime) and openvino compute what torch.onnx.export writes. With --dtype int8 onnx has
weights of ONNX Runtime's dynamic quantization, and other peers float32. openvino chooses its type
(bfloat16 where the processor has instructions for it) unless --dtype is float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ["the", "of", "a", "cat", "dog", "house", "river", "stone", "green", "walks", "seven"]
PAIRS = "pairs"
LENGTHS = {
    "16": (512, 16, 16),
    "128": (64, 128, 128),
    "512": (16, 510, 510),
    "mixed": (128, 5, 250),
    PAIRS: (100, 100, 100),
}
"""Name -> number of texts or documents, and the range of their words."""


def make_texts(name: str) -> list[Any]:
    """Return the texts of a workload, or pairs of the same query of 10 words and each text."""
    count, low, high = LENGTHS[name]
    rng = random.Random(0)
    query = " ".join(rng.choices(WORDS, k=10))
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(low, high) - 2)) for _ in range(count)]
    return [[query, text] for text in texts] if name == PAIRS else texts


def ranks(model: str) -> bool:
    """Return True if a model is a reranker."""
    return Path(model).exists() and not Path(model, "modules.json").exists()


def serve(engine: str, model: str, dtype: str) -> None:
    """Answer requests on stdin: a JSON list of texts in a line; write seconds and a checksum."""
    embed = ENGINES[engine](model, dtype)
    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        start = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - start
        print(json.dumps([seconds, np.asarray(vectors, np.float64).tolist()[:4]]), flush=True)


def octavo(model: str, dtype: str) -> Any:
    from octavo import LLM

    quantization = "int8" if dtype == "int8" else None
    llm = LLM(
        model,
        dtype="float32" if quantization else dtype,
        quantization=quantization,
        enable_prefix_caching=False,  # the texts are the same in each round
    )
    if ranks(model):
        return lambda pairs: [
            [o.outputs.score]
            for o in llm.score(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
        ]
    return lambda texts: [
        o.outputs.data
        for o in llm.encode(texts, use_tqdm=False, pooling_task="embed", truncate_prompt_tokens=-1)
    ]


def encoder_of(model: str, dtype: str) -> Any:
    """Return the model in sentence-transformers."""
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer

    kwargs = {"dtype": getattr(torch, dtype)}
    kind = CrossEncoder if ranks(model) else SentenceTransformer
    return kind(model, device="cpu", model_kwargs=kwargs)


def encode_by(encoder: Any) -> Any:
    if hasattr(encoder, "predict"):
        return lambda pairs: encoder.predict(pairs, batch_size=32, show_progress_bar=False)[:, None]
    return lambda texts: encoder.encode(texts, batch_size=32, show_progress_bar=False)


def torch_peer(model: str, dtype: str) -> Any:
    return encode_by(encoder_of(model, "float32" if dtype == "int8" else dtype))


def export(encoder: Any, path: Path) -> list[str]:
    """Write the transformer as ONNX; return the names of its inputs."""
    import torch

    texts: list[Any] = ["a text", "another, longer text"]
    if hasattr(encoder, "predict"):
        texts = [[text, text] for text in texts]
    features = encoder.preprocess(texts)
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in features]

    class Transformer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder[0].model

        def forward(self, *arrays: Any) -> Any:
            return self.inner(**dict(zip(names, arrays, strict=True)))[0]

    torch.onnx.export(
        Transformer().eval(),
        tuple(features[name] for name in names),
        str(path),
        input_names=names,
        output_names=["output"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in [*names, "output"]},
        opset_version=17,
        dynamo=False,
    )
    return names


def replace_transformer(encoder: Any, names: list[str], run: Any) -> Any:
    """Let `run` compute the hidden states or scores from the arrays of the inputs."""
    import torch
    from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

    class Exported(torch.nn.Module):
        config = encoder[0].model.config
        dtype = torch.float32

        def forward(self, **features: Any) -> Any:
            found = torch.from_numpy(run({name: features[name].numpy() for name in names}))
            if hasattr(encoder, "predict"):
                return SequenceClassifierOutput(logits=found)
            return BaseModelOutput(last_hidden_state=found)

    encoder[0].model = Exported()
    return encode_by(encoder)


def onnx_peer(model: str, dtype: str) -> Any:
    import onnxruntime

    encoder = encoder_of(model, "float32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        names = export(encoder, path)
        if dtype == "int8":
            from onnxruntime.quantization import quantize_dynamic

            small = Path(folder, "int8.onnx")
            quantize_dynamic(path, small, per_channel=True)
            path = small
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    return replace_transformer(encoder, names, lambda arrays: session.run(["output"], arrays)[0])


def openvino_peer(model: str, dtype: str) -> Any:
    import openvino

    encoder = encoder_of(model, "float32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        names = export(encoder, path)
        settings = {"PERFORMANCE_HINT": "LATENCY"}
        if dtype == "float32":
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        compiled = openvino.compile_model(openvino.convert_model(str(path)), "CPU", settings)
    return replace_transformer(encoder, names, lambda arrays: compiled(arrays)["output"])


ENGINES = {"octavo": octavo, "torch": torch_peer, "onnx": onnx_peer, "openvino": openvino_peer}


class Engine:
    """Process of an engine."""

    def __init__(self, name: str, python: str, model: str, dtype: str) -> None:
        command = [python, __file__, model, "--engine", name, "--dtype", dtype]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).strip() != "ready":
            if not line:
                raise SystemExit(f"{name} ended before it was ready")

    def run(self, texts: list[str]) -> tuple[float, np.ndarray[Any, Any]]:
        """Return the seconds for all texts, and the first vectors."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(texts) + "\n")
        self.process.stdin.flush()
        seconds, vectors = json.loads(self.process.stdout.readline())
        return seconds, np.array(vectors)


def main() -> None:
    """Measure all engines in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peers", default="torch")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS)
    parser.add_argument("--texts", type=int, help="most texts of a workload")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        serve(args.engine, args.model, args.dtype)
        return
    model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    lengths = args.lengths or ([PAIRS] if ranks(model) else [n for n in LENGTHS if n != PAIRS])
    engines = {"octavo": Engine("octavo", sys.executable, model, args.dtype)}
    for peer in filter(None, args.peers.split(",")):
        engines[peer] = Engine(peer, args.peer_python, model, args.dtype)
    for name in lengths:
        texts = make_texts(name)[: args.texts]
        for what, chosen in ((name, texts), (f"{name}, one text", texts[:1])):
            times: dict[str, list[float]] = {engine: [] for engine in engines}
            vectors = {}
            repeats = 1 if len(chosen) > 1 else 10
            for round_ in range(args.rounds + 1):
                for engine, process in engines.items():
                    seconds = []
                    for _ in range(repeats):
                        spent, vectors[engine] = process.run(chosen)
                        seconds.append(spent)
                    if round_:  # the first round warms up
                        times[engine].append(statistics.median(seconds))
            medians = {engine: statistics.median(each) for engine, each in times.items()}
            own = vectors["octavo"]
            cells = []
            for engine, median in medians.items():
                same = (own * vectors[engine]).sum(1).min()
                likeness = f"cosine {same:.6f}"
                if name == PAIRS:
                    likeness = f"difference {abs(own - vectors[engine]).max():.1e}"
                ratio = median / medians["octavo"]
                cells.append(
                    f"{engine} {len(chosen) / median:,.1f}/s ({median * 1e3:.2f} ms), "
                    f"{ratio:.2f}, {likeness}"
                )
            print(f"{what}: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
