"""Pictures in chats: all APIs of a server and `LLM.chat` answer as to pixels offline."""

import base64
import contextlib
import io
import json
import os
import signal

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from octavo import SamplingParams
from octavo.engine.core_messages import ITEMS, UTILITY
from octavo.errors import RequestError
from octavo.media.videos import read_frames, read_index
from tests.e2e.harness import serve, wait_until
from tests.pictures import CASES, ID, MORE_CASES, make_llm, picture, save_model
from tests.videos import smooth_frames, video_file

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>"
    "{% elif p['type'] == 'video' %}<video>{% else %}"
    "{{ p['text'] }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
FIRST, SECOND = picture(48, 30), picture(20, 40, 1)
PLAIN = {"temperature": 0, "max_tokens": 8}
PARAMS = SamplingParams(**PLAIN)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def encoded(pixels):
    return base64.b64encode(png(pixels)).decode()


def part(pixels, **more):
    url = f"data:image/png;base64,{encoded(pixels)}"
    return {"type": "image_url", "image_url": {"url": url}, **more}


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    save_model("smolvlm", folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with make_llm(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    """Answer to both pictures and a text, as pixels offline: prompt's tokens, text."""
    prompt = {"prompt": "user:<image>and<image>?;", "multi_modal_data": {"image": [FIRST, SECOND]}}
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    return output.prompt_token_ids, output.outputs[0].text


def ask(llm, *content):
    (output,) = llm.chat([{"role": "user", "content": list(content)}], PARAMS, use_tqdm=False)
    return output.prompt_token_ids, output.outputs[0].text


def test_offline_chat(llm, expected):
    assert ask(llm, part(FIRST), text("and"), part(SECOND, uuid="x"), text("?")) == expected
    pil = {"type": "image_pil", "image_pil": Image.fromarray(FIRST)}
    assert ask(llm, pil, text("and"), part(SECOND), text("?")) == expected


def test_a_file_that_comes_again(folder, expected):
    """It is neither read nor sent again, gives the same bits, and reaches the engine that replaces
    a dead one."""
    content = [part(FIRST), text("and"), part(SECOND), text("?")]
    with make_llm(folder, isolate=True, enable_prefix_caching=False) as llm:
        engine = llm.llm_engine
        supervisor = engine.client._client
        assert ask(llm, *content) == expected
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.chat_media, "_files", {})
            channel, sent = supervisor._client._channel, []
            send = channel.send

            async def note(kind, payload):
                if kind != UTILITY:  # the supervisor's heartbeats
                    sent.append((kind, len(payload)))
                await send(kind, payload)

            patch.setattr(channel, "send", note)
            assert ask(llm, *content) == expected
            assert ask(llm, text("other"), *content[1:]) != expected
            assert [kind for kind, _ in sent] == [ITEMS] * 2
            assert sum(nbytes for _, nbytes in sent) < supervisor._client._items.nbytes / 4
            (pid,) = engine.client.pids
            os.kill(pid, signal.SIGKILL)
            assert ask(llm, *content) == expected
            assert ask(llm, *content) == expected
        assert engine.client.pids != [pid]


def test_placeholders_of_users_are_text(llm):
    alone, _ = ask(llm, part(FIRST))
    ids, _ = ask(llm, text("<image>"), part(FIRST))
    assert ids.count(ID["<image>"]) == alone.count(ID["<image>"]) > 0
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(ids[:20]).startswith("user:<image>")
    (output,) = llm.chat([{"role": "user", "content": "<image>"}], PARAMS, use_tqdm=False)
    assert ID["<image>"] not in output.prompt_token_ids
    assert output.prompt == "user:<image>;"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([{"type": "audio_url", "audio_url": {"url": "x"}}], "send text, pictures and videos"),
        ([{"type": "image_url", "image_url": "http://a.example/"}], "--allowed-media-domains a.ex"),
        ([{"type": "image_url", "image_url": "file:///etc/passwd"}], "--allowed-local-media-path"),
        ([{"type": "image_url", "image_url": "data:;base64,AAAA"}], "picture 1: the file is no"),
        ([part(FIRST)] * 1000, "more than 999 pictures"),
        ([part(FIRST)] * 40, "pictures have .* tokens; the model's context has 400"),
    ],
)
def test_errors_offline(llm, content, match):
    with pytest.raises(RequestError, match=match) as error:
        ask(llm, *content)
    assert error.value.param == "messages"


