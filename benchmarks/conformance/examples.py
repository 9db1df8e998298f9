"""Run the examples of a checkout of vLLM on Octavo and report the result of each.

    python -m benchmarks.conformance.examples CHECKOUT [--only PART] [--write]

A tiny model replaces every other. A script works, or ends in one sentence that names the feature
that Octavo lacks. The table of both is printed, or with `--write` written to docs/vllm.md. Scripts
that use a server use one with the same model. The exit status is 1 if a script ended in a
traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import httpx

from benchmarks.conformance import shim
from benchmarks.conformance.__main__ import ROOT, make_model
from octavo.config import BUILTIN_MODEL
from tests.quantization.formats import FORMATS

DOCUMENT = ROOT / "docs" / "vllm.md"
BEGIN, END = "<!-- examples: begin -->", "<!-- examples: end -->"
TRACEBACK = "TRACEBACK"
_SECONDS = 240
_NO_GPU = "Cannot access accelerator device when none is available."
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_PORT, _OTHER_PORT = 8000, 8001
_SERVER_FLAGS = (
    *("--enable-admin", "--enable-prompt-embeds", "--enable-elastic-ep", "--no-warm-spare"),
    *("--kv-cache-memory-bytes", "256M", "--max-model-len", "8192"),
)
_NAME = re.compile(r"""["']([\w.-]+/[\w.-]+)["']""")

_CALLS = "fails unless the model calls the tool, which the tiny one does not"

# Examples that a text model in Python cannot run, by patterns of paths.
LEFT_OUT = {
    "applications/chatbot/*": "web pages made with Gradio and Streamlit",
    "applications/rag/*": "needs a vector database",
    "disaggregated/disaggregated_encoder/*": "a proxy for pictures",
    "disaggregated/*/*proxy*": "proxies in front of vLLM's KV connectors",
    "features/kv_events/*": "waits for events and never ends",
    "features/structured_diffusion/*": "a server of a diffusion model",
    "generate/multimodal/*": "pictures, sounds and videos",
    "pooling/*client*": "clients of a server for pooling models",
    "pooling/*online*": "clients of a server for pooling models",
    "pooling/*vision*": "pictures, sounds and videos",
    "pooling/*/col*": "pictures, sounds and videos",
    "pooling/plugin/*": "pictures, sounds and videos",
    "pooling/token_classify/ner_offline.py": "reads the engine's vllm_config, a class of vLLM",
    "pooling/token_embed/jina_reranker_v3_offline.py": (
        "needs `PoolingOutput.data` as a tensor of torch; Octavo's is an array of numpy"
    ),
    "reasoning/openai_chat_completion_tool_calls_with_reasoning.py": _CALLS,
    "pooling/score/convert*": "converts files with transformers, without vLLM",
    "pooling/*requests*": "clients of a server for pooling models",
    "rl/rdt_vllm_serve.py": "has only functions for another script",
    "scale_out/example_mm_serve.py": "pictures, sounds and videos",
    "speech_to_text/*": "pictures, sounds and videos",
    "tool_calling/chat_with_tools_offline.py": _CALLS,
    "tool_calling/openai_chat_completion_client_with_tools.py": _CALLS,
}
# Arguments without which a script only prints its usage.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "applications/api_server/server.py": ("--port", str(_OTHER_PORT)),
    "applications/api_server/client.py": ("--port", str(_OTHER_PORT)),
    "disaggregated/flexkv_connector/prefix_caching_flexkv.py": ("--model", "{model}"),
    "features/sharded_state/load_sharded_state_offline.py": ("--model", "{sharded}"),
    "features/sharded_state/save_sharded_state_offline.py": (
        *("--model", "{model}", "--output", "{folder}"),
    ),
    "features/speculative_decoding/spec_decode_offline.py": (
        *("--method", "ngram", "--num-prompts", "2", "--output-len", "16", "--print-output"),
    ),
    "features/tensorize_vllm_model.py": (
        *("--model", "facebook/opt-125m", "serialize", "--serialized-directory", "{folder}"),
    ),
    "ray_serving/elastic_ep/scale.py": ("--port", str(_PORT), "--new-dp-size", "2"),
}
# Models of scripts that a language model with plain weights cannot replace.
QUANTIZED = {
    "huggyllama/llama-7b": "bitsandbytes nf4",
    "TheBloke/TinyLlama-1.1B-Chat-v0.3-AWQ": "awq",
    "TheBloke/TinyLlama-1.1B-Chat-v0.3-GPTQ": "gptq",
}
"""Kind of the checkpoint by model, see `tests/quantization/formats.py`."""
CLASSIFIERS = ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "jason9693/Qwen2.5-1.5B-apeach")
# Scripts with another script's files as input, in one folder, and servers with their clients.
AFTER = {
    "disaggregated/example_connector/decode_example.py": (
        "disaggregated/example_connector/prefill_example.py"
    ),
}
"""Scripts of servers with their clients; the result of a pair is that of both."""
ASKED_BY = {"applications/api_server/server.py": "applications/api_server/client.py"}


