"""Messages to systemd."""

import logging
import socket

import pytest

from octavo.system.notify import notify_ready


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_that_the_server_is_ready(tmp_path, monkeypatch, abstract):
    address = f"@octavo-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + address[1:] if abstract else address)
        receiver.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify_ready()
        assert receiver.recv(100) == b"READY=1"


def test_no_systemd(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    with caplog.at_level(logging.WARNING):
        notify_ready()
        assert not caplog.records
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nothing"))
        notify_ready()
    assert "message to systemd that the server is ready was not sent" in caplog.text
