"""Perplexity in other engines: the sum, the engines' logs, engines without a figure."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import perplexity
import pytest
from peers import likelihood
from peers.installing import CompareError, write_marker
from peers.likelihood import Figure, llama_note, negative_log_likelihood, openvino_note

QUANTIZE = """\
warning: blk.0.ffn_down.weight - ncols    172 not divisible by  32 -> falling back to     f16
[ 1/ 4] output_norm.weight   - [    64,      1,      1,      1], type =    f32, size =    0.000 MiB
[ 2/ 4] token_embd.weight    - [    64,     10,      1,      1], type =   bf16, converting to q8_0 .. size = 1 MiB -> 1 MiB
[ 3/ 4] blk.0.attn_k.weight  - [    64,     20,      1,      1], type =   bf16, converting to q4_0 .. size = 1 MiB -> 1 MiB
[ 4/ 4] blk.0.ffn_up.weight  - [    64,     20,      1,      1], type =   bf16, converting to q4_0 .. size = 1 MiB -> 1 MiB
"""  # noqa: E501

EXPORT = """\
INFO:nncf:Statistics of the bitwidth distribution:
┍━━━━━━━━━━━━━━━━━━━━━━━━━━━┯━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┯━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┑
│ Weight compression mode   │ % all parameters (layers)   │ % ratio-defining parameters (layers)   │
├───────────────────────────┼─────────────────────────────┼────────────────────────────────────────┤
│ int8_asym, per-channel    │ 34% (6 / 37)                │ 0% (0 / 30)                            │
├───────────────────────────┼─────────────────────────────┼────────────────────────────────────────┤
│ int4_asym, group size 64  │ 66% (30 / 37)               │ 100% (30 / 30)                         │
"""


def test_negative_log_likelihood():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 50, (5, 7)).astype(np.float32)  # large: exp alone would overflow
    logits += 800
    row = [3, 0, 6, 6, 1]
    expected = 0.0
    for scores, token in zip(logits.astype(np.float64), row[1:], strict=False):
        shifted = scores - scores[token]
        expected += math.log(sum(math.exp(x) for x in shifted))
    assert negative_log_likelihood(logits, row) == pytest.approx(expected, rel=1e-9)
    even = np.zeros((3, 4), np.float32)
    assert negative_log_likelihood(even, [1, 2, 3]) == pytest.approx(2 * math.log(4))


def test_notes():
    assert llama_note(QUANTIZE) == "80% q4_0, 20% q8_0"
    assert llama_note("nothing of the kind") == ""
    assert openvino_note(EXPORT) == "34% int8_asym per-channel, 66% int4_asym group size 64"
    assert openvino_note("nothing of the kind") == ""


def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Path:
    """Return a folder of peers with `llama` installed, whose interpreter runs `source`."""
    python = tmp_path / "llama" / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\n{source}")
    python.chmod(0o755)
    write_marker(tmp_path / "llama", {})

    def convert(root: Path, model: Path, file: Path, log: Path) -> None:
        file.write_bytes(bytes(2**19))
        log.write_text("")

    def quantize(root: Path, plain: Path, weights: str, file: Path, log: Path) -> None:
        if weights == "int4":
            raise CompareError("rows of 7 weights cannot be cut into groups")
        assert plain.exists()
        file.write_bytes(bytes(2**18))
        log.write_text(QUANTIZE)

    monkeypatch.setattr(likelihood.llama, "convert", convert)
    monkeypatch.setattr(likelihood.llama, "quantize", quantize)
    return tmp_path


# Replaces the engine: its answer is log 2 for each token, and 1 more for a token if quantized.
ANSWER = """
import json, sys
*_, name, root, model, rows, out = sys.argv
count = sum(len(row) - 1 for row in json.load(open(rows)))
json.dump(count * 0.6931471805599453 + ("int8" in model), open(out, "w"))
"""


def test_measure(tmp_path, monkeypatch):
    root = fake_engine(tmp_path, monkeypatch, ANSWER)
    work = tmp_path / "work"
    work.mkdir()
    rows = [[1, 2, 3], [4, 5]]
    found = likelihood.measure("llama", root, tmp_path, "bf16", rows, work)
    assert found == Figure(pytest.approx(2.0), 0.5, "bf16")
    assert json.loads((work / "rows.json").read_text()) == rows
    found = likelihood.measure("llama", root, tmp_path, "int8", rows, work)
    assert found == Figure(pytest.approx(2 * math.exp(1 / 3)), 0.25, "80% q4_0, 20% q8_0")
    with pytest.raises(CompareError, match=r"compare\.py install --peers openvino"):
        likelihood.measure("openvino", root, tmp_path, "bf16", rows, work)


def test_table(tmp_path, monkeypatch, capsys):
    root = fake_engine(tmp_path, monkeypatch, ANSWER)
    perplexity.print_peers(root, tmp_path, [[1, 2, 3, 4]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["llama", "bf16", "2.0000", "1.0000"]
    assert lines[3].split()[:4] == ["llama", "int8", "2.7912", "1.3956"]
    assert (
        lines[4] == "llama      int4       no figure: rows of 7 weights cannot be cut into groups"
    )
    assert lines[5].startswith("openvino   bf16       no figure: openvino is not installed")
    assert len(lines) == 6


def test_an_engine_that_fails(tmp_path, monkeypatch, capsys):
    root = fake_engine(tmp_path, monkeypatch, 'raise SystemExit("unknown architecture")\n')
    perplexity.print_peers(root, tmp_path, [[1, 2]])
    out = capsys.readouterr().out
    assert "no figure" in out
    assert "unknown architecture" in out
    assert "int8" not in out  # it has nothing to be compared with