def video(file, **more):
    url = f"data:video/mp4;base64,{base64.b64encode(file).decode()}"
    return {"type": "video_url", "video_url": {"url": url}, **more}


def test_videos(llm, monkeypatch):
    """A file gives the answer of its frames as an array; users cannot write the placeholder."""
    file = video_file(smooth_frames(9, 32, 48), codec="gif", kind="gif")
    index = read_index(memoryview(file))
    pixels = np.stack(list(read_frames(memoryview(file), index, range(9))))
    given = {"multi_modal_data": {"image": FIRST, "video": (pixels, {"fps": 4})}}
    given |= {"prompt": "user:<image>and<video>?;", "mm_processor_kwargs": {"num_frames": 2}}
    (output,) = llm.generate(given, PARAMS, use_tqdm=False)
    expected = output.prompt_token_ids, output.outputs[0].text
    chat = [part(FIRST), text("and"), video(file), text("?")]
    messages = [{"role": "user", "content": chat}]
    settings = {"num_frames": 2}
    for _ in range(2):  # the second time it is not read
        (output,) = llm.chat(messages, PARAMS, mm_processor_kwargs=settings, use_tqdm=False)
        assert (output.prompt_token_ids, output.outputs[0].text) == expected
        monkeypatch.setattr(llm.llm_engine.chat_media, "_files", {})
    monkeypatch.undo()
    alone, _ = ask(llm, text("<video>"))
    assert ID["<video>"] not in alone
    with pytest.raises(RequestError, match=r"video 1: the file is a picture"):
        ask(llm, video(png(FIRST)))


def test_settings_of_the_processor(llm, expected):
    chat = [{"role": "user", "content": [part(FIRST)]}]
    (cut,) = llm.chat(chat, PARAMS, use_tqdm=False)
    whole = {"do_image_splitting": False}
    (uncut,) = llm.chat(chat, PARAMS, mm_processor_kwargs=whole, use_tqdm=False)
    assert len(uncut.prompt_token_ids) < len(cut.prompt_token_ids)
    chat = [{"role": "user", "content": "no picture"}]
    with pytest.raises(RequestError, match=r"mm_processor_kwargs\.nonsense is not allowed"):
        llm.chat(chat, PARAMS, mm_processor_kwargs={"nonsense": 1}, use_tqdm=False)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    (folder / "first.png").write_bytes(png(FIRST))
    flags = ["--dtype", "float32", "--max-model-len", "400", "--served-model-name", "m"]
    flags += ["--allowed-local-media-path", str(folder), "--limit-mm-per-prompt", '{"image": 3}']
    with serve(tmp_path_factory.mktemp("server"), *flags, model=str(folder)) as server:
        yield server


def test_every_api_gives_the_answer(server, folder, expected):
    content = [part(FIRST), text("and"), part(SECOND), text("?")]
    chat = {"model": "m", "messages": [{"role": "user", "content": content}], **PLAIN}
    response = server.post("/v1/chat/completions", chat)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["choices"][0]["message"]["content"] == expected[1]
    assert body["usage"]["prompt_tokens"] == len(expected[0])

    content[0] = {"type": "image_url", "image_url": {"url": f"file://{folder}/first.png"}}
    chat["messages"] = [{"role": "user", "content": content}]
    response = server.post("/v1/chat/completions", chat)
    assert response.json()["choices"][0]["message"]["content"] == expected[1], response.text

    source = [{"type": "base64", "data": encoded(pixels)} for pixels in (FIRST, SECOND)]
    first, second = ({"type": "image", "source": one} for one in source)
    blocks = [first, text("and"), second, text("?")]
    messages = [{"role": "user", "content": blocks}]
    counted = server.post("/v1/messages/count_tokens", {"model": "m", "messages": messages})
    assert counted.json() == {"input_tokens": len(expected[0])}
    message = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
    response = server.post("/v1/messages", message)
    assert response.json()["content"][0]["text"] == expected[1], response.text

    parts = [{"type": "input_image", "image_url": one["image_url"]["url"]} for one in chat_parts()]
    parts.insert(1, {"type": "input_text", "text": "and"})
    parts.append({"type": "input_text", "text": "?"})
    response = server.post(
        "/v1/responses",
        {"model": "m", "input": [{"role": "user", "content": parts}], "temperature": 0}
        | {"max_output_tokens": 8},
    )
    output = response.json()["output"]
    assert output[0]["content"][0]["text"] == expected[1], response.text


