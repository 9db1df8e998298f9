"""vLLM's examples run on Octavo: the parts that need neither the examples nor a server."""

import os
import subprocess
import sys

import pytest

from benchmarks.conformance import examples
from benchmarks.conformance.examples import Line


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "some text\n", "works"),
        (0, "", "works"),
        (1, "a\n/x/y.py:5: error: vllm.lora is not here.\n", "vllm.lora is not here."),
        (0, "/x/y.py:5: error: in a thread.\nthe end\n", "in a thread."),
        (1, "usage: x\nx: something is missing\n", "x: something is missing"),
        (1, "Traceback (most recent call last):\n  x\nKeyError: 5\n", "TRACEBACK: KeyError: 5"),
        (0, "Traceback (most recent call last):\n  x\nKeyError: 5\n", "TRACEBACK: KeyError: 5"),
        (
            1,
            f"Traceback (most recent call last):\nRuntimeError: {examples._NO_GPU}\n",
            f"works until the script asks torch for a GPU: RuntimeError: {examples._NO_GPU}",
        ),
        (None, "step 1\n", "TRACEBACK: it did not end: step 1"),
    ],
)
def test_outcomes(status, output, expected):
    assert examples.outcome(status, output) == expected


def test_scripts_of_a_checkout(tmp_path):
    for name in ("a/run.py", "a/__init__.py", "generate/multimodal/x.py", "pooling/x_online.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "__init__" in name else "pass\n")
    assert list(examples.scripts(tmp_path)) == ["a/run.py"]
    assert examples.version(tmp_path) == tmp_path.name
    (tmp_path / "PKG-INFO").write_text("Name: vllm\nVersion: 9.9.9\n")
    assert examples.version(tmp_path) == "9.9.9"


def test_a_table_between_markers(tmp_path):
    document = tmp_path / "x.md"
    document.write_text(f"before\n{examples.BEGIN}\nold\n{examples.END}\nafter\n")
    text = examples.table([Line("a.py", "works"), Line("b.py", "x | y")], "9.9.9")
    assert text.startswith("Of the 2 scripts under `examples/` of vLLM 9.9.9 that use a text model")
    assert "| `b.py` | x \\| y |" in text
    for _ in range(2):
        examples.write(document, text)
    assert document.read_text() == f"before\n{examples.BEGIN}\n{text}\n{examples.END}\nafter\n"


def test_the_document_has_no_traceback():
    text = examples.DOCUMENT.read_text()
    begin, end = text.index(examples.BEGIN), text.index(examples.END)
    rows = [line for line in text[begin:end].splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert not [row for row in rows if examples.TRACEBACK in row]
    assert sum(row.endswith("| works |") for row in rows) > 30


def test_a_script_is_run_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv(examples.shim.MODEL_VARIABLE, str(tmp_path))
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "x.py").write_text("import vllm.multimodal\n")
    environment = {**os.environ, "PYTHONPATH": str(examples.ROOT)}
    line = examples.run(tmp_path, environment, checkout, "x.py")
    assert line.outcome.startswith("Octavo does not have vllm.multimodal (vLLM's support for pict")
    assert (tmp_path / "runs" / "x.py" / "printed by x.txt").exists()


def test_a_process_that_ends_before_it_is_ready_shows_its_output(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("no such flag")
    process = subprocess.Popen([sys.executable, "-c", ""])
    with pytest.raises(RuntimeError, match=r"does not answer:\nno such flag"):
        examples._wait_ready(process, log, "http://127.0.0.1:9/ready")
