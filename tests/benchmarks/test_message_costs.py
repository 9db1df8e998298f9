"""Costs of messages: docs/scaling.md has only measured ones."""

import sys

from benchmarks import message_costs


def test_everything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["message_costs.py", "--rounds", "20"])
    monkeypatch.setattr(message_costs, "ENGINES", (1, 3))
    message_costs.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(float(line.split()[-2]) > 0 for line in lines)
    assert "engines: 3" in lines[-1]
