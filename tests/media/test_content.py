"""Media in messages: forms of parts, their order, limits, and texts that look like placeholders."""

import pytest

from octavo.errors import RequestError, UnsupportedError
from octavo.media.content import MediaKind, read_media, with_media_io

IMAGE = {"image": MediaKind("<image>", 3, ("<row>",))}
BOTH = {**IMAGE, "audio": MediaKind("<sound>", 2)}


def user(*content):
    return [{"role": "user", "content": list(content)}]


def text(words):
    return {"type": "text", "text": words}


def url(address, **more):
    return {"type": "image_url", "image_url": {"url": address}, **more}


def test_items_are_in_the_order_of_the_text():
    messages = [
        {"role": "system", "content": "Look."},
        *user(url("a"), text("and"), {"type": "input_audio", "input_audio": AUDIO}, url("b")),
        {"role": "assistant", "content": "Yes."},
        *user(text("more"), {"type": "image_url", "image_url": "c", "uuid": "id"}),
    ]
    chat = read_media(messages, BOTH)
    assert [(item.modality, item.source, item.uuid, item.name) for item in chat.items] == [
        ("image", "a", None, "picture 1"),
        ("audio", "data:audio/wav;base64,AAAA", None, "sound 1"),
        ("image", "b", None, "picture 2"),
        ("image", "c", "id", "picture 3"),
    ]
    assert [message["content"] for message in chat.messages] == [
        "Look.",
        [{"type": "image"}, text("and"), {"type": "audio"}, {"type": "image"}],
        "Yes.",
        [text("more"), {"type": "image"}],
    ]
    assert messages[1]["content"][0] == url("a")


AUDIO = {"data": "AAAA", "format": "wav"}


@pytest.mark.parametrize(
    "value",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "input_audio"},
        {"type": "audio_url"},
    ],
)
def test_an_item_that_was_sent_before(value):
    (item,) = read_media(user({"uuid": "x", **value}), BOTH).items
    assert (item.source, item.uuid) == (None, "x")


def test_other_forms_of_parts():
    picture = object()
    parts = [
        {"type": "input_image", "image_url": "data:x", "detail": "auto"},
        {"type": "image_pil", "image_pil": picture},
        url("a") | {"image_url": {"url": "a", "detail": "high"}},
    ]
    found = read_media(user(*parts), IMAGE).items
    assert [item.source for item in found] == ["data:x", picture, "a"]


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "image_url"}, r"messages\[0\].content\[0\].image_url is not allowed; give"),
        (url(5), r"image_url is not allowed"),
        (url(""), r"image_url is not allowed"),
        (url("a", uuid=5), r"uuid is not allowed"),
        (url("a", uuid="x" * 300), r"uuid is not allowed"),
        (
            {"type": "image_url", "image_url": {"url": "a", "detail": "no"}},
            "detail is not allowed",
        ),
        ({"type": "input_audio", "input_audio": {"data": "x"}}, "input_audio is not allowed"),
        ({"type": "input_audio", "input_audio": {**AUDIO, "format": "a/b,"}}, "is not allowed"),
        ({"type": "image"}, "send image_url"),
    ],
)
def test_malformed_parts(part, match):
    with pytest.raises(RequestError, match=match) as error:
        read_media(user(part), BOTH)
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "part",
    [url("a"), *({"type": f"{kind}_url"} for kind in ("image", "audio", "video"))],
)
def test_text_models_refuse_media_by_name(part):
    with pytest.raises(UnsupportedError, match=f"'{part['type']}', .* send text only"):
        read_media(user(text("a"), part), {})


def test_other_modalities_are_refused():
    with pytest.raises(UnsupportedError, match="send text and pictures only"):
        read_media(user({"type": "video_url", "video_url": {"url": "a"}}), IMAGE)


def test_limit_is_per_modality():
    sound = {"type": "audio_url", "audio_url": {"url": "s"}}
    assert len(read_media(user(*[url("a")] * 3, sound, sound), BOTH).items) == 5
    with pytest.raises(RequestError, match=r"more than 3 pictures.*--limit-mm-per-prompt"):
        read_media(user(*[url("a")] * 1000), BOTH)
    with pytest.raises(RequestError, match="more than 2 sounds"):
        read_media(user(sound, sound, sound), BOTH)


def test_texts_like_placeholders_are_cut_in_two():
    call = {"function": {"name": "f", "arguments": {"<image>": ["<row>"]}}}
    messages = [
        *user(text("What does <image> mean?"), url("a")),
        {"role": "assistant", "content": "It is <image><image>.", "tool_calls": [call]},
    ]
    chat = read_media(messages, IMAGE)
    rendered = str(chat.messages).replace("{'type': 'image'}", "<image>")
    pieces = chat.split(rendered)
    assert [piece.count("<image>") for piece in pieces] == [0, 1, 0, 0, 0, 0]
    assert "".join(pieces) == str(
        user(text("What does <image> mean?"), {"type": "image"}) + messages[1:]
    ).replace("{'type': 'image'}", "<image>")
    assert pieces[5].startswith("row>")


@pytest.mark.parametrize(
    ("texts", "pieces"),
    [
        (["<ima", "ge>"], ["<ima", "ge>"]),
        (["a <im ", "a", "ge> b"], ["a <im", "age> b"]),
        (["<", "row", "><image", "> ", "<"], ["<", "row><image", "><"]),
        (["a <", " b", "<ima"], ["a < b<ima"]),
        (["<row><", "row>"], ["<", "row><", "row>"]),
    ],
)
def test_texts_that_the_template_joins(texts, pieces):
    """Seams divide a rendered chat only inside of what looks like a placeholder."""
    chat = read_media(user(*map(text, texts), url("a")), IMAGE)
    (message,) = chat.messages
    rendered = "".join(part["text"].rstrip() for part in message["content"][:-1])
    assert chat.split(rendered) == pieces


def test_marks_are_different_in_each_chat():
    first, second = (read_media(user(text("<image>")), IMAGE) for _ in range(2))
    assert first.mark != second.mark
    assert first.split(first.messages[0]["content"][0]["text"]) == ["<", "image>"]
    tools = [{"name": "<image>", "parameters": {"x": 1}}]
    assert first.protect(tools)[0]["name"] == f"<{first.mark}image>"
    assert first.protect(5) == 5


def test_messages_of_text_models_are_untouched():
    messages = user(text("<image>"))
    chat = read_media(messages, {})
    assert chat.messages == messages
    assert chat.split("a<image>b") == ["a<image>b"]


def test_deep_nesting_is_an_error():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        read_media([{"role": "user", "content": "a", "name": deep}], IMAGE)
    with pytest.raises(RequestError, match="nested too deeply"):
        read_media([], IMAGE).protect({"tools": deep})
    assert read_media([], {}).protect(deep) is deep


def test_media_io_kwargs_choose_frames_of_videos():
    given = {"video": {"num_frames": 4, "fps": 2}}
    assert with_media_io({"fps": 1}, given) == {"num_frames": 4, "fps": 1}
    assert with_media_io(None, None) is None
    for wrong, name in (({"image": {}}, "image"), ({"video": {"size": 4}}, r"video\.size")):
        with pytest.raises(RequestError, match=rf"media_io_kwargs\.{name} is not supported"):
            with_media_io(None, wrong)
