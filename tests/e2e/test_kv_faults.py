"""A short form of the fault benchmark, on real engines."""

import kv_faults
import pytest

KINDS = [
    *("memory_bits", "file_bits", "file_cut", "file_full", "producer_killed", "forged"),
    *("not_signed", "stranger", "aborted", "cache_reset", "nobody_comes"),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What it sets is not left to others."""
    for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.syspath_prepend("")


def test_no_fault_changes_an_answer(capsys):
    arguments = ["--faults", "11", "--streams", "8", "--pause", "0.1", "--kinds", *KINDS]
    status = kv_faults.main(arguments)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "0 lost, changed or left" in printed
    assert "external_prefix_cache_hits" in printed


def test_a_changed_answer_is_seen(monkeypatch):
    """What is compared is each token and each logprob."""

    class Row:
        logprob = -1.0

    class One:
        token_ids, logprobs = [1, 2], [{1: Row}, {2: Row}]

    class Output:
        outputs = [One]

    before = kv_faults.answer_of(Output)
    monkeypatch.setattr(Row, "logprob", -1.0 - 2**-40)
    changed = kv_faults.answer_of(Output)
    monkeypatch.setattr(One, "token_ids", [1, 3])
    assert len({before, changed, kv_faults.answer_of(Output)}) == 3
