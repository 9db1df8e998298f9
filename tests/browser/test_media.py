"""Pictures and speech in the chat of the page, with the built-in models of both."""

import base64
import io
import os
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from tests.browser.conftest import CHROMIUM, Chat
from tests.e2e.harness import serve


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return a server with a model of pictures and one of speech."""
    flags = ["--model", "octavo/stories-eyes", "--model", "octavo/spoken-words"]
    with serve(tmp_path_factory.mktemp("both"), *flags) as server:
        yield server


def picture(side):
    """Return a PNG of a red disc."""
    image = Image.new("RGB", (side, side), (240, 240, 240))
    ImageDraw.Draw(image).ellipse((side // 4, side // 4, 3 * side // 4, 3 * side // 4), "red")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Return a browser whose microphone hears a file."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; the README says how to install it")
    sound = Path(__file__).parents[1] / "speech/digits.wav"
    arguments = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    arguments += [f"--use-file-for-fake-audio-capture={sound}"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def chat(open_page, both):
    """Return the chat of a new page, once it knows the models."""
    chat = Chat(open_page(url=both.url))
    chat.page.get_by_role("button", name="Picture").wait_for()
    return chat


def attach(chat, *sides):
    files = [
        {"name": f"{side}.png", "mimeType": "image/png", "buffer": picture(side)} for side in sides
    ]
    chat.page.locator("input[data-part=pictures]").set_input_files(files)
    chat.page.get_by_role("button", name=f"Remove picture {len(sides)}").wait_for()


def images_of(body, message=0):
    """Return the pictures that a request has, decoded."""
    parts = body["messages"][message]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_a_picture_is_sent_shown_and_kept(chat):
    chat.set(max_tokens="20", temperature="0")
    attach(chat, 64, 96)
    chat.page.get_by_role("button", name="Remove picture 2").click()
    chat.send("What is it?")
    (image,) = images_of(chat.bodies[0])
    assert image.tobytes() == Image.open(io.BytesIO(picture(64))).convert(image.mode).tobytes()
    assert chat.bodies[0]["messages"][0]["content"][-1] == {"type": "text", "text": "What is it?"}
    assert "red" in chat.messages()[1][1]
    assert chat.page.locator(".pictures img").count() == 0
    assert chat.page.locator("article.user img").count() == 1
    chat.send("And its shape?")
    assert len(images_of(chat.bodies[1])) == 1
    chat.page.reload()
    chat.page.locator("article.user img").wait_for()
    # A changed text keeps the picture.
    chat.page.locator("article.user").first.get_by_role("button", name="Edit").click()
    chat.page.get_by_label("Edited message").fill("Which color?")
    chat.page.locator("article.user").get_by_role("button", name="Send").click()
    chat.wait()
    assert len(images_of(chat.bodies[-1])) == 1


def test_a_dropped_photo_is_made_smaller_and_other_files_are_named(chat):
    transfer = """async ([data, name, type]) => {
        const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
        const given = new DataTransfer();
        given.items.add(new File([bytes], name, {type}));
        const event = new DragEvent("drop", {dataTransfer: given, bubbles: true, cancelable: true});
        document.querySelector(".talk").dispatchEvent(event);
    }"""
    photo = base64.b64encode(picture(3000)).decode()
    chat.page.evaluate(transfer, [photo, "a.png", "image/png"])
    chat.page.get_by_role("button", name="Remove picture 1").wait_for()
    drawing = base64.b64encode(b"<svg onload='alert(1)'>").decode()
    chat.page.evaluate(transfer, [drawing, "b.svg", "text/html"])
    chat.page.get_by_text("b.svg is no picture").wait_for()
    chat.answer_with({"content": "yes"})
    chat.page.get_by_role("button", name="Send", exact=True).click()  # without a text
    chat.wait()
    (image,) = images_of(chat.bodies[0])
    assert (image.format, image.size) == ("JPEG", (2048, 2048))


def test_pictures_in_files_of_conversations(chat):
    script = """async images => {
        const {add, create, importText} = await import("/ui/conversations.js"), chat = create();
        add(chat, -1, {role: "user", content: "a", images});
        const file = {format: "octavo-conversations", version: 1, conversations: [chat]};
        try { return importText(JSON.stringify(file))[0].nodes[0].images; }
        catch (error) { return error.message; }
    }"""
    assert chat.page.evaluate(script, ["data:image/png;base64,AAAA"]) == [
        "data:image/png;base64,AAAA"
    ]
    assert "pictures of conversation 1" in chat.page.evaluate(script, [5])


def test_speech_becomes_text(chat):
    chat.page.get_by_label("Message", exact=True).fill("I said:")
    record = chat.page.get_by_role("button", name="Record")
    chat.page.evaluate(
        """() => {
            const {start} = MediaRecorder.prototype;
            MediaRecorder.prototype.start = function () {
                window.track = this.stream.getAudioTracks()[0];
                start.call(this);
            };
        }"""
    )
    record.click()
    chat.page.locator("[data-part=record][aria-pressed=true]").wait_for()
    chat.page.wait_for_function("() => track.stats.deliveredFramesDuration > 1500")  # in ms
    with chat.page.expect_response("**/v1/audio/transcriptions") as found:
        record.click()
    assert found.value.status == 200
    text = found.value.json()["text"]
    from playwright.sync_api import expect

    message = chat.page.get_by_label("Message", exact=True)
    expect(message).to_have_value(f"I said: {text}")
    assert chat.page.locator("[data-part=record][aria-pressed=false]").count() == 1


def test_the_buttons_are_for_models_that_can(chat, open_page, server):
    picker = chat.page.get_by_label("Model")
    picker.select_option("octavo/spoken-words")
    chat.page.get_by_role("button", name="Picture").wait_for(state="hidden")
    assert chat.page.get_by_role("button", name="Record").is_visible()
    other = Chat(open_page(url=server.url))
    other.page.get_by_label("Model").filter(has_text="octavo/stories").wait_for()
    for name in ("Picture", "Record"):
        assert not other.page.get_by_role("button", name=name).is_visible()
