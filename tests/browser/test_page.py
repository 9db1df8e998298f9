"""The page in a browser: tabs, themes, keys, keyboard, narrow screens, accessibility."""

import json
import re

import pytest

from tests.browser.conftest import Chat, files_of
from tests.e2e.harness import wait_until
from tests.server.test_run import serving

VIEWS = ("Chat", "Engine", "Explain", "Benchmark")
DEFAULT = {"name": "default", "budget": 4, "figures": {"p99_ttft_ms": 9.0, "rate": 2.0}}
TUNED = {
    "objective": "rate",
    "slo": {"p99_ttft_ms": 10.0},
    "default": DEFAULT,
    "winner": {"budget": 8, "figures": {"p99_ttft_ms": 8.0, "rate": 3.0}},
    "trials": [DEFAULT, {"budget": 8, "figures": {"p99_ttft_ms": 8.0, "rate": 3.0}}],
}


def find_violations(page):
    """Return what axe finds in the page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    return [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in found]


def test_tabs(open_page):
    page = open_page()
    for name in (*VIEWS[1:], "Chat"):
        page.get_by_role("tab", name=name).click()
        page.get_by_role("tabpanel", name=name).wait_for()
        assert page.get_by_role("tabpanel").count() == 1
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_role("tab", name="Benchmark", selected=True).wait_for()
    assert page.get_by_role("tab", name="Benchmark").evaluate("e => e === document.activeElement")


def test_the_theme_is_kept(open_page):
    page = open_page(color_scheme="light")
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_label("Theme").select_option("dark")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark
    assert open_page(color_scheme="dark").evaluate(background) == dark


def test_the_key_is_asked_for(open_page):
    with serving("ready", "--api-key", "right", "--root-path", "/llm") as server:
        page = open_page("/llm/", server.url)
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Key").fill("wrong")
        page.keyboard.press("Enter")
        dialog.get_by_text("not one that this server accepts").wait_for()
        dialog.get_by_label("Key").fill("right")
        dialog.get_by_role("button", name="Use key").click()
        page.get_by_role("option", name="octavo/stories").wait_for(state="attached")
        chat = Chat(page)
        chat.send("Hello")
        assert chat.messages()[1][1]
        page.reload()
        page.get_by_role("option", name="octavo/stories").wait_for(state="attached")
        assert not dialog.is_visible()
        # Another tab does not know it.
        other = page.context.new_page()
        other.goto(f"{server.url}/llm/")
        other.get_by_role("dialog").wait_for()
        other.keyboard.press("Escape")
        other.get_by_text("No API key was sent").wait_for()
        other.get_by_role("button", name="Key").click()
        other.get_by_role("dialog").get_by_label("Key").fill("right")
        other.keyboard.press("Enter")
        other.get_by_role("option", name="octavo/stories").wait_for(state="attached")


def test_keyboard_only(open_page):
    page = open_page()
    chat = Chat(page)

    def tab_to(name):
        for _ in range(80):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "() => document.activeElement.getAttribute('aria-label')"
                " ?? document.activeElement.labels?.[0]?.textContent"
                " ?? document.activeElement.textContent"
            )
            if focused == name:
                return
        raise AssertionError(f"{name} cannot be reached")

    tab_to("max_tokens")
    page.keyboard.type("6")
    tab_to("Chats")
    tab_to("Message")
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    chat.wait()
    assert chat.messages()[0] == ("You", "One\nTwo")
    tab_to("Chats")
    tab_to("Regenerate")
    page.keyboard.press("Enter")
    chat.wait()
    assert "2/2" in chat.last.inner_text()


def test_narrow_screens(open_page):
    page = open_page(viewport={"width": 360, "height": 640}, has_touch=True)
    chat = Chat(page)
    page.get_by_role("button", name="Settings").click()
    chat.set(max_tokens="30")
    page.get_by_role("button", name="Settings").click()
    assert not page.locator("#set-temperature").is_visible()
    wide = "| " + " | ".join(["a wide column"] * 9) + " |\n|" + "-|" * 9
    chat.answer_with({"content": f"{wide}\n\n```\n{'x' * 300}\n```\n\n{'y' * 300}"})
    chat.send("z" * 200)
    for name in VIEWS:
        page.get_by_role("tab", name=name).click()
        page.get_by_role("tabpanel", name=name).wait_for()
        assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    page.get_by_role("tab", name="Chat").click()
    assert page.evaluate("() => document.querySelector('.log').scrollWidth") <= 360
    page.get_by_role("button", name="Chats").click()
    assert page.get_by_role("button", name="New chat").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_page, scheme):
    page = open_page(color_scheme=scheme)
    chat = Chat(page)
    chat.answer_with(
        {"reasoning": "Thought"},
        {"content": "# T\n\n`code` [a](https://a.b) $x^2$\n\n```py\nx\n```\n\n|a|\n|-|\n|b|"},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    )
    chat.send("Hello")
    chat.last.get_by_role("button", name="Regenerate").click()
    chat.wait()
    page.get_by_text("More parameters").click()
    chat.last.get_by_text("Reasoning").click()
    assert find_violations(page) == []
    chat.page.unroute_all()
    page.get_by_label("Result of f").fill("1")
    chat.set(logprobs="2", max_tokens="6")
    page.get_by_role("button", name="Send results").click()
    chat.wait()
    chat.last.get_by_role("button", name="Tokens").click()
    chat.last.get_by_role("option").nth(1).hover()
    assert find_violations(page) == []
    for name in VIEWS[1:]:
        page.get_by_role("tab", name=name).click()
        page.get_by_role("tabpanel", name=name).wait_for()
        if name == "Benchmark":
            open_results(page, {"tuned.json": TUNED, "other.json": TUNED | {"figure": 1.5}})
        assert find_violations(page) == []


def open_results(page, results):
    """Open results by their file names in the benchmark view; return when they are drawn."""
    files = files_of(page)
    files.set_input_files(
        [
            {"name": name, "mimeType": "application/json", "buffer": json.dumps(result).encode()}
            for name, result in results.items()
        ]
    )
    files.evaluate(
        "async input => { while (input.files.length) await new Promise(requestAnimationFrame); }"
    )


def test_scripts_of_others_do_not_run(open_page, browser, server):
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    refused = []
    page.on("console", lambda line: refused.append(line.text))
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            try { script.textContent = "document.title = 'run'"; } catch { /* trusted types */ }
            document.body.append(script);
            for (const name of ["src", "onerror"]) {
                const image = document.createElement("img");
                image.setAttribute("src", "https://example.invalid/x.png");
                try { image.setAttribute(name, "document.title = 'run'"); } catch { /* same */ }
                document.body.append(image);
            }
            try { document.body.innerHTML = "<p>markup</p>"; } catch { document.title += "!"; }
        }"""
    )
    assert page.title() == "Octavo!"
    wait_until(lambda: page.wait_for_timeout(50) or re.search("img-src", " ".join(refused)))
    assert page.title() == "Octavo!"
    context.close()
