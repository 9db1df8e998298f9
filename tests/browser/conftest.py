"""One browser for all tests, and one server with the built-in model."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

CHROMIUM = shutil.which("chromium")
START_SECONDS = 60


class Server:
    """A running `octavo serve` or `octavo router`.

    Args:
        flags: the command and its flags.
        folder: folder for its log and caches.
    """

    def __init__(self, *flags, folder, key=None):
        self.log = folder / "server.log"
        self.key = key
        command = [sys.executable, "-m", "octavo", *flags, "--host", "127.0.0.1", "--port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.url = self._wait()

    def _wait(self):
        """Return the address, once the server is ready."""
        for _ in range(START_SECONDS * 20):
            assert self.process.poll() is None, self.log.read_text()
            found = next((w for w in self.log.read_text().split() if "http://127.0.0.1:" in w), "")
            if found:
                url = found[found.index("http://") :].rstrip(".,/")
                with contextlib.suppress(urllib.error.URLError):
                    urllib.request.urlopen(f"{url}/ready")
                    return url
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def json(self, path):
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, None, headers)) as got:
            return json.load(got)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Return a function that starts a server; all are stopped at the end."""
    servers = []

    def start(*flags, key=None):
        servers.append(Server(*flags, folder=tmp_path_factory.mktemp("server"), key=key))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server):
    """Return a server with the built-in model."""
    return start_server("serve", "octavo/stories")


@pytest.fixture(scope="session")
def browser():
    """Return Debian's Chromium, driven by Playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; see the README")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield browser
        browser.close()


@pytest.fixture
def errors():
    """Return the list of the page's errors, which must be empty at the end of a test."""
    found = []
    yield found
    assert not found


@pytest.fixture
def open_page(browser, server, errors):
    """Return a function that opens the page in a context of its own."""
    contexts = []

    def open_(path="/", of=server, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda line: errors.append(line.text) if "Content Security" in line.text else None,
        )
        page.goto(of.url + path)
        return page

    yield open_
    for context in contexts:
        context.close()
