"""`octavo convert`: checkpoints of quantized weights for Octavo, vLLM or llama.cpp."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.bench import results
from octavo.errors import ConfigError
from octavo.model_tools.gguf_writer import FILE_NAME, MIXES, check_description, make_gguf
from octavo.model_tools.opened import MODEL_HELP, OpenedModel
from octavo.model_tools.quantized_folder import Target, make_quantized, write_description
from octavo.model_tools.unfinished import TensorFile, UnfinishedOutput
from octavo.models.config_defaults import DEFAULTS
from octavo.models.forms import quant_method
from octavo.plan.memory_plan import MIB
from octavo.quantization.plain import PLAIN
from octavo.text.tokenizer import Tokenizer

_FOLDERS: dict[str, Target] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
_TEXTS = re.compile(r"(?!config\.json$|.*\.index\.json$).*\.(json|jinja)$|merges\.txt$|vocab\.txt$")
"""Names of the small files of a folder that its conversion contains, too."""
_COPIED = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "merges.txt", "vocab.txt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, OUT and --to."""
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP} Its weights are floats.")
    parser.add_argument(
        "out", metavar="OUT", help="Folder to create; with --to gguf:TYPE, the file."
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="FORM",
        help="int8, int4 (formats of compressed-tensors) or fp8 (blocks of 128 x 128): a folder. "
        f"gguf:TYPE: a GGUF file; TYPE is {', '.join(MIXES)}.",
    )
    parser.add_argument("--revision", metavar="TEXT", help="Branch, tag or commit on the hub.")
    parser.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Convert the model.

    Returns:
        out, and nbytes: the size of the tensors' file.

    Raises:
        ConfigError, ModelError, HubError: a flag or the model is unusable, or the output cannot be
            written.
    """
    mix = _read_target(args.to)
    settings = {"model": args.model, "revision": args.revision, "trust_remote_code": True}
    settings["language_model_only"] = True  # towers cannot be converted; see `_check_source`
    model = OpenedModel.of(settings)
    _check_source(model)
    output = UnfinishedOutput(Path(args.out).expanduser())
    if mix is not None and output.out.suffix != ".gguf":
        raise ConfigError(f"OUT {args.out}: the name of a GGUF file must end in .gguf.")
    with output.locked():
        convert = _write_folder if mix is None else _write_gguf
        nbytes = convert(model, args.to, output, quiet=args.disable_tqdm)
    print(f"{args.model} as {args.to} is in {output.out}")
    return {"out": str(output.out), "nbytes": nbytes}


def _read_target(text: str) -> str | None:
    """Return the mix of types of --to gguf:TYPE; None for other targets.

    Raises:
        ConfigError: there is no such target.
    """
    if text in _FOLDERS:
        return None
    kind, _, mix = text.partition(":")
    if kind == "gguf" and mix.upper() in MIXES:
        return mix.upper()
    if kind == "gguf":
        raise ConfigError(f"--to {text}: TYPE must be one of {', '.join(MIXES)}.")
    known = ", ".join([*_FOLDERS, "gguf:TYPE"])
    raise ConfigError(f"--to {text} is not supported; choose one of {known}.")


def _check_source(model: OpenedModel) -> None:
    """Check that the whole model can be converted, and its weights are floats.

    Raises:
        ConfigError: it cannot.
        ModelError: there are no weights, or they are damaged.
    """
    spec, name = model.spec, model.config.model.model
    if any(weight.form != PLAIN for weight in spec.weights()):
        raise ConfigError(
            f"{name} is quantized already, by {quant_method(model.checkpoint.config)}, and "
            "quantizing again would lose more; convert the original model."
        )
    if not spec.generates:
        raise ConfigError(
            f"{name} is a pooling model, and only models that generate text are supported here; "
            "serve it with --quantization."
        )
    if spec.left_out:
        raise ConfigError(
            f"{name} would be converted without {spec.left_out}; only models of text alone are "
            "supported."
        )


def _identity(model: OpenedModel, target: str) -> list[object]:
    """Return what the converted numbers depend on, besides the description of the file."""
    files = [file.resolve() for file in model.checkpoint.weight_files]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [__version__, target, stats]


def _write_folder(model: OpenedModel, target: str, output: UnfinishedOutput, *, quiet: bool) -> int:
    """Write a folder; return the size of its tensors."""
    spec, checkpoint = model.spec, model.checkpoint
    tensors = checkpoint.open(spec.expected)
    dtype = "float32" if spec.dtype == "float64" else spec.dtype
    made = make_quantized(spec, tensors, _FOLDERS[target], dtype)
    _write(model, target, output, made.file, quiet=quiet)
    config = DEFAULTS.get(spec.architecture, {}) | checkpoint.config.fields
    config |= {"architectures": [spec.architecture], "quantization_config": made.quantization}
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    texts = dict(_texts(model))
    with output.disk_errors():
        write_description(output.folder, config, texts)
    output.finish_folder()
    return made.file.nbytes


def _texts(model: OpenedModel) -> Iterator[tuple[str, str]]:
    """Yield names and contents of the small files."""
    checkpoint = model.checkpoint
    names = {"tokenizer.json", "tokenizer_config.json"}
    for pattern in _COPIED:
        names |= {name for name in checkpoint.file_names(pattern) if _TEXTS.match(name)}
    for name in sorted(names):
        if (text := checkpoint.read_text(name)) is not None:
            yield name, text


def _write_gguf(model: OpenedModel, target: str, output: UnfinishedOutput, *, quiet: bool) -> int:
    """Write a file; return its size."""
    tokenizer = Tokenizer.from_folder(model.tokenizer_path, model.config.model.tokenizer_mode)
    text = model.checkpoint.read_text("tokenizer.json")
    if text is None:
        raise ConfigError(
            f"{model.config.model.model} has no tokenizer.json, of which the tokenizer of a GGUF "
            "file is made; convert to a folder, such as --to int8, or use the model's other form."
        )
    name = model.config.model.model.rstrip("/").rpartition("/")[2]
    mix = target.partition(":")[2].upper()
    tensors = model.checkpoint.open(model.spec.expected)
    file = make_gguf(model.spec, tensors, mix, name, tokenizer, text)
    check_description(file, model.spec, tokenizer, output.folder)
    _write(model, target, output, file, quiet=quiet)
    output.finish_file(FILE_NAME)
    return file.nbytes


def _write(
    model: OpenedModel, target: str, output: UnfinishedOutput, file: TensorFile, *, quiet: bool
) -> None:
    """Print the size, and write the file with a progress bar."""
    before = sum(path.stat().st_size for path in model.checkpoint.weight_files)
    print(
        f"{output.out}: {file.nbytes:,} bytes ({file.nbytes / MIB:,.1f} MiB), "
        f"{file.nbytes / max(before, 1):.0%} of the {before / MIB:,.1f} MiB of "
        f"{model.config.model.model}"
    )
    with _progress(file.nbytes, quiet=quiet) as update:
        output.write(file, _identity(model, target), update)


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    with results.progress(total=total, desc="bytes", disable=quiet) as bar:
        if sys.stderr.isatty():
            bar.unit, bar.unit_scale, bar.unit_divisor = "B", True, 1024
        yield bar.update
