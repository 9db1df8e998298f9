"""Viewer of a server's or router's engine view."""

import json
import time
from contextlib import contextmanager

import httpx


@contextmanager
def watching(url, key=None):
    """Yield an iterator of the events of a view."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{url}/v1/engine/view", headers=headers, timeout=120) as response:
        assert response.status_code == 200

        def events():
            name = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))
                elif line.startswith(":"):
                    yield "comment", {}  # the server lives, so that `until` looks at the clock

        yield events()


def until(events, found, seconds=120):
    """Return the first event for which `found(name, event)` is true."""
    end = time.monotonic() + seconds
    for name, event in events:
        if found(name, event):
            return event
        assert time.monotonic() < end, "the event did not come"
    raise AssertionError("the stream has ended")