@dataclass(frozen=True)
class Line:
    """Script with its result."""

    script: str
    outcome: str
    """Either "works", the final sentence, or `TRACEBACK` and its last line."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the examples and report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance.examples")
    parser.add_argument("checkout", type=Path, help="folder with vLLM's examples/")
    parser.add_argument("--only", default="", help="run only scripts with this text in their names")
    parser.add_argument("--write", action="store_true", help="write the table into docs/vllm.md")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent scripts")
    options = parser.parse_args(words)
    examples = options.checkout.resolve() / "examples"
    names = [name for name in scripts(examples) if options.only in name]
    if options.write and options.only:
        parser.error("--write takes the whole table; leave out --only")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "model")
        shutil.copytree(work / "model", work / "sharded", symlinks=True)
        weights = work / "sharded" / "model.safetensors"
        weights.rename(weights.with_name("model-rank-0-part-0.safetensors"))
        environment = make_environment(work)
        offer_others(work)
        with serving(work, environment, examples), ThreadPoolExecutor(options.jobs) as pool:
            lines = list(pool.map(lambda name: run(work, environment, examples, name), names))
    if options.write:
        write(DOCUMENT, table(lines, version(options.checkout)))
    else:
        print(table(lines, version(options.checkout)))
    broken = [line for line in lines if line.outcome.startswith(TRACEBACK)]
    for line in broken:
        print(f"{line.script}: {line.outcome}", file=sys.stderr)
    return 1 if broken or not lines else 0


def scripts(examples: Path) -> Iterator[str]:
    """Yield the scripts that use a text model, by their paths in `examples`."""
    for file in sorted(examples.rglob("*.py")):
        name = str(file.relative_to(examples))
        if (
            file.stat().st_size
            and not any(fnmatchcase(name, pattern) for pattern in LEFT_OUT)
            and name not in ASKED_BY.values()
        ):
            yield name


def make_environment(work: Path) -> dict[str, str]:
    """Return the environment variables of every process."""
    variables = {
        "HF_HOME": str(work / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "OCTAVO_CPU_KVCACHE_SPACE": "1",
        "MPLBACKEND": "agg",
        shim.MODEL_VARIABLE: str(work / "model"),
    }
    os.environ |= {name: variables[name] for name in ("HF_HOME", shim.MODEL_VARIABLE)}
    return {**os.environ, **variables}


def offer_others(work: Path) -> None:
    """Add quantized models and classifiers, of the size of the tiny model, to the hub's cache."""
    from transformers import AutoModelForSequenceClassification

    model = work / "model"
    shim.offer(BUILTIN_MODEL)  # transformers looks for the model of each adapter
    config = json.loads((model / "config.json").read_text())
    sizes = {name: config[name] for name in _SIZES}
    for name, kind in QUANTIZED.items():
        folder = FORMATS[kind].make(work / kind, **sizes).quantized
        for file in model.glob("tokenizer*"):
            shutil.copy(file, folder)
        shim.offer(name, folder)
    classifier = work / "classifier"
    shutil.copytree(model, classifier)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=2).save_pretrained(
        classifier
    )
    for name in CLASSIFIERS:
        shim.offer(name, classifier)


