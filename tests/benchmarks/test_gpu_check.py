"""The GPU check without a GPU: its parts at toy sizes on a CPU, its processes, its script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pip
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.models.registry import read_spec
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.worker.graphs import graph_sizes

pytest.importorskip("triton", reason="the package triton is not installed")

import gpu_check
from gpu_check import Card, Row, Sizes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 60,
    "max_position_embeddings": 24,
}
TOY = Sizes(
    copy=2**16,
    product=16,
    tiny=SHAPE,
    prompts=(1, 9),
    answer=2,
    target=12,
    others=2,
    norm=(2, 16),
    gate=(2, 16),
    sampling=(2, 50),
    heads=(2, 1, 16),
    written=16,
    decode=((1, 300), (2, 20)),
    decode_fp8=(1, 20),
    long_context=300,
    prefill=20,
    linear=32,
    linear_rows=(1, 3),
    models={"toy": SHAPE},
    batches=(1, 2),
    busy_batch=2,
    decode_prompt=4,
    settle=2,
    steps=1,
    repeats=1,
    prefills=(4, 16),
    long_prefill=16,
    mix=2,
)
NAMES = ["card", "parity", "invariance", "kernels", "toy"]


class Event:
    """torch.cuda.Event on a CPU: everything before `record` is over already."""

    asked = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        Event.asked += 1
        return Event.asked < 3

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) * 1e3


class Cpu(gpu_check.Gpu):
    """A CPU in the GPU's place, with interpreted kernels."""

    device = torch.device("cpu")
    settings = {"device": "cpu", "attention_backend": "triton"}  # noqa: RUF012
    flush = 64
    repeats = 1

    def name(self) -> str:
        return "a CPU"


class NativeCpu(Cpu):
    settings = {"device": "cpu"}  # noqa: RUF012


class Replayed:
    """What torch.cuda.CUDAGraph does, as far as the check is concerned."""

    def __init__(self, step):
        self.replay = torch.inference_mode()(step)
        self.replay()


