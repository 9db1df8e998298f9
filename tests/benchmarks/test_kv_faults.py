"""Faults of keys and values, in the short form."""

import kv_faults


def test_what_is_asked_for_begins_alike_and_is_always_the_same():
    asked = kv_faults.bodies(4, 20)
    assert asked == kv_faults.bodies(4, 20)
    assert len(asked) == 12
    beginnings = {body["prompt"].partition(".")[0] for body in asked}
    assert 1 < len(beginnings) < 12


def test_twelve_faults_under_six_streams(capsys):
    flags = ["--faults", "12", "--streams", "6", "--max-tokens", "16"]
    flags += ["--flags", "--num-threads", "1", "--max-model-len", "512"]
    passed = kv_faults.main([*flags, "--no-warm-spare"]) == 0
    out = capsys.readouterr().out
    assert passed, out
    assert "12 faults" in out
    assert ", 0 lost, changed or left" in out
