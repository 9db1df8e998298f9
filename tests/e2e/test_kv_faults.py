"""A short form of the fault benchmark, on real engines."""

import subprocess
import sys

import kv_faults

KINDS = [
    *("memory_bits", "file_bits", "file_cut", "file_full", "producer_killed", "forged"),
    *("not_signed", "stranger", "aborted", "cache_reset", "nobody_comes"),
]


def test_no_fault_changes_an_answer():
    command = [sys.executable, kv_faults.__file__, "--faults", "11", "--streams", "8"]
    command += ["--pause", "0.1", "--kinds", *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost, changed or left" in done.stdout


def test_a_changed_answer_is_seen(monkeypatch):
    """What is compared is each token and each logprob."""

    class Row:
        logprob = -1.0

    class One:
        token_ids, logprobs = (1, 2), ({1: Row}, {2: Row})

    class Output:
        outputs = (One,)

    before = kv_faults.answer_of(Output)
    monkeypatch.setattr(Row, "logprob", -1.0 - 2**-40)
    changed = kv_faults.answer_of(Output)
    monkeypatch.setattr(One, "token_ids", (1, 3))
    assert len({before, changed, kv_faults.answer_of(Output)}) == 3
