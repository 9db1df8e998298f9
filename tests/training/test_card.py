from __future__ import annotations

from training.card import _overfitting, write_extra_card
from training.loop import History


def test_card_tells_of_overfitting() -> None:
    worse = History(heldout=[(10, 3.0), (20, 2.0), (30, 2.3)])
    [warning, _] = _overfitting(worse)
    assert "after 20 of 30 steps" in warning
    assert "perplexity was 7.39" in warning
    assert _overfitting(History(heldout=[(10, 3.0), (20, 2.01), (30, 2.02)])) == []


def test_card_of_a_head_gives_its_agreement(tmp_path) -> None:
    history = History(tokens=2_000_000, seconds=120.0)
    write_extra_card(tmp_path, "medusa", history, 1234, [0.5, 0.25])
    card = (tmp_path / "README.md").read_text()
    assert "50 %, 25 %" in card
    assert "1,234 parameters, trained for 2.0 minutes on 2.0 M tokens" in card
