"""Messages to systemd about this service (sd_notify(3))."""

from __future__ import annotations

import logging
import socket

from octavo.config import notify_socket

logger = logging.getLogger(__name__)


def notify_ready() -> None:
    """Tell systemd that this service is ready, if it runs under `Type=notify`."""
    address = notify_socket()
    if address is None:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b"READY=1", address)
    except OSError as error:
        logger.warning("the message to systemd that the server is ready was not sent: %s", error)
