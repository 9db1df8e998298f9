"""One server with the built-in model for all tests of the page, and a browser for each file."""

import json
import os
import re
import shutil

import pytest

from tests.e2e.harness import serve

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Return a server with the built-in model."""
    with serve(tmp_path_factory.mktemp("server"), model="octavo/stories", spare=True) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    """Return Debian's Chromium, driven by Playwright; nothing is downloaded.

    Playwright keeps an event loop running in this thread, which other tests must not meet.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; the README says how to install it")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def one_page(browser, server):
    """Return a page for tests of its modules, which leave nothing in it."""
    page = browser.new_page()
    page.goto(server.url)
    yield page
    page.close()


@pytest.fixture
def open_page(browser, request):
    """Return a function that opens the page in a context of its own.

    At the end of the test, no page may have had an error of a script or of the security policy, or
    have asked another server for something.
    """
    contexts, errors = [], []

    def open_(path="/", url=None, **options):
        url = url or request.getfixturevalue("server").url
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(100_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: "Content Sec" in line.text and errors.append(line.text))
        page.on("request", lambda sent: sent.url.startswith((url, "blob:")) or errors.append(sent))
        page.goto(url + path)
        if page.locator("[role=tabpanel]").count():  # the view's module has been loaded
            page.wait_for_selector("[role=tabpanel]:not([hidden]):not([inert])")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not errors


def files_of(page):
    """Return the field for files of the benchmark view, once the view's module serves it."""
    files = page.get_by_label("Files")
    files.evaluate(
        "async input => { while (!input.onchange) await new Promise(requestAnimationFrame); }"
    )
    return files


class Chat:
    """The chat of a page, as a visitor uses it."""

    def __init__(self, page):
        self.page = page
        self.bodies = []
        """Bodies of the requests for answers."""
        page.on("request", self._note)
        page.get_by_role("button", name="Send", exact=True).wait_for()

    def _note(self, request):
        if request.url.endswith("/chat/completions"):
            self.bodies.append(request.post_data_json)

    def send(self, text, wait=True):
        """Send a message; wait until its answer is complete."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")
        if wait:
            self.wait()

    def wait(self):
        """Wait until the answer is complete."""
        self.page.locator("article[aria-busy=true]").wait_for(state="detached")
        self.page.get_by_role("button", name="Send", exact=True).wait_for()

    def wait_for_letters(self, number):
        """Wait until the last message has at least a number of letters."""
        text = re.compile(f".{{{number}}}", re.DOTALL)
        self.last.locator(".body").last.filter(has_text=text).wait_for()

    def set(self, **settings):
        """Change settings."""
        for name, value in settings.items():
            field = self.page.locator(f"#set-{name}")
            if not field.is_visible():
                self.page.get_by_text("More parameters").click()
            if field.evaluate("field => field.localName") == "select":
                field.select_option(value)
            else:
                field.fill(value)

    def messages(self):
        """Return the pairs of role and text of the shown messages."""
        found = self.page.locator(".log article").all()
        return [
            (m.get_attribute("aria-label"), m.locator(".body").last.inner_text()) for m in found
        ]

    @property
    def last(self):
        """The last message."""
        return self.page.locator(".log article").last

    def answer_with(self, *deltas, finish="stop"):
        """Answer the next requests with deltas instead of a model's answer."""
        chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=lines, content_type="text/event-stream"),
        )


@pytest.fixture
def chat(open_page):
    """Return the chat of a new page."""
    return Chat(open_page())