def llm_with_graphs(**settings) -> LLM:
    """An engine that captures decode steps, as it would on a GPU."""
    llm = LLM(**settings)
    with torch.inference_mode():
        gpu_check.device_steps(llm).capture(graph_sizes(settings["max_num_seqs"]), capture=Replayed)
    return llm


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand-ins for what of torch.cuda times; the cycles that were slept."""
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append, raising=False)
    Event.asked = 0
    return cycles


def run_part(part: str, folder: Path, gpu: type[Cpu] = Cpu, sizes: Sizes = TOY) -> list[Row]:
    (folder / f"{part}.jsonl").unlink(missing_ok=True)
    gpu_check.run_part(part, gpu, sizes, folder)
    return [Row(**json.loads(x)) for x in (folder / f"{part}.jsonl").read_text().splitlines()]


def put_card(folder: Path) -> None:
    card = {"name": "a CPU", "bandwidth": 1e9, "peak": 1e9}
    (folder / "card.json").write_text(json.dumps(card))


def test_the_card(events: list[int], tmp_path: Path) -> None:
    rows = run_part("card", tmp_path)
    assert [row.what for row in rows] == [
        "card: copy, read and written",
        "card: bfloat16 product of 16^3",
    ]
    card = Card(**json.loads((tmp_path / "card.json").read_text()))
    assert card.name == "a CPU"
    assert card.bandwidth > 0
    assert card.peak > 0
    first = events[0]
    assert events == [first, 2 * first, 4 * first, 4 * first], "late twice, then in time"


def test_parity(events: list[int], tmp_path: Path) -> None:
    """On the native kernels, which are right, so that the check has to say so."""
    sizes = Sizes(prompts=(1, 30, 70), answer=8)
    exact, rounded = run_part("parity", tmp_path, NativeCpu, sizes)
    assert exact.good
    assert exact.figure.startswith("24 of 24 greedy tokens equal")
    assert rounded.good, rounded.figure


def test_parity_finds_what_is_wrong(
    events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def wrong(bench, model, **settings):
        right = (file := Path(model, "config.json")).read_text()
        file.write_text(json.dumps(json.loads(right) | {"rms_norm_eps": 0.5}))
        with engine(bench, model, **settings) as llm:
            file.write_text(right)
            yield llm

    engine = gpu_check.engine
    monkeypatch.setattr(gpu_check, "engine", wrong)
    sizes = Sizes(prompts=(1, 30), answer=4)
    for row in run_part("parity", tmp_path, NativeCpu, sizes):
        assert row.good is False, row.figure


def test_invariance(events: list[int], tmp_path: Path) -> None:
    checked, shown = run_part("invariance", tmp_path)
    assert (checked.aim, checked.good) == ("the same bits", True)
    assert (shown.aim, shown.good) == ("", None)


def test_kernels(events: list[int], tmp_path: Path) -> None:
    put_card(tmp_path)
    rows = {row.what: row for row in run_part("kernels", tmp_path)}
    assert len(rows) == 11
    assert rows["kernel: attention, decode of 1 x 300"].aim == "70%"
    assert rows["kernel: attention, decode of 2 x 20"].good is None
    assert rows["kernel: attention, decode of 1 x 20, FP8 cache"].good is None
    assert "matrix peak" in rows["kernel: attention, prefill of 20"].figure
    for row in rows.values():
        assert "%" in row.figure, row


def test_a_model(events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_card(tmp_path)
    monkeypatch.setattr(gpu_check, "LLM", llm_with_graphs)
    rows = {row.what: row for row in run_part("toy", tmp_path)}
    assert list(rows) == [
        "toy: ready, 2 decode steps captured",
        "toy: decode, batch 1",
        "toy: decode, batch 1, without graphs",
        "toy: decode, batch 2",
        "toy: decode, batch 2, without graphs",
        "toy: prefill of 4",
        "toy: prefill of 16",
        "toy: mix of 2 requests",
    ]
    aims = [(row.aim, row.good is None) for row in rows.values()]
    assert aims == [
        ("", True),
        ("1.35 times", False),
        ("", True),
        ("idle 5%", False),
        ("", True),
        ("", True),
        ("60%", False),
        ("", True),
    ]


def test_only_a_step_that_has_its_inputs_is_run_again(
    events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "LLM", llm_with_graphs)
    bench = gpu_check.Bench(Cpu(), TOY, tmp_path, "toy")
    model = gpu_check.write_config(str(tmp_path), SHAPE)
    with gpu_check.engine(bench, model, load_format="dummy", max_num_seqs=2) as llm:
        gpu_check.decode_seconds(llm, TOY, 2)
        gpu_check.last_step(llm, TOY, 2)()
        gpu_check.decode_seconds(llm, TOY, 1)
        with pytest.raises(RuntimeError, match="no decode step of 2 requests"):
            gpu_check.last_step(llm, TOY, 2)


def test_without_graphs_they_are_put_aside_and_come_back(tmp_path: Path) -> None:
    model = gpu_check.write_config(str(tmp_path), SHAPE)
    settings = Cpu.settings | {"skip_tokenizer_init": True, "load_format": "dummy"}
    with llm_with_graphs(model=model, max_num_seqs=2, **settings) as llm:
        before = gpu_check.device_steps(llm)._graphs
        with gpu_check.graphs_off(llm):
            assert gpu_check.device_steps(llm)._graphs == {}
        assert gpu_check.device_steps(llm)._graphs is before


def test_what_goes_wrong_in_a_part_is_a_row(tmp_path: Path) -> None:
    (row,) = run_part("kernels", tmp_path)
    assert (row.what, row.aim, row.good) == ("kernels", "runs", False)
    assert "limits were not measured" in row.figure


# ---- arithmetic ----


@pytest.mark.parametrize("shape", [gpu_check.TINYLLAMA, gpu_check.LLAMA_3_8B])
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_that_a_step_reads(shape: dict[str, int], tied: bool, tmp_path: Path) -> None:
    full = gpu_check.LLAMA | shape | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(full))
    rotary = 4 * shape["hidden_size"] // shape["num_attention_heads"]
    held = read_spec(tmp_path).weight_nbytes("bfloat16", max_model_len=1) - rotary
    embeddings = 0 if tied else 2 * shape["vocab_size"] * shape["hidden_size"]
    assert gpu_check.read_nbytes(full) == held - embeddings


def test_operations_of_a_prompt() -> None:
    shape = gpu_check.LLAMA_3_8B
    tokens = 4096
    products = 2 * tokens * 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    logits = 2 * 4096 * 128256
    # Queries with keys, and weights with values; causal: half of them.
    attention = 32 * 2 * (2 * tokens**2 * 4096) / 2
    assert gpu_check.prefill_flop(shape, tokens) == products + logits + attention


class Failing:
    """An engine whose requests end early."""

    def __init__(self, *answers: CompletionOutput) -> None:
        self.answers = answers

    def generate(self, prompts, params, *, use_tqdm):
        return [
            RequestOutput(str(i), None, [], None, [a], True) for i, a in enumerate(self.answers)
        ]


def test_a_failed_request_is_no_figure() -> None:
    params = SamplingParams(max_tokens=2)
    good = CompletionOutput(0, "", [5, 6], finish_reason="length")
    assert gpu_check.generate(Failing(good), [[3]], params) == [good]
    for bad in (
        CompletionOutput(0, "", [], finish_reason="error", stop_reason="CUDA is gone"),
        CompletionOutput(0, "", [5], finish_reason="length"),
        CompletionOutput(0, "", [5, 6], finish_reason="stop"),
    ):
        with pytest.raises(RuntimeError, match=rf"of 2 tokens: {bad.finish_reason}"):
            gpu_check.generate(Failing(good, bad), [[3], [4]], [params, params])


# ---- processes ----

CHILD = """
    import json, os, sys, time
    part, folder = sys.argv[2], sys.argv[4]
    def add(what):
        with open(f"{folder}/{part}.jsonl", "a") as file:
            file.write(json.dumps(dict(what=what, figure="1", aim="", good=None)) + "\\n")
    if part == "card":
        with open(folder + "/card.json", "w") as file:
            json.dump(dict(name="a card", bandwidth=1.0, peak=1.0), file)
    add(part + " began")
    if part == "crash":
        os.abort()
    if part == "hang":
        time.sleep(60)
    add(part + " ended")