@contextmanager
def serving(work: Path, environment: dict[str, str], examples: Path) -> Iterator[None]:
    """Run a server for the scripts that use one, with every model name that they use."""
    served = {"model"}
    for name in scripts(examples):
        served |= set(_NAME.findall((examples / name).read_text()))
    flags = [*_SERVER_FLAGS, "--port", str(_PORT), "--served-model-name", *sorted(served)]
    with (work / "server.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", str(work / "model"), *flags],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            _wait_ready(process, work / "server.txt", f"http://127.0.0.1:{_PORT}/ready")
            yield
        finally:
            process.terminate()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: Path, url: str) -> None:
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{url} does not answer:\n{log.read_text()}")


def run(
    work: Path, environment: dict[str, str], examples: Path, name: str, folder: Path | None = None
) -> Line:
    """Run a script in a separate process group, in a new folder or the given one."""
    if folder is None:
        folder = work / "runs" / name
        folder.mkdir(parents=True)
    if name in AFTER:
        run(work, environment, examples, AFTER[name], folder)
    output = folder / f"printed by {Path(name).stem}.txt"
    process = _start(work, environment, examples, name, output)
    try:
        if name in ASKED_BY:
            _wait_ready(process, output, f"http://127.0.0.1:{_OTHER_PORT}/health")
            return Line(name, run(work, environment, examples, ASKED_BY[name]).outcome)
        status: int | None = process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
    line = Line(name, outcome(status, output.read_text(errors="replace")))
    print(f"{name}: {line.outcome}", file=sys.stderr, flush=True)
    return line


def _start(
    work: Path, environment: dict[str, str], examples: Path, name: str, output: Path
) -> subprocess.Popen[bytes]:
    shim.offer_all((examples / name).read_text())
    words = [
        word.format(model=work / "model", sharded=work / "sharded", folder=output.with_name("out"))
        for word in ARGUMENTS.get(name, ())
    ]
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "octavo.compat.vllm", str(examples / name), *words],
            cwd=output.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # no process is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcome(status: int | None, output: str) -> str:
    """Return the result of a script.

    Args:
        status: its exit status; None: it was stopped, because it did not end.
        output: its output.
    """
    last = (output.strip().splitlines() or ["nothing was printed"])[-1][:300]
    if last.endswith(_NO_GPU):
        return f"works until the script asks torch for a GPU: {last}"
    if "Traceback (most recent call last)" in output:
        return f"{TRACEBACK}: {last}"
    if status is None:
        return f"{TRACEBACK}: it did not end: {last}"
    sentences = re.findall(r"^(?:\S+:\d+: )?error: (.*)$", output, re.MULTILINE)
    if sentences:
        return str(sentences[-1])
    return "works" if status == 0 else last


def version(checkout: Path) -> str:
    """Return vLLM's version from a source distribution's file; for a clone, its folder's name."""
    information = checkout / "PKG-INFO"
    if information.exists():
        found = re.search(r"^Version: (\S+)$", information.read_text(), re.MULTILINE)
        if found is not None:
            return found[1]
    return checkout.resolve().name


def table(lines: Sequence[Line], of_version: str) -> str:
    """Format the lines as a Markdown table, with an introduction."""
    works = sum(line.outcome == "works" for line in lines)
    rows = [f"| `{line.script}` | {_cell(line.outcome)} |" for line in lines]
    head = (
        f"Of the {len(lines)} scripts under `examples/` of vLLM {of_version} that use a text "
        f"model, {works} work with a tiny model instead of theirs; each of the others ends with "
        "the message in the table. `python -m benchmarks.conformance.examples` generates this "
        "section. Left out are " + _listed(LEFT_OUT) + "."
    )
    return "\n".join([head, "", "| script | result |", "| --- | --- |", *rows])


def _listed(left_out: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for path, reason in left_out.items():
        by_reason.setdefault(reason, []).append(f"`{path}`")
    return "; ".join(f"{', '.join(paths)} ({why})" for why, paths in by_reason.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(document: Path, text: str) -> None:
    """Replace the text between the markers of a document."""
    before, rest = document.read_text().split(BEGIN)
    _, after = rest.split(END)
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
