"""Screenshots of the page: python -m tests.browser.screenshots FOLDER.

It starts a server with the built-in model and writes a picture of each view, light and dark, wide
and narrow. A person looks at them.
"""

import json
import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.browser.conftest import CHROMIUM, Chat
from tests.browser.test_bench import LATENCY, ONE, STARTUP, SWEEP, detailed
from tests.browser.test_engine_view import SETTINGS, busy
from tests.browser.test_page import TUNED, open_results
from tests.e2e.harness import serve

ANSWER = r"""The **roots** of $ax^2 + bx + c = 0$ are

$$x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

1. Compute the *discriminant* $D = b^2 - 4ac$.
2. If $D \ge 0$, there are real roots:

```python
def roots(a, b, c):
    root = (b * b - 4 * a * c) ** 0.5
    return (-b + root) / (2 * a), (-b - root) / (2 * a)
```

| $a$ | $b$ | $c$ | $x_1$ | $x_2$ |
|----:|----:|----:|------:|------:|
|   1 |  -3 |   2 |     2 |     1 |
|   1 |   0 |  -4 |     2 |    -2 |

> A double root has $D = 0$; see [Wikipedia](https://en.wikipedia.org/wiki/Quadratic_formula).
"""


def take(browser, url, folder, scheme, width, height):
    """Write the pictures of one size and one scheme of colours."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    chat = Chat(page)

    def shoot(name):
        page.wait_for_timeout(200)
        page.screenshot(path=folder / f"{name}-{scheme}-{width}.png")

    if width < 900:
        page.get_by_role("button", name="Settings").click()
        shoot("settings")
        page.get_by_role("button", name="Settings").click()
    chat.answer_with({"reasoning": "They ask for the quadratic formula."}, {"content": ANSWER})
    chat.send("How do I solve a quadratic equation?")
    page.locator(".log").evaluate("log => { log.scrollTop = 0; }")
    shoot("chat")
    page.unroute_all()
    if width > 900:
        page.get_by_role("button", name="New chat").click()
        chat.set(logprobs="5", max_tokens="60", temperature="0.7", seed="5")
        chat.send("Tell me a story about a red ball.")
        chat.last.get_by_role("button", name="Regenerate").click()
        chat.wait()
        chat.last.get_by_role("button", name="Tokens").click()
        chat.last.get_by_role("option").nth(12).hover()
        shoot("tokens")
        page.get_by_role("button", name="New chat").click()
        tool = {"name": "weather", "description": "Weather of a city"}
        city = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
        chat.set(tools=json.dumps([tool | {"parameters": city}], indent=1), choice="required")
        chat.send("How is the weather in Paris?")
        shoot("tools")
    page.get_by_role("tab", name="Benchmark").click()
    results = {"one.json": ONE, "two.json": detailed(factor=1.4), "sweep.json": SWEEP}
    open_results(page, results | {"tune.json": TUNED})
    shoot("bench")
    page.get_by_role("button", name="Clear").click()
    open_results(page, {"startup.json": STARTUP, "latency.json": LATENCY})
    shoot("bench-more")
    page.get_by_role("tab", name="Engine").click()
    with busy(url, 6, 300):
        page.get_by_role("row").filter(has_text="answer").nth(2).wait_for()
        page.wait_for_timeout(1000)
        page.get_by_role("button", name="Hold").click()
        shoot("engine")
    page.get_by_role("tab", name="Explain").click()
    page.locator("#explain td button").first.click()
    page.get_by_text("Parts in order").wait_for()
    shoot("explain")
    context.close()


def main():
    """Write the pictures into the folder of the first argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    serving = serve(folder, *SETTINGS, model="octavo/stories")
    with serving as server, sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        for scheme in ("light", "dark"):
            for width, height in ((1280, 860), (360, 780)):
                take(browser, server.url, folder, scheme, width, height)
        browser.close()


if __name__ == "__main__":
    main()