"""


def check(tmp_path: Path, *names: str, out: Path | None = None) -> int:
    child = tmp_path / "child.py"
    child.write_text(textwrap.dedent(CHILD))
    return gpu_check.check([sys.executable, str(child)], names, out)


def test_a_crash_leaves_a_row_and_the_other_rows(tmp_path: Path, capfd) -> None:
    out = tmp_path / "out.json"
    assert check(tmp_path, "card", "crash", "last", out=out) == 1
    data = json.loads(out.read_text())
    assert data["card"]["name"] == "a card"
    assert list(data["seconds"]) == ["card", "crash", "last"]
    assert [(row["what"], row["good"]) for row in data["rows"]] == [
        ("card began", None),
        ("card ended", None),
        ("crash began", None),
        ("crash", False),
        ("last began", None),
        ("last ended", None),
    ]
    shown = capfd.readouterr().out
    assert "Octavo on a card" in shown
    assert "crashed with status -6" in shown
    assert "last ended" in shown


def test_all_well(tmp_path: Path) -> None:
    assert check(tmp_path, "card", "last") == 0


def test_time_runs_out(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "LIMIT", 0.5)
    monkeypatch.setattr(gpu_check, "LAST_START", 0.3)
    out = tmp_path / "out.json"
    assert check(tmp_path, "hang", "late", out=out) == 1
    rows = {row["what"]: row["figure"] for row in json.loads(out.read_text())["rows"]}
    assert rows["hang"].startswith("ended after ")
    assert rows["late"].startswith("skipped")


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(gpu_check, "check", lambda *args: calls.append(args) or 1)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--quick", "--out", "rows.json"])
    assert gpu_check.main() == 1
    ((child, names, out),) = calls
    assert child[1:] == [gpu_check.__file__, "--quick"]
    assert names == ["card", "parity", "invariance", "kernels", "tinyllama-1.1b"]
    assert out == Path("rows.json")

    monkeypatch.setattr(gpu_check, "run_part", lambda *args: calls.append(args))
    argv = ["gpu_check.py", "--part", "card", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert gpu_check.main() == 0
    assert calls[-1] == ("card", gpu_check.Gpu, gpu_check.FULL, tmp_path)


# ---- the script ----


def run_script(script: Path, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", script, *words],
        env=os.environ | {"PYTHON": sys.executable} | env,
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    result = run_script(SCRIPT)
    assert result.returncode == 3
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "no GPU" in line


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    """A copy of the script, a torch that sees a GPU, wheels without octavo's kernels.

    Its Python has nothing installed but pip: this one's octavo is not to be seen.
    """
    for name in ("repo/benchmarks", "modules", "wheels"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "repo" / "benchmarks")
    modules = tmp_path / "modules"
    (modules / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: True)")
    for name in ("triton", "transformers"):
        (modules / f"{name}.py").touch()
    (modules / "pip").symlink_to(Path(pip.__file__).parent)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    main = tmp_path / "repo" / "benchmarks" / "gpu_check.py"
    main.write_text("import sys, octavo\nprint(octavo.__file__, sys.argv[1:])\nsys.exit(1)\n")
    write_wheel(tmp_path / "wheels", "octavo", ["octavo/__init__.py", "octavo/llm.py"])
    return tmp_path


def write_wheel(folder: Path, name: str, files: list[str]) -> None:
    info = f"{name}-0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\nRequires-Dist: torch\n"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-0-py3-none-any.whl", "w") as wheel:
        for file in files:
            wheel.writestr(file, "")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")


def run_scene(scene: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    script = scene / "repo" / "benchmarks" / "gpu_check.sh"
    return run_script(
        script, *words, PYTHONPATH=str(scene / "modules"), PYTHON=str(scene / "python")
    )


def test_what_is_missing_is_named_in_one_line(scene: Path) -> None:
    result = run_scene(scene, "--wheels", scene / "wheels")
    assert result.returncode == 4
    (line,) = result.stderr.splitlines()
    assert "No module named 'octavo._native'" in line
    assert "--wheels" in line


@pytest.mark.parametrize("torch_says", ["raise ImportError", "class cuda: is_available = int"])
def test_a_gpu_that_torch_cannot_use(torch_says: str, scene: Path) -> None:
    (scene / "modules" / "torch.py").write_text(torch_says)
    driver = """
        class c_int:
            def __init__(self, value): self.value = value
        def byref(x): return x
        class CDLL:
            def __init__(self, name): pass
            def cuInit(self, flags): return 0
            def cuDeviceGetCount(self, count): count.value = 1; return 0
    """
    (scene / "modules" / "ctypes.py").write_text(textwrap.dedent(driver))
    result = run_scene(scene)
    assert result.returncode == 4
    (line,) = result.stderr.splitlines()
    assert "no torch that can use it" in line


def test_neither_torch_nor_a_gpu(scene: Path) -> None:
    (scene / "modules" / "torch.py").write_text("raise ImportError")
    result = run_scene(scene)
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert "no GPU" in line


def test_octavo_from_a_wheel(scene: Path) -> None:
    files = ["octavo/__init__.py", "octavo/llm.py", "octavo/_native.py"]
    write_wheel(scene / "wheels", "octavo", files)
    result = run_scene(scene, "--wheels", scene / "wheels", "--out", "rows.json", "--quick")
    assert result.returncode == 1, "the check's own status"
    out = Path("rows.json").resolve()
    octavo = scene / "repo" / "build" / "gpu_check" / "octavo" / "__init__.py"
    assert result.stdout == f"{octavo} {['--out', str(out), '--quick']}\n"
    assert result.stderr == ""
