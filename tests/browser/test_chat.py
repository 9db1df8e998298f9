"""Chats in a browser, with the built-in model."""

import json
import re
import signal

import pytest

from tests.browser.conftest import Chat
from tests.server.test_run import serving

STORY = "Tell me a story about a red ball."
TOOLS = json.dumps(
    [
        {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        }
    ]
)


def test_an_answer(chat):
    chat.set(max_tokens="40", temperature="0", system="You tell stories.")
    chat.send(STORY)
    (you, mine), (assistant, answer) = chat.messages()
    assert (you, mine, assistant) == ("You", STORY, "Assistant")
    assert len(answer) > 20
    body = chat.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "You tell stories."}
    assert body["messages"][1:] == [{"role": "user", "content": STORY}]
    assert (body["temperature"], body["max_tokens"]) == (0, 40)
    assert re.search(r"length · prompt \d+ tokens.*answer 40 tokens", chat.last.inner_text())
    # What a screen reader says.
    assert chat.page.locator(".talk [role=status]").inner_text() == f"Answer: {answer}"


def test_stop(open_page):
    """Of an answer that takes 20 seconds: with the button, and with Escape."""
    with serving("slow") as server:
        chat = Chat(open_page(url=server.url))
        chat.set(max_tokens="200", ignore_eos="true")
        chat.send("Hi", wait=False)
        chat.wait_for_letters(3)
        chat.page.get_by_role("button", name="Stop").click()
        chat.wait()
        assert chat.last.locator("footer").inner_text().startswith("stopped")
        stopped = chat.messages()[-1][1]
        chat.set(max_tokens="100")
        chat.send("And then?", wait=False)
        chat.wait_for_letters(1)
        chat.page.keyboard.press("Escape")
        chat.wait()
        assert chat.last.locator("footer").inner_text().startswith("stopped")
        assert chat.bodies[1]["messages"][1]["content"].split() == stopped.split()
        assert len(chat.messages()) == 4


def test_edited_messages_and_new_answers_are_branches(chat):
    chat.set(max_tokens="12", seed="1")
    long = " ".join(["a red ball and a blue ball"] * 12)
    chat.send(long)
    first = chat.messages()[1][1]
    chat.set(seed="2")
    chat.last.get_by_role("button", name="Regenerate").click()
    chat.wait()
    second = chat.messages()[1][1]
    assert second != first
    # Branches share blocks of the prefix cache.
    assert int(re.search(r"(\d+) from the cache", chat.last.inner_text())[1]) >= 32
    assert "2/2" in chat.last.inner_text()
    chat.last.get_by_role("button", name="Earlier branch").click()
    assert chat.messages()[1][1] == first
    chat.page.locator("article.user").get_by_role("button", name="Edit").click()
    white_space = "form => getComputedStyle(form).whiteSpace"
    assert chat.page.locator(".edit").evaluate(white_space) == "normal"  # as the form is written
    chat.page.get_by_label("Edited message").fill("Something else")
    chat.page.locator("article.user").get_by_role("button", name="Send").click()
    chat.wait()
    assert chat.bodies[-1]["messages"] == [{"role": "user", "content": "Something else"}]
    assert chat.messages()[0] == ("You", "Something else")
    chat.page.locator("article.user").get_by_role("button", name="Earlier branch").click()
    assert chat.messages() == [("You", long), ("Assistant", second)]
    chat.last.get_by_role("button", name="Edit").click()
    chat.page.get_by_label("Edited message").fill("My own answer")
    chat.last.get_by_role("button", name="Save").click()
    assert chat.messages()[1][1] == "My own answer"
    assert "3/3" in chat.last.inner_text()


def test_several_answers_at_once_are_branches(chat):
    chat.set(n="2", max_tokens="8", seed="3")
    chat.send(STORY)
    assert "2/2" in chat.last.inner_text()
    later = chat.messages()[1]
    chat.last.get_by_role("button", name="Earlier branch").click()
    assert chat.messages()[1] != later


def test_an_answer_that_follows_a_schema(chat):
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    chat.set(schema=json.dumps(schema | {"additionalProperties": False}))
    chat.send("Give me a number.")
    assert json.loads(chat.messages()[-1][1]) == {"n": 7}


def test_tools(chat):
    chat.set(tools=TOOLS, choice="required", max_tokens="60")
    chat.send("How is the weather?")
    call = chat.last.locator(".card", has_text="Call of")
    assert "weather" in call.inner_text()
    city = json.loads(call.locator("pre").inner_text())["city"]
    assert city in ("Paris", "Rome")
    chat.page.get_by_label("Result of weather").fill('{"sun": true}')
    chat.set(choice="none", max_tokens="8")
    chat.page.get_by_role("button", name="Send results").click()
    chat.wait()
    asked, called, result = chat.bodies[-1]["messages"]
    assert asked["role"] == "user"
    (sent,) = called["tool_calls"]
    assert sent["function"]["name"] == "weather"
    assert result == {"role": "tool", "tool_call_id": sent["id"], "content": '{"sun": true}'}
    assert [role for role, _ in chat.messages()] == ["You", "Assistant", "Tool", "Assistant"]


