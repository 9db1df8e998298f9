"""Pictures in the bodies of all APIs become the same parts of a chat."""

import pytest

from octavo.errors import RequestError
from octavo.media.content import MediaKind, read_media
from octavo.server.anthropic_schema import MessagesBody
from octavo.server.body import validate
from octavo.server.chat import _plain_messages
from octavo.server.ollama_schema import OllamaChatBody, OllamaGenerateBody
from octavo.server.response_items import read_input, to_messages
from octavo.server.schema import ChatBody
from tests.server.fake_engine import with_server

URL = "data:;base64,AAAA"
KINDS = {"image": MediaKind("<image>", 9)}


def openai(content):
    return ChatBody.checked({"messages": [{"role": "user", "content": content}]})


def read(body):
    """Return roles, contents and sources of a checked body."""
    chat = read_media(_plain_messages(body.messages), KINDS)
    contents = [
        "".join(part.get("text", "<>") for part in message["content"])
        if isinstance(message["content"], list)
        else message["content"]
        for message in chat.messages
    ]
    return contents, [item.source for item in chat.items]


def test_chat_completions():
    body = openai(["see", {"type": "image_url", "image_url": {"url": URL}}, "this"])
    assert read(body) == (["see<>this"], [URL])
    assert body.messages[0].text == "see\nthis"


def test_text_parts_are_still_one_text():
    assert openai(["a", {"type": "text", "text": "b"}]).messages[0].content == "a\nb"


def test_messages_of_anthropic():
    picture = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    blocks = [
        {"type": "image", "source": picture},
        {"type": "text", "text": "see"},
        {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}},
    ]
    call = {"type": "tool_use", "id": "x", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": blocks[:2]}
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = validate(MessagesBody, {"model": "m", "max_tokens": 5, "messages": messages}).to_chat()
    assert read(body) == (["<>see<>", "", "<>see"], [URL, "https://a.example/b.png", URL])


def test_responses():
    part = {"type": "input_image", "image_url": URL, "detail": "high"}
    text = {"type": "input_text", "text": "see"}
    items = [
        {"role": "user", "content": [text, part]},
        {"type": "function_call", "call_id": "x", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x", "output": [part]},
    ]
    body = ChatBody.checked({"messages": to_messages(read_input(items))})
    assert read(body) == (["see<>", "", "<>"], [URL, URL])


def test_a_picture_of_responses_is_a_file_or_a_url():
    picture = {"type": "input_image", "file_id": "file-a", "image_url": None}
    (item,) = read_input([{"role": "user", "content": [picture]}])
    assert item["content"] == [{"type": "input_image", "detail": "auto", "file_id": "file-a"}]
    for wrong, match in (({"image_url": URL}, "both image_url and file_id"), ({"file_id": 5}, "5")):
        with pytest.raises(RequestError, match=match):
            read_input([{"role": "user", "content": [picture | wrong]}])


def test_ollama():
    messages = [{"role": "user", "content": "see", "images": ["AAAA", URL]}]
    chat = validate(OllamaChatBody, {"model": "m", "messages": messages}).to_chat("m")
    assert read(chat) == (["<><>see"], [URL, URL])
    body = {"model": "m", "prompt": "see", "images": ["AAAA"], "system": "Look."}
    assert read(validate(OllamaGenerateBody, body).to_chat("m")) == (["Look.", "<>see"], [URL])


@pytest.mark.parametrize(
    "source",
    [None, {"type": "file", "file_id": "x"}, {"type": "url"}, {"type": "base64", "data": 5}],
)
def test_wrong_sources_of_anthropic(source):
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].source"):
        validate(MessagesBody, {"model": "m", "max_tokens": 5, "messages": messages})


class LargeMedia:
    """Reader of chats' media whose pictures have 600 MiB."""

    kinds = KINDS

    async def read_prompt(self, pieces, items, settings, add_nbytes, share, scope):
        add_nbytes(600 * 2**20)
        return "".join(pieces)


def test_the_media_of_all_chats_of_a_request_are_counted():
    async def scenario(served):
        served.engine.chat_media = LargeMedia()
        chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
        path = "/v1/chat/completions/batch"
        assert (await served.post(path, messages=[chat])).status_code == 200
        error = (await served.post(path, messages=[chat, chat])).json()["error"]
        assert error["code"] == "request_too_large"
        assert served.engine.request_memory.used == 0

    with_server(scenario)