def test_a_picture_of_files(server, expected):
    def upload(data):
        form = {"files": {"file": ("a.png", data)}, "data": {"purpose": "vision"}}
        return httpx.post(f"{server.url}/v1/files", **form, timeout=120).json()["id"]

    names = [upload(png(pixels)) for pixels in (FIRST, SECOND)]
    parts = [{"type": "input_image", "file_id": name} for name in names]
    parts.insert(1, {"type": "input_text", "text": "and"})
    parts.append({"type": "input_text", "text": "?"})
    body = {"model": "m", "input": [{"role": "user", "content": parts}]}
    counted = server.post("/v1/responses/input_tokens", body).json()
    assert counted["input_tokens"] == len(expected[0])
    body |= {"temperature": 0, "max_output_tokens": 8}
    output = server.post("/v1/responses", body).json()["output"]
    assert output[0]["content"][0]["text"] == expected[1]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    form = {"files": {"file": json.dumps(line).encode()}, "data": {"purpose": "batch"}}
    file = httpx.post(f"{server.url}/v1/files", **form, timeout=120).json()
    batch = {"input_file_id": file["id"]}
    batch |= {"endpoint": "/v1/responses", "completion_window": "24h"}
    batch = server.post("/v1/batches", batch).json()
    path = f"/v1/batches/{batch['id']}"
    batch = wait_until(lambda: (it := server.get(path).json())["status"] == "completed" and it)
    content = server.get(f"/v1/files/{batch['output_file_id']}/content").json()
    output = content["response"]["body"]["output"]
    assert output[0]["content"][0]["text"] == expected[1]
    parts[0]["file_id"] = "file-absent"
    response = server.post("/v1/responses", body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "file_not_found")
    assert "send the picture as image_url" in response.json()["error"]["message"]


def test_a_video_over_http(server, llm):
    file = video_file(smooth_frames(9, 32, 48), codec="gif", kind="gif")
    messages = [{"role": "user", "content": [video(file), text("?")]}]
    settings = {"num_frames": 2}
    (output,) = llm.chat(messages, PARAMS, mm_processor_kwargs=settings, use_tqdm=False)
    chat = {"model": "m", "messages": messages, "media_io_kwargs": {"video": settings}, **PLAIN}
    body = server.post("/v1/chat/completions", chat).json()
    assert body["choices"][0]["message"]["content"] == output.outputs[0].text
    assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    for path in ("/v1/chat/completions", "/tokenize"):
        wrong = chat | {"media_io_kwargs": {"video": {"num_frames": 0}}}
        error = server.post(path, wrong).json()["error"]
        assert error["param"] == "media_io_kwargs"
        assert "mm_processor_kwargs" not in error["message"], error
    chat["messages"] = [{"role": "user", "content": [video(file[:60])]}]
    response = server.post("/v1/chat/completions", chat)
    assert response.status_code == 400
    assert "video 1: the file is damaged" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "paligemma"])
def test_models_with_tokens_that_see_each_other(name, tmp_path):
    """A chat over HTTP has the answer of the same prompt offline, in the model's own form."""
    folder, placeholder = tmp_path / "model", (CASES | MORE_CASES)[name].placeholder
    folder.mkdir()
    save_model(name, folder)
    file = folder / "tokenizer_config.json"
    template = TEMPLATE.replace("<image>", placeholder)
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    prompt = f"user:{placeholder}and{placeholder}?;"
    with make_llm(folder) as llm:
        given = {"prompt": prompt, "multi_modal_data": {"image": [FIRST, SECOND]}}
        (output,) = llm.generate(given, PARAMS, use_tqdm=False)
        chat = ask(llm, part(FIRST), text("and"), part(SECOND), text("?"))
        assert chat == (output.prompt_token_ids, output.outputs[0].text)
    flags = ["--dtype", "float32", "--max-model-len", "400", "--served-model-name", "m"]
    content = [part(FIRST), text("and"), part(SECOND), text("?")]
    chat = {"model": "m", "messages": [{"role": "user", "content": content}], **PLAIN}
    with serve(tmp_path, *flags, model=str(folder)) as server:
        body = server.post("/v1/chat/completions", chat).json()
    assert body["choices"][0]["message"]["content"] == output.outputs[0].text
    assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    if name == "paligemma":
        ids = output.prompt_token_ids
        after = len(ids) - ids[::-1].index(ID["<image>"])
        assert ids[after] == ID["<s>"]
        assert llm.get_tokenizer().decode(ids[after + 1 :]) == "?;\n"


