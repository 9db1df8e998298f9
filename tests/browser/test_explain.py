"""The explain view: the list, a time line, hostile ids, the keyboard."""

import json
import re
import urllib.request

from playwright.sync_api import expect

from tests.hostile import NAMES

HOSTILE = "<img/src=x/onerror=document.title='owned'>"


def complete(server, name, **fields):
    """Send a completion with a request id."""
    body = {"prompt": "Once upon a time", "max_tokens": 6, "request_id": name, **fields}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["id"]


def test_a_request_of_the_list_shows_its_time_line(open_page, server):
    name = complete(server, "seen")
    page = open_page("/#/explain")
    button = page.get_by_role("button", name=name, exact=True)
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=name).wait_for()
    parts = page.get_by_role("table", name="Parts of the time")
    assert "the prompt was computed in 1 chunk, 4 tokens" in parts.inner_text()
    bar = page.get_by_role("img", name="Time line of")
    assert bar.locator("span").count() == parts.get_by_role("row").count() - 1
    assert bar.bounding_box()["width"] > 200
    page.get_by_text("By cause").click()
    assert page.get_by_role("table", name="Time by cause").is_visible()


def test_an_id_is_text(open_page, server):
    name = complete(server, HOSTILE)
    page = open_page("/#/explain")
    page.get_by_role("button", name=name, exact=True).click()
    page.get_by_role("heading", name=name).wait_for()
    assert page.locator("#explain img").count() == 0
    assert page.title() == "Octavo"


def test_all_texts_are_texts(open_page, server):
    """Ids, names of models, routes, causes and advice of the server are never HTML."""
    complete(server, "base")
    with urllib.request.urlopen(server.url + "/v1/requests/base/explain") as answer:
        found = json.load(answer)
    listed = {**found, "status": 200, "finished": True}
    page, story = open_page("/#/explain"), {}

    def answer(route):
        whole = route.request.url.endswith("/explain")
        route.fulfill(json=story if whole else {"object": "list", "data": [story]})

    page.route(re.compile("/v1/requests"), answer)
    for name in NAMES:
        # The server accepts no other ids.
        shown_id = re.sub("[^!-~]", "", name)
        difference = {"volatile": name, "text": name, "earlier_text": name}
        story |= {
            **listed,
            "id": shown_id,
            "path": name,
            "model": name,
            "timeline": [{"cause": name, "begin_ms": 0, "ms": found["wall_ms"], "text": name}],
            "causes": [{"cause": name, "ms": 1.0, "text": name}],
            "cache": {**found["cache"], "difference": difference, "text": [name]},
            "advice": [{"setting": name, "text": name, "saved_ms": None, "estimate": "unknown"}],
        }
        button = page.locator("#explain button.quiet.mono")
        page.get_by_role("button", name="Refresh the list").click()
        expect(button).to_have_count(1)
        expect(button).to_have_text(shown_id)
        button.click()
        title = page.locator("#explain h3.mono")
        expect(title).to_have_text(shown_id)
        tags = "img, script, svg, style, iframe"
        assert page.locator("#explain").locator(tags).count() == 0
        assert page.locator("#explain pre").all_inner_texts()[0].split() == name.split()
        assert page.title() == "Octavo"


def test_an_older_list_does_not_replace_a_newer_one(open_page, server):
    name = complete(server, "slow")
    page, slow = open_page("/#/explain"), []
    page.get_by_role("button", name=name, exact=True).wait_for()
    page.route("**/v1/requests", lambda route: slow.append(route))
    for _ in range(2):
        page.get_by_role("button", name="Refresh the list").click()
    while len(slow) < 2:
        page.wait_for_timeout(10)
    with urllib.request.urlopen(server.url + "/v1/requests") as answer:
        listed = json.load(answer)["data"][0]
    for route, name in zip(reversed(slow), ("newer", "older"), strict=True):
        with page.expect_response("**/v1/requests"):
            route.fulfill(json={"object": "list", "data": [listed | {"id": name}]})
        page.get_by_role("button", name="newer", exact=True).wait_for()
    page.wait_for_timeout(100)
    assert page.locator("#explain button.quiet.mono").all_inner_texts() == ["newer"]


def test_an_unknown_id_is_an_error(open_page):
    page = open_page("/#/explain")
    page.get_by_label("Id of an answer").fill("none")
    page.keyboard.press("Enter")
    page.get_by_text("Request 'none' is not known to this API key").wait_for()
