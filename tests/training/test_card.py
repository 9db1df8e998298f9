from __future__ import annotations

from pathlib import Path

from training.card import _overfitting, write_head_card
from training.loop import History


def test_card_tells_of_overfitting() -> None:
    worse = History(heldout=[(10, 3.0), (20, 2.0), (30, 2.3)])
    [warning, _] = _overfitting(worse)
    assert "after 20 of 30 steps" in warning
    assert "perplexity was 7.39" in warning
    assert _overfitting(History(heldout=[(10, 3.0), (20, 2.01), (30, 2.02)])) == []


def test_card_of_a_head_gives_its_acceptance(tmp_path: Path) -> None:
    history = History(tokens=2_000_000, seconds=120.0)
    kept = {0.0: ([0.5, 0.25], [0.5, 0.625]), 0.8: ([0.4, 0.2], [0.4, 0.48])}
    write_head_card(tmp_path, "medusa", "stories", history, 1234, kept)
    card = (tmp_path / "README.md").read_text()
    assert "| 0.8 | the last one is right if those before are | 40 % | 20 % |" in card
    assert "| 0 | kept on average | 0.50 | 0.62 |" in card
    assert "1,234 parameters (bfloat16), trained for 2 minutes on 2.0 M tokens" in card