def test_reasoning_is_folded(chat):
    chat.answer_with({"reasoning": "I **think**"}, {"reasoning": " so."}, {"content": "Yes."})
    chat.send("Is it?")
    thought = chat.last.locator("details.reasoning")
    assert not thought.locator(".body").is_visible()
    thought.locator("summary").click()
    assert thought.locator(".body").inner_text() == "I think so."
    assert chat.messages()[-1][1] == "Yes."
    chat.send("Really?")
    assert chat.bodies[1]["messages"][1]["reasoning_content"] == "I **think** so."


def test_alternatives_of_tokens(chat):
    chat.set(logprobs="3", max_tokens="10", temperature="0")
    chat.send(STORY)
    answer = chat.messages()[-1][1]
    chat.last.get_by_role("button", name="Tokens").click()
    tokens = chat.last.get_by_role("option")
    assert tokens.count() == 10
    assert "".join(tokens.all_text_contents()).strip() == answer
    tip = chat.page.locator(".tip")
    tokens.nth(4).hover()
    assert tip.locator("tbody tr").count() == 3
    assert re.search(r"[\d.]+ %", tip.locator("th").first.inner_text())
    tokens.nth(0).focus()
    first = tip.inner_text()
    chat.page.keyboard.press("ArrowRight")
    assert tip.inner_text() != first
    assert tokens.nth(1).evaluate("token => token === document.activeElement")


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"schema": "{"}, "schema", "Not valid"),
        ({"tools": '{"name": "x"}'}, "tools", "give a list"),
        ({"logit_bias": "1,"}, "logit_bias", "Not valid"),
    ],
)
def test_settings_that_are_no_json(chat, settings, field, words):
    chat.set(**settings)
    chat.send("Hello", wait=False)
    assert words in chat.page.locator(f"#set-{field}-error").inner_text()
    assert chat.page.locator(f"#set-{field}").get_attribute("aria-invalid") == "true"
    assert chat.bodies == []
    assert chat.page.get_by_label("Message", exact=True).input_value() == "Hello"


def test_errors_of_the_server(chat):
    chat.set(temperature="-3")
    chat.send("Hello")
    assert "temperature=-3" in chat.last.locator(".error").inner_text()
    chat.set(temperature="1", max_tokens="4")
    chat.last.get_by_role("button", name="Regenerate").click()
    chat.wait()
    assert not chat.last.locator(".error").is_visible()


def test_an_engine_that_dies(chat, server):
    chat.set(max_tokens="900", ignore_eos="true", temperature="0")
    chat.send(STORY)
    whole = chat.messages()[-1][1]
    chat.last.get_by_role("button", name="Regenerate").click()
    chat.wait_for_letters(100)
    before = server.metric("octavo:engine_restarts_total")
    server.engine_process().send_signal(signal.SIGKILL)
    chat.wait()
    server.wait_for_metric("octavo:engine_restarts_total", before + 1)
    assert not chat.last.locator(".error").is_visible()
    assert "2/2" in chat.last.inner_text()
    assert chat.messages()[-1][1] == whole


def test_conversations_are_kept_and_moved(chat, open_page, tmp_path):
    page = chat.page
    chat.set(max_tokens="5", logprobs="2")
    chat.send("First question")
    shown = chat.messages()
    page.get_by_role("button", name="New chat").click()
    assert chat.messages() == []
    chat.answer_with({"content": "Answer two"})
    chat.send("Second question")
    page.reload()
    page.get_by_text("Answer two").wait_for()
    chat = Chat(page)
    assert [role_text[1] for role_text in chat.messages()] == ["Second question", "Answer two"]
    page.get_by_role("button", name="First question", exact=True).click()
    assert chat.messages() == shown
    assert page.locator("#set-max_tokens").input_value() == "5"
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    other = Chat(open_page())
    other.page.get_by_label("File of conversations").set_input_files(file)
    other.page.get_by_role("button", name="First question", exact=True).click()
    assert other.messages() == shown
    assert other.last.get_by_role("button", name="Tokens").is_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete First question").click()
    page.get_by_role("button", name="First question", exact=True).wait_for(state="detached")
    assert [role_text[1] for role_text in chat.messages()] == ["Second question", "Answer two"]


def conversation(**changes):
    node = {"parent": -1, "role": "user", "content": "x"}
    chat = {"nodes": [node | changes], "leaf": 0, "title": "t"}
    return {"format": "octavo-conversations", "version": 1, "conversations": [chat]}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("<html>", "not JSON"),
        ("[]", "format or version"),
        (conversation(parent=0), "the parent of message 1 of conversation 1"),
        (conversation(parent="__proto__"), "the parent of message 1"),
        (conversation(role="system"), "message 1 of conversation 1"),
        (conversation(content={"a": 1}), "message 1 of conversation 1"),
        (conversation(calls=[{"id": 1}]), "calls of conversation 1"),
        (conversation(logprobs=[["a", "b", []]]), "logprobs of conversation 1"),
    ],
)
def test_files_that_are_no_conversations(one_page, file, words):
    text = file if isinstance(file, str) else json.dumps(file)
    message = one_page.evaluate(
        """async text => {
            const {importText} = await import("./ui/conversations.js");
            try { importText(text); return "imported"; } catch (error) { return error.message; }
        }""",
        text,
    )
    assert words in message
