"""Servers that have what clients name."""

from types import SimpleNamespace

from octavo.router import homes
from octavo.router.homes import Homes


def test_many_names(monkeypatch):
    """One client's names do not displace another's."""
    monkeypatch.setattr(homes, "MAX_NAMES", 10)
    found, server = Homes(), SimpleNamespace()
    for i in range(3):
        found.note("few", f"resp_{i}", server)
    for i in range(100):
        found.note("many", f"resp_{i}", server)
    assert all(found.find("few", f"resp_{i}") is server for i in range(3))
    assert [i for i in range(100) if found.find("many", f"resp_{i}")] == list(range(93, 100))
    assert found.find(None, "resp_99") is None