def test_tokens_of_a_chat_with_pictures(server, expected):
    content = [part(FIRST), text("and"), part(SECOND), text("?")]
    chat = {"model": "m", "messages": [{"role": "user", "content": content}]}
    tokens = server.post("/tokenize", {**chat, "return_token_strs": True}).json()
    assert tokens["tokens"] == expected[0]
    assert tokens["token_strs"].count("<image>") == expected[0].count(ID["<image>"])
    whole = {"mm_processor_kwargs": {"do_image_splitting": False}}
    assert server.post("/tokenize", {**chat, **whole}).json()["count"] < tokens["count"]
    rendered = server.post("/v1/chat/completions/render", chat).json()
    assert rendered["token_ids"] == expected[0]
    first, second = rendered["features"]["mm_placeholders"]["image"]
    for place in (first, second):
        begin, end = place["offset"], place["offset"] + place["length"]
        assert {expected[0][begin], expected[0][end - 1]} == {ID["<image>"]}
    assert first["offset"] + first["length"] < second["offset"]
    assert len(set(rendered["features"]["mm_hashes"]["image"])) == 2
    chat["messages"] = [{"role": "user", "content": [{"type": "image_url", "uuid": "new"}]}]
    error = server.post("/tokenize", chat).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "unknown_uuid")
    refused = server.post("/inference/v1/generate", rendered)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "features")


def test_a_body_with_a_large_picture(server):
    """Bodies of chats may be larger than others; the picture itself is read within its limits."""
    noise = {"type": "image_url", "image_url": {"url": "data:;base64," + "A" * (9 * 2**20)}}
    chat = {"model": "m", "messages": [{"role": "user", "content": [noise]}]}
    assert "is no picture" in server.post("/v1/chat/completions", chat).json()["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "a" * (9 * 2**20)}).status_code == 413
    noise["image_url"]["url"] *= 4
    assert server.post("/v1/chat/completions", chat).status_code == 413


def chat_parts():
    return [part(FIRST), part(SECOND)]


def test_ollama(server, llm):
    images = [encoded(FIRST), encoded(SECOND)]
    (_, answer) = ask(llm, *chat_parts(), text("?"))
    options = {"options": {"num_predict": 8, "temperature": 0}, "stream": False, "model": "m"}
    messages = [{"role": "user", "content": "?", "images": images}]
    response = server.post("/api/chat", {"messages": messages, **options})
    assert response.json()["message"]["content"] == answer, response.text
    response = server.post("/api/generate", {"prompt": "?", "images": images, **options})
    assert response.json()["response"] == answer, response.text
    assert server.post("/api/show", {"model": "m"}).json()["capabilities"] == [
        "completion",
        "vision",
    ]


def test_placeholders_of_users_are_text_over_http(server, llm):
    messages = [{"role": "user", "content": "<image>"}]
    (output,) = llm.chat(messages, PARAMS, use_tqdm=False)
    body = server.post("/v1/chat/completions", {"model": "m", "messages": messages, **PLAIN}).json()
    assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids) == len("user:<image>;")
    assert body["choices"][0]["message"]["content"] == output.outputs[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_bad_pictures_harm_nobody(server, expected, stream):
    def send(*content, **fields):
        chat = {"model": "m", "messages": [{"role": "user", "content": list(content)}], **PLAIN}
        return server.post("/v1/chat/completions", {**chat, **fields, "stream": stream})

    url = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
    for content, words in (
        ([url], "address 169.254.169.254 is not public"),
        ([part(FIRST)] * 4, "more than 3 pictures"),
        ([{"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}], "is no picture"),
    ):
        response = send(*content)
        assert response.status_code == 400, response.text
        assert words in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "messages"
    many = {"mm_processor_kwargs": {"size": {"longest_edge": 96}}}
    answer = send(part(FIRST), **many).json()["error"]
    assert answer["message"].startswith("picture 1: it is cut into")
    assert answer["param"] == "messages"
    # The process that reads pictures dies, and another takes its place.
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "octavo.media.process" in process.cmdline():
                process.send_signal(signal.SIGKILL)
    new = picture(30, 48, 2)
    assert send(part(FIRST), text("and"), part(new), text("?")).status_code == 200
