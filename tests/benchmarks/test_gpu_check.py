"""GPU check without a GPU: its processes, its script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pip
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import gpu_check

from tests.benchmarks.gpu.harness import run_part

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"


def test_what_goes_wrong_in_a_part_is_a_row(tmp_path: Path) -> None:
    (row,) = run_part("kernels", tmp_path)
    assert (row.what, row.aim, row.good) == ("kernels", "runs", False)
    assert "limits were not measured" in row.figure


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
    parts = ["card", "parity", "invariance", "families", "kernels", "quantized", "lora"]
    assert names == [*parts, "tinyllama-1.1b"]
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
    """Return a copy of the script, a torch that sees a GPU, wheels without octavo's kernels.

    Its Python has only pip installed: it must not find this environment's octavo.
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
    modules = ["__init__", "llm", "_native", "executor/__init__", "executor/uniproc"]
    files = [f"octavo/{module}.py" for module in modules]
    write_wheel(scene / "wheels", "octavo", files)
    result = run_scene(scene, "--wheels", scene / "wheels", "--out", "rows.json", "--quick")
    assert result.returncode == 1, "the check's own status"
    out = Path("rows.json").resolve()
    octavo = scene / "repo" / "build" / "gpu_check" / "octavo" / "__init__.py"
    assert result.stdout == f"{octavo} {['--out', str(out), '--quick']}\n"
    assert result.stderr == ""
