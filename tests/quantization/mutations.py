"""Damaged checkpoints of every quantized format: each loads, or is refused with a typed error.

    python -m tests.quantization.mutations --count 2000

Each format runs in a process of its own, with limits of time and memory. A file is made of one
number, which failures name: `--formats awq --first N --count 1` repeats it. Prints the messages of
the errors by their number at the end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import faulthandler
import json
import logging
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from octavo.checkpoints.base import shorten_names
from octavo.errors import ConfigError, ModelError
from tests.models.harness import generate, load
from tests.quantization.formats import FORMATS
from tests.quantization.harness import VOCAB, Array

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
MOST_SECONDS = 2.0
"""Limit of the CPU time of one file."""
MOST_NBYTES = 32 * 2**20
"""Limit of its memory, in addition to that of the files before it."""
_HANG = 60  # seconds after which a process is ended
_MAPPED = 2**30  # bytes that a process may map in addition

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_DEEP = "a list in a list"
"""Placeholder of lists that are nested too deep for `json.dumps`."""
VALUES: list[Any] = [
    None, True, False, -1, -(2**31), 0, 1, 2, 3, 4, 8, 16, 32, 48, 64, 128, 256, 2**20, 2**31 - 32,
    2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), 4.0, 4.5, "", "4", "int", "float",
    "group", "channel", "block", "tensor", "token", "gptq", "gptq_v2", "int-quantized",
    "pack-quantized", "float-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "FP8",
    "NVFP4", "nf4", "fp4", "auto_round:auto_awq", "auto_round:auto_gptq", "\0", "\ud800",
    "x" * 100_000, "Linear", "lm_head", "re:.*", "LMHead", [], ["Linear"], ["re:.*"], [1], [[]],
    [None], [2**40, 128], [128, 2**40], [64, 32], [1, 2**62], [0, 0], [-1, -1], [1.5, 32],
    [float("nan"), 32], ["lm_head"] * 1000, {}, {"a": 1}, {"re:.*": {"bits": 8}}, {"-:.*": {}},
    {"": {}}, {"lm_head": None}, _DEEP,
]  # fmt: skip
PATTERNS = [
    "(", "(a+)+$", "(a|a)*$", "(?x)(.|.) *$", "(?x:(.|.) *$)", ".*.*.*.*.*.*.*x", ".*.*.*.*.*.*x",
    ".*.*.*.*x", "(.*)(.*)(.*)(.*)x", r"(?:.*a|.*b|.*c).*x", ".*?.*?.*?.*?x", r"\w*\w*\w*\w*x",
    r"[a-z.]+[a-z.]+[a-z.]+[a-z.]+x", "(?=.*.*.*.*x)", "(?<=a*)x", r"(.*)\1\1x", ".{0,65535}" * 4,
    "a{99999999999}", "(?:" * 5000, "(?P<a>a)(?P<a>a)", r"\d{1,3}.*mlp", "(?i)LM_HEAD", "a|" * 9999,
    "[", "[]*+?{(]", r"[\]*+?{(]", "(?#(a+)+)b", "(?:a?)?(?:a?)?(?:a?)?x", r"(?:.|.){1}" * 3, "\0",
]  # fmt: skip
"""Regular expressions: damaged, slow, or only strange."""
_LISTS_OF_PATTERNS = (
    "ignore", "modules_to_not_convert", "llm_int8_skip_modules", "dynamic", "extra_config",
    "targets",
)  # fmt: skip
_FIELDS = (
    "bits", "group_size", "sym", "desc_act", "dynamic", "extra_config", "weights", "ignore",
    "kv_cache_scheme", "weight_block_size", "actorder", "data_type", "strategy", "format",
    "block_structure", "num_bits", "zero_point", "quant_algo", "exclude_modules",
)  # fmt: skip
"""Fields that some formats have."""


@dataclass
class Stored:
    """Tensor of a file."""

    dtype: str
    shape: list[Any]
    data: bytes

    def array(self) -> Array:
        return np.frombuffer(self.data, _DTYPES[self.dtype]).reshape(self.shape)


@dataclass
class Mutant:
    """Changed checkpoint."""

    config: dict[str, Any]
    tensors: dict[str, Stored]
    kind: str = ""
    """Kind of the change."""
    named: list[str] = field(default_factory=list)
    """Texts of which an error message has one."""

    def write(self, folder: Path, rng: np.random.Generator) -> None:
        """Write both files, and damage the header if `kind` says so."""
        text = json.dumps(self.config)
        text = text.replace(json.dumps(_DEEP), "[" * 900 + "]" * 900)
        (folder / "config.json").write_text(text)
        header, data, begin = {}, [], 0
        for name, stored in self.tensors.items():
            end = begin + len(stored.data)
            header[name] = {"dtype": stored.dtype, "shape": stored.shape}
            header[name]["data_offsets"] = [begin, end]  # type: ignore[assignment]
            data.append(stored.data)
            begin = end
        content = b"".join(data)
        if self.kind == "header":
            self.named.append("model.safetensors")
            head, content = _damage(rng, header, content)
            self.named += self.tensors
            with contextlib.suppress(ValueError, RecursionError):
                self.named += [shorten_names([name]) for name in json.loads(head[8:])]
        else:
            head = json.dumps(header).encode()
            head = struct.pack("<Q", len(head)) + head
        (folder / "model.safetensors").write_bytes(head + content)


def _pick(rng: np.random.Generator, items: Sequence[Any]) -> Any:
    return items[rng.integers(len(items))]


def _damage(
    rng: np.random.Generator, header: dict[str, Any], content: bytes
) -> tuple[bytes, bytes]:
    """Return a damaged header with its length, and the data."""
    names = list(header)
    name, other = (names[i] for i in rng.integers(len(names), size=2))
    entry = header[name]
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    odd = [-1, 0, 1, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 1.5, 1e308, "1", None, [], True]
    odd.append(float("nan"))
    value = _pick(rng, odd)
    length = None
    kind = rng.integers(16)
    match kind:
        case 0:
            known = [*_DTYPES, "F4", "I4", "F6_E2M3", "C64", "", 5, None]
            entry["dtype"] = _pick(rng, known)
        case 1:
            entry["shape"] = [*shape[:-1], value]
        case 2:
            shapes = [shape[::-1], [*shape, 1], [1, *shape], [], value, [value] * 40]
            entry["shape"] = _pick(rng, shapes)
        case 3:
            places = [
                [value, end], [begin, value], [end, begin], [begin + 1, end + 1], [begin],
                [begin, end, end], [begin, begin], value, [begin + 2**63, end + 2**63],
            ]  # fmt: skip
            entry["data_offsets"] = _pick(rng, places)
        case 4:
            entry["data_offsets"] = header[other]["data_offsets"]
        case 5:
            renamed = _pick(rng, [name + "x", name[1:], "", "\0", name * 99])
            header[renamed] = header.pop(name)
        case 6:
            del entry[_pick(rng, ["dtype", "shape", "data_offsets"])]
        case 7:
            header[name] = value
        case 8:
            header["__metadata__"] = _pick(rng, [{"format": 1}, value, {"a": "b"}])
        case 9:
            length = _pick(rng, [0, 1, 2**32, 2**63, 2**64 - 1, 100])
        case 10:
            content = content[: rng.integers(len(content))]
        case 11:
            content += bytes(int(rng.integers(1, 9)))
        case 12:
            big = 2 ** int(rng.integers(20, 50))
            entry["shape"], entry["data_offsets"] = [big], [begin, begin + 4 * big]
    text = json.dumps(header).encode()
    if kind == 13:
        text = text.replace(json.dumps(name).encode(), json.dumps(other).encode())  # a name twice
    if kind == 14:
        cut = text[: rng.integers(len(text))]
        text = _pick(rng, [cut, b"[" * 50_000, b"\xff" * 9, b"{}"])
    if kind == 15:
        changed = bytearray(text)
        for _ in range(int(rng.integers(1, 5))):
            changed[rng.integers(len(changed))] = rng.integers(256)
        text = bytes(changed)
    return struct.pack("<Q", len(text) if length is None else length) + text, content


def change_description(rng: np.random.Generator, fields: dict[str, Any]) -> list[str]:
    """Change a random field at any depth, remove or add one; return its name and those above it."""
    names = sorted(fields)
    name = _pick(rng, names)
    value = fields[name]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        return [name, *change_description(rng, value)]
    chance = rng.random()
    if chance < 0.15:
        del fields[name]
        return [name]
    new = _pick(rng, VALUES)
    if chance < 0.35:  # a pattern, where the format has them
        pattern = _pick(rng, PATTERNS)
        new = [f"re:{pattern}"]
        name = _pick(rng, _LISTS_OF_PATTERNS)
        if name in ("dynamic", "extra_config"):
            new = {pattern: {"group_size": 32}}
    elif chance < 0.5:
        name = _pick(rng, _FIELDS)
    fields[name] = copy.deepcopy(new)
    return [name]


def change_tensor(rng: np.random.Generator, stored: Stored) -> Stored:
    """Return a tensor with another shape, another type or other numbers."""
    array = np.array(stored.array())
    flat = array.reshape(-1)
    floating = array.dtype.kind not in "iu"
    with np.errstate(all="ignore"):
        match rng.integers(10):
            case 0 | 1 | 2 if floating:
                odd = [np.nan, np.inf, -np.inf, 0, -1, 1e38, 1e-38, 65504]
                flat[rng.integers(flat.size)] = _pick(rng, odd)
            case 0 | 1 | 2:
                info = np.iinfo(array.dtype)
                odd = [info.min, info.max, 0, 1, info.max // 2, 4, 7, 127]
                flat[rng.integers(flat.size, size=rng.integers(1, 3))] = _pick(rng, odd)
            case 3:
                raw = flat.view(np.uint8)
                for _ in range(int(rng.integers(1, 9))):
                    raw[rng.integers(raw.size)] ^= np.uint8(1 << int(rng.integers(8)))
            case 4:
                flat.view(np.uint8)[:] = rng.integers(0, 256, array.nbytes, dtype=np.uint8)
            case 5:
                array = rng.permutation(flat).reshape(array.shape)
            case 6:
                array = array.astype(np.float64).astype(_pick(rng, list(_DTYPES.values())))
            case 7:
                whole = array.reshape(array.shape or (1,))
                axis = int(rng.integers(whole.ndim))
                turned = whole.swapaxes(0, -1)
                array = _pick(rng, [whole[:-1], whole.repeat(2, axis), whole[..., None], turned])
            case 8:
                array = np.zeros((0, *array.shape[1:]), array.dtype)
            case 9:
                array = flat
    dtype = next(name for name, known in _DTYPES.items() if array.dtype == known)
    return Stored(dtype, list(array.shape), array.tobytes())


def impossible(name: str, stored: Stored) -> str | None:
    """Return the reason why a tensor cannot be right; None if no reader can know."""
    kind = name.rpartition(".")[2]
    if kind in ("input_scale", "k_scale", "v_scale") or not stored.data:
        return None
    array = stored.array()
    if re.search("scale|absmax|SCB|quant_map", kind):
        exponents = stored.dtype == "U8" and kind == "weight_scale"
        if (array == 255).any() if exponents else not np.isfinite(array.astype(np.float64)).all():
            return "a scale is not finite"
    if kind == "weight" and stored.dtype == "F8_E4M3" and np.isnan(array.astype(np.float32)).any():
        return "a number is NaN"
    if kind.endswith("g_idx") and (array.min() < 0 or array.max() * 32 >= array.size):
        return "a group is out of range"
    return None


class Corpus:
    """Damaged copies of a format's checkpoint.

    Args:
        name: a key of `FORMATS`.
        folder: an empty folder.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = FORMATS[name].make(folder, **SIZES).quantized
        self.config = json.loads((self.folder / "config.json").read_text())
        raw = (self.folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        self.tensors = {
            name: Stored(it["dtype"], it["shape"], data[slice(*it["data_offsets"])])
            for name, it in header.items()
            if name != "__metadata__"
        }
        quantized = set(header) - {"model.embed_tokens.weight", "model.norm.weight"}
        self.quantized = sorted(
            n for n in quantized if "norm" not in n and (".layers." in n or "lm_head" in n)
        )
        generate(load(self.folder), [[1, 2, 3]], 1)

    def draw(self, number: int) -> Mutant:
        """Write the checkpoint of a number, and return what it has."""
        rng = np.random.default_rng(number)
        mutant = Mutant(copy.deepcopy(self.config), dict(self.tensors))
        mutant.kind = ["description", "header", "tensor"][number % 3]
        described = mutant.config["quantization_config"]
        if mutant.kind == "description":
            if rng.random() < 0.05:
                new = _pick(rng, [*VALUES, {"quant_method": "awq"}])
                mutant.config["quantization_config"] = new
                mutant.named.append("quantization_config")
            elif rng.random() < 0.05:
                other = _pick(rng, list(FORMATS.values()))
                described["quant_method"] = other.description["quant_method"]
                mutant.named.append("quantization_config")
            else:
                for _ in range(int(rng.integers(1, 3))):
                    if described:
                        mutant.named += change_description(rng, described)
        elif mutant.kind == "tensor":
            name = _pick(rng, self.quantized)
            if rng.random() < 0.1:
                del mutant.tensors[name]
            else:
                mutant.tensors[name] = change_tensor(rng, self.tensors[name])
            mutant.named.append(name)
        mutant.write(self.folder, rng)
        return mutant

    def check(self, number: int) -> str | None:
        """Load the checkpoint of a number; return the message of its error, or None.

        Raises:
            AssertionError: the error names nothing, or the checkpoint is impossible and loads, or
                it takes too long or too much memory.
            Exception: anything but a typed error.
        """
        mutant = self.draw(number)
        before, started = _peak_nbytes(), time.process_time()
        message = None
        try:
            model = load(self.folder)
            generate(model, [[1, 2, VOCAB - 1]], 1)
        except (ModelError, ConfigError) as error:
            message = str(error)
        seconds, grown = time.process_time() - started, _peak_nbytes(reset=False) - before
        assert seconds < MOST_SECONDS, f"{mutant.kind} {mutant.named}: {seconds:.1f} s"
        assert grown < MOST_NBYTES, f"{mutant.kind} {mutant.named}: {grown / 2**20:.0f} MiB more"
        if message is None:
            for name, stored in mutant.tensors.items():
                if name in self.quantized and (reason := impossible(name, stored)):
                    raise AssertionError(f"loaded, but {name}: {reason}")
        else:
            named = [*mutant.named, "model.layers.0", "lm_head", "regular expression"]
            named += re.findall(r"config: (?:.*: )?(?:the field )?(\w+)(?:=| is missing)", message)
            assert any(text in message for text in named), f"{message[:500]}; names no {named}"
            assert message.isprintable(), repr(message[:500])
            assert len(message) < 2000, message
        return message


def _peak_nbytes(*, reset: bool = True) -> int:
    """Return the process's greatest resident memory since the last reset."""
    if reset:
        with contextlib.suppress(OSError):  # then since the start
            Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _shorten(message: str, folder: Path) -> str:
    """Return a message without what differs from file to file."""
    message = message.replace(str(folder), "MODEL")
    message = re.sub(r"model\.layers\.\d+[.\w]*|lm_head[.\w]*", "MODULE", message)
    return re.sub(r"[-\d.]*\d", "N", message)[:230]


def run_format(name: str, first: int, count: int, output: Path) -> None:
    """Check a format's files in this process; write the findings to a file after each."""
    faulthandler.enable()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    found: dict[str, Any] = {"loaded": 0, "refused": 0, "wrong": [], "messages": {}, "slowest": 0}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(name, Path(folder))
        resource.setrlimit(resource.RLIMIT_AS, (size + _MAPPED, size + _MAPPED))
        for number in range(first, first + count):
            found["last"] = number
            output.write_text(json.dumps(found))
            faulthandler.dump_traceback_later(_HANG, exit=True)
            started = time.monotonic()
            try:
                message = corpus.check(number)
            except Exception:
                found["wrong"].append((number, traceback.format_exc(limit=-3)[-1500:]))
            else:
                found["loaded" if message is None else "refused"] += 1
                if message is not None:
                    short = _shorten(message, corpus.folder)
                    found["messages"][short] = found["messages"].get(short, 0) + 1
            faulthandler.cancel_dump_traceback_later()
            found["slowest"] = max(found["slowest"], time.monotonic() - started)
        found["last"] = first + count
        output.write_text(json.dumps(found))


def run_all(names: list[str], first: int, count: int) -> int:
    """Check formats, each in processes of its own; return the number of failures."""
    messages: collections.Counter[str] = collections.Counter()
    failures = 0
    for name in names:
        begin, totals, slowest = first, collections.Counter[str](), 0.0
        while begin < first + count:
            with tempfile.NamedTemporaryFile(suffix=".json") as output:
                command = [sys.executable, "-m", __spec__.name, "--output", output.name]
                command += ["--formats", name, "--first", str(begin)]
                command += ["--count", str(first + count - begin)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                found = json.loads(Path(output.name).read_text() or "{}")
            assert found, done.stderr
            for number, text in found["wrong"]:
                print(f"--- {name} {number}: {text}", flush=True)
            if done.returncode:
                print(f"--- {name} {found['last']}: rc {done.returncode}: {done.stderr[-3000:]}")
                totals["crashed"] += 1
            totals += {kind: found[kind] for kind in ("loaded", "refused")}
            totals["wrong"] += len(found["wrong"])
            slowest = max(slowest, found["slowest"])
            messages.update(found["messages"])
            begin = found["last"] + bool(done.returncode)
        failures += totals["wrong"] + totals["crashed"]
        print(f"{name:24} {dict(totals)}, slowest {slowest:.2f} s", flush=True)
    for message, times in messages.most_common():
        print(f"{times:6} {message}")
    return failures


def main() -> None:
    """Check formats and count the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS], default=[*FORMATS])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if args.output is not None:
        run_format(*args.formats, args.first, args.count, args.output)
        return
    raise SystemExit(run_all(args.formats, args.first, args.count) > 0)


if __name__ == "__main__":
    main()
