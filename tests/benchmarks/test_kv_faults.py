"""Faults of keys and values, in the short form."""

import kv_faults

from tests.hybrid import save_hybrid


def test_what_is_asked_for_begins_alike_and_is_always_the_same():
    asked = kv_faults.bodies(4, 20)
    assert asked == kv_faults.bodies(4, 20)
    assert len(asked) == 12
    beginnings = {body["prompt"].partition(".")[0] for body in asked}
    assert 1 < len(beginnings) < 12


def test_twelve_faults_under_six_streams(capsys, tmp_path):
    """The model has attention and recurrent states: both are stored and handed over."""
    flags = ["--faults", "12", "--streams", "6", "--max-tokens", "16"]
    flags += ["--model", save_hybrid(tmp_path)]
    flags += ["--flags", "--num-threads", "1", "--max-model-len", "512"]
    passed = kv_faults.main([*flags, "--no-warm-spare"]) == 0
    out = capsys.readouterr().out
    assert passed, out
    assert "12 faults" in out
    assert ", 0 lost, changed or left" in out
