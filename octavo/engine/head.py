"""The head node as an engine process on another machine sees it: one port, under CurveZMQ."""

from __future__ import annotations

from typing import Any

import zmq

from octavo.engine.core_messages import ReachedBy

HELLO = b"h"
"""The first message of an engine process: it is ready to receive."""
ENGINE_IN, ENGINE_OUT = b"I", b"O"
"""First letters of the names of an engine's two sockets."""
# Requests have a much lower limit elsewhere.
_MAX_MESSAGE_NBYTES = 2**30


def connect(context: zmq.Context[Any], reached: ReachedBy, name: bytes) -> zmq.Socket[bytes]:
    """Return a socket of a node or an engine that connects to the head in the background.

    Args:
        context: the context of the socket.
        reached: address and keys of the head.
        name: identity of the socket.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.curve_secretkey, socket.curve_publickey = reached.secret, reached.public
    socket.curve_serverkey = reached.public
    set_limits(socket)
    socket.connect(reached.address)
    return socket


def set_limits(socket: zmq.Socket[Any]) -> None:
    """Limit a message's size, but not a queue's length, so that no message is dropped.

    Other checks detect a stuck peer.
    """
    socket.set_hwm(0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_NBYTES)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.IPV6, 1)
