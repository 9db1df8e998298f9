"""Hostile files, URLs and texts against a real server: each is read right or refused with a typed
error, and a client of texts beside them loses nothing, to the last bit."""

import base64
import contextlib
import io
import json
import os
import struct
import threading
import zlib
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.e2e.harness import serve
from tests.e2e.test_chat_pictures import TEMPLATE
from tests.media.sounds import chirp, encode, wav
from tests.pictures import picture, save_model

KEYS = ("first-key", "second-key")
PIXELS = picture(24, 40)
OTHER = picture(24, 40, 1)
PICTURE = Image.fromarray(PIXELS)


def save(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PNG = save(PICTURE)


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, *more, data=b""):
    """Return a PNG that claims a size."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(data))


def with_chunks(chunks):
    """Return a PNG with chunks before its pixels."""
    at = PNG.index(b"IDAT") - 4
    return PNG[:at] + chunks + PNG[at:]


def patched(data, at, form, *values):
    """Return a file with other numbers at a place."""
    data = bytearray(data)
    struct.pack_into(form, data, at, *values)
    return bytes(data)


def tiff(**tags):
    """Return a TIFF of 8 x 8 pixels whose tags have other values, by their numbers."""
    data = save(Image.new("RGB", (8, 8)), "TIFF", compression="tiff_deflate")
    (begin,) = struct.unpack_from("<I", data, 4)
    for i in range(struct.unpack_from("<H", data, begin)[0]):
        at = begin + 2 + 12 * i
        (tag,) = struct.unpack_from("<H", data, at)
        if f"t{tag}" in tags:
            data = patched(data, at + 2, "<HII", 4, 1, tags[f"t{tag}"])
    return data


def turned(orientation):
    """Return a picture that EXIF turns, as a file and as it is seen."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    seen = {
        1: PIXELS,
        2: PIXELS[:, ::-1],
        3: PIXELS[::-1, ::-1],
        4: PIXELS[::-1],
        5: PIXELS.transpose(1, 0, 2),
        6: PIXELS[::-1].transpose(1, 0, 2),
        7: PIXELS[::-1, ::-1].transpose(1, 0, 2),
        8: PIXELS[:, ::-1].transpose(1, 0, 2),
    }[orientation]
    return save(PICTURE, "WEBP", lossless=True, exif=exif), seen


def odd_pictures():
    """Yield files that are read, and the pixels that a person sees."""
    for orientation in range(1, 9):
        yield turned(orientation)
    ink = Image.fromarray(np.concatenate([PIXELS, PIXELS[:, :, :1] // 2], 2), "CMYK")
    file = save(ink, "JPEG")
    yield file, np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
    wide = np.arange(24 * 40, dtype=np.uint16).reshape(24, 40) * 60
    yield save(Image.fromarray(wide)), np.repeat((wide >> 8).astype(np.uint8)[:, :, None], 3, 2)
    palette = PICTURE.quantize(16)
    at = np.asarray(palette) == 3
    seen = np.array(palette.convert("RGB"))
    seen[at] = 255
    yield save(palette, transparency=3), seen
    ones = PICTURE.convert("1")
    yield save(ones), np.asarray(ones.convert("RGB"))
    frames = {"save_all": True, "append_images": [Image.fromarray(OTHER)] * 50}
    yield save(PICTURE, "WEBP", lossless=True, **frames), PIXELS
    yield save(PICTURE, "PNG", **frames), PIXELS
    yield PNG + b"PK\x03\x04" + bytes(30) + b"<script>alert(1)</script>", PIXELS
    # A megabyte of text that unpacks to a gigabyte.
    bomb = zlib.compressobj(9)
    text = b"".join(bomb.compress(bytes(2**24)) for _ in range(16)) + bomb.flush()
    yield with_chunks(chunk(b"tEXt", b"a\0b")) + chunk(b"zTXt", b"a\0\0" + text), PIXELS
    yield with_chunks(chunk(b"tEXt", b"a\0b") * 10_000), PIXELS
    frame = b"!\xf9\4\0\1\0\0\0," + struct.pack("<4HB", 0, 0, 1, 1, 0) + b"\2\2D\1\0"
    yield GIF[:-1] + frame * 100_000 + b";", np.asarray(Image.open(io.BytesIO(GIF)).convert("RGB"))


GIF = save(PICTURE.quantize(16), "GIF")
WEBP = save(PICTURE, "WEBP", lossless=True)
REFUSED = [
    (png(60_000, 60_000, data=bytes(2**20)), "60000 x 60000 pixels; at most"),
    (png(2**31 - 1, 2**31 - 1), "at most|damaged"),
    (png(0, 5), "damaged|pixels"),
    # The text that unpacks to more than Pillow allows precedes the pixels.
    (png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27))), data=bytes(200)), "damaged"),
    (with_chunks(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**27)))), "damaged"),
    (with_chunks(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000))) * 99), "damaged"),
    (patched(WEBP, WEBP.index(b"VP8L") + 9, "<I", 0x0FFFFFFF), "16384 x 16384 pixels|damaged"),
    (tiff(t256=60_000, t257=60_000), "60000 x 60000 pixels"),
    (tiff(t257=5_000_000), "65536 in a row"),
    (tiff(t279=2**32 - 1), "damaged"),
    (patched(GIF, 6, "<HH", 65_535, 65_535), "65535 x 65535 pixels"),
    (b"%PDF-1.7\n" + PNG, "PDF"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "SVG"),
    (b"<?xml version='1.0'?><!DOCTYPE svg [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><svg>", "SVG"),
    (b"<svg><image href='http://169.254.169.254/latest'/></svg>", "SVG"),
    (b"PK\x03\x04" + PNG, "ZIP"),
    (b"", "empty"),
]
LOCAL = ["http://169.254.169.254/latest/meta-data", "http://2852039166/", "http://0xa9fea9fe/"]
LOCAL += ["http://0251.0376.0251.0376/", "http://[::ffff:169.254.169.254]/", "http://127.1/"]
LOCAL += ["http://[fd00:ec2::254]/", "http://[::1]/", "http://localhost/", "http://0/"]
LOCAL += ["http://localhost.:80/", "http://[64:ff9b::a9fe:a9fe]/", "https://169.254.169.254/"]
HOSTS = "169.254.169.254 2852039166 0xa9fea9fe 0251.0376.0251.0376 ::ffff:169.254.169.254 127.1"
HOSTS += " fd00:ec2::254 ::1 localhost 0 64:ff9b::a9fe:a9fe"
OUTSIDE = ["{}/../{}", "{}/%2e%2e/{}", "{}/link", "{}/%00", "{}/", "{}/pipe", "{}/circle"]
OUTSIDE += ["/etc/passwd", "/dev/zero", "/proc/self/environ", "//evil.example{}/a.png"]
URLS = [
    ("http://evil.example/a.png", "evil.example is not allowed"),
    ("http://user:password@localhost/", "user name"),
    ("gopher://localhost/", "not supported"),
    ("javascript:alert(1)", "not supported"),
    ("http://[::1", "malformed"),
    ("http://" + "a" * 9000, "characters"),
    ("http://localhost\t/", "control character"),
    ("http://evil.example\\@localhost/", "backslash"),
    (base64.b64encode(PNG).decode(), "send base64 as data:"),
    ("data:image/png,abc", "malformed"),
    ("data:image/png;base64,####", "base64 is malformed"),
    ("data:" + ";a" * 10_000 + ";base64,AAAA", "malformed"),
]


class Texts(threading.Thread):
    """Client that asks the same question again and again; all answers must be equal."""

    def __init__(self, ask):
        super().__init__()
        self.ask, self.stopped = ask, threading.Event()
        self.first, self.count, self.error = ask(), 0, None

    def run(self):
        try:
            while not self.count or not self.stopped.is_set():
                assert self.ask() == self.first
                self.count += 1
        except BaseException as error:
            self.error = error


@contextlib.contextmanager
def honest(ask):
    client = Texts(ask)
    client.start()
    try:
        yield
    finally:
        client.stopped.set()
        client.join()
    assert client.error is None, client.error
    assert client.count > 0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model("smolvlm", folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFKC"}
    for token in tokenizer["added_tokens"]:
        token["normalized"] = True
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    media = folder / "media"
    media.mkdir()
    (folder / "media-secret.png").write_bytes(PNG)
    (media / "link").symlink_to(folder / "media-secret.png")
    (media / "circle").symlink_to(media / "circle")
    os.mkfifo(media / "pipe")
    flags = ["--dtype", "float32", "--max-model-len", "400", "--served-model-name", "m"]
    flags += ["--allowed-local-media-path", str(media), "--allowed-media-domains", *HOSTS.split()]
    flags += [flag for key in KEYS for flag in ("--api-key", key)]
    with serve(tmp_path_factory.mktemp("server"), *flags, wait="/health", model=str(folder)) as s:
        s.media = media
        yield s


def post(server, path, body, key=0):
    headers = {"Authorization": f"Bearer {KEYS[key]}"}
    return httpx.post(server.url + path, json={"model": "m", **body}, headers=headers, timeout=240)


def chat(server, *content, key=0, **fields):
    body = {"temperature": 0, "max_tokens": 4, "logprobs": True}
    messages = [{"role": "user", "content": list(content)}]
    return post(server, "/v1/chat/completions", {**body, "messages": messages, **fields}, key)


def part(data, **more):
    url = f"data:;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, **more}


def text(words):
    return {"type": "text", "text": words}


def answer(response):
    """Return all that must be equal in two answers to the same."""
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return response.json()["usage"]["prompt_tokens"], choice["message"], choice["logprobs"]


def refused(response, words, param="messages"):
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    assert any(word in error["message"] for word in words.split("|")), (words, error)
    return error


def test_hostile_pictures(server):
    def ask():
        return answer(chat(server, text("Once upon a time"), key=1))

    with honest(ask):
        plain = answer(chat(server, part(PNG)))
        for file, seen in odd_pictures():
            expected = answer(chat(server, part(save(Image.fromarray(seen)))))
            assert answer(chat(server, part(file))) == expected
            assert (expected == plain) == np.array_equal(seen, PIXELS)
        for file, words in REFUSED:
            error = refused(chat(server, text("a"), part(file)), words)
            assert error["message"].startswith("picture 1: ")
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
            whole = save(PICTURE, kind)
            for length in (1, 9, 20, 33, 60, len(whole) // 2, len(whole) - 20):
                response = chat(server, part(PNG), part(whole[:length]))
                if response.status_code != 200:
                    assert refused(response, "picture 2: ")
        script = b"GIF89a/*" + GIF[8:] + b"*/=1;alert(1)"
        assert answer(chat(server, part(script))) != plain  # as wide as "/*" says
        many = chat(server, *[part(PNG)] * 1000)
        refused(many, "more than 999 pictures, the limit of this server (--limit-mm-per-prompt)")
        refused(chat(server, *[part(PNG)] * 999), "tokens; the model's context has 400")
        assert answer(chat(server, part(PNG))) == plain


def test_hostile_addresses(server):
    def ask():
        return answer(chat(server, text("Once upon a time"), key=1))

    media = server.media
    secret = f"{media.name}-secret.png"
    files = [f"file://{path.format(media, secret)}" for path in OUTSIDE]
    cases = [(url, "not public|cannot be reached|not allowed|no host") for url in LOCAL]
    cases += [(url, "not below|is no file|cannot be read|not this machine") for url in files]
    with honest(ask):
        for url, words in cases + URLS:
            error = refused(chat(server, {"type": "image_url", "image_url": {"url": url}}), words)
            assert error["message"].startswith("picture 1: ")
            assert "password" not in error["message"]


PARTS = [["<image>"], ["<ima", "ge>"], ["<im", "a", "ge>"], ["<image"]]


def test_placeholders_that_users_write(server):
    """A text stays text wherever it is; a picture beside it is found at its own place."""

    def ask():
        return answer(chat(server, text("Once upon a time"), key=1))

    with honest(ask):
        alone = answer(chat(server, part(PNG)))[0]
        for words in PARTS:
            written = [text(word) for word in words]
            count = answer(chat(server, *written, part(PNG)))[0]
            assert count == alone + len("".join(words))
            between = answer(chat(server, written[0], part(PNG), *written[1:]))[0]
            assert between == count
        bare = {"temperature": 0, "max_tokens": 4, "logprobs": True}

        def tokens(*messages, **fields):
            body = {**bare, "messages": list(messages), **fields}
            return answer(post(server, "/v1/chat/completions", body))[0]

        user = {"role": "user", "content": [part(PNG)]}
        for role in ("system", "assistant", "tool"):
            message = {"role": role, "content": "<image>"}
            assert tokens(message, user) == alone + len(f"{role}:<image>;")
        # A text that the tokenizer normalises to a placeholder has no picture.
        lookalike = "\uff1cimage\uff1e"
        refused(chat(server, text(lookalike), part(PNG)), "as many of one as of the other")
        assert answer(chat(server, text("<imag\u200be>"), part(PNG)))[0] > alone

        source = {"type": "base64", "data": base64.b64encode(PNG).decode()}
        blocks = [text("<ima"), text("ge>"), {"type": "image", "source": source}]
        body = {"messages": [{"role": "user", "content": blocks}], "system": "<image>"}
        counted = post(server, "/v1/messages/count_tokens", body).json()["input_tokens"]
        assert counted == alone + len("<image>") + len("system:<image>;")
        words = [{"type": "input_text", "text": word} for word in ("<ima", "ge>")]
        image = {"type": "input_image", "image_url": part(PNG)["image_url"]["url"]}
        body = {"input": [{"role": "user", "content": [*words, image]}], "max_output_tokens": 4}
        response = post(server, "/v1/responses", {**body, "instructions": "<image>"})
        assert response.json()["usage"]["input_tokens"] == counted, response.text
        ollama = {"images": [base64.b64encode(PNG).decode()], "stream": False}
        ollama |= {"options": {"num_predict": 4}}
        response = post(server, "/api/generate", {"prompt": "<image>", **ollama})
        assert response.json()["prompt_eval_count"] == alone + len("<image>"), response.text
        messages = [{"role": "user", "content": "<image>", "images": ollama.pop("images")}]
        response = post(server, "/api/chat", {"messages": messages, **ollama})
        assert response.json()["prompt_eval_count"] == alone + len("<image>"), response.text


def test_uuids_of_other_tenants(server):
    """A uuid alone finds the picture of its tenant; no other tenant finds or changes it."""
    name, known = {"uuid": "logo"}, {"type": "image_url", "uuid": "logo"}
    mine, others = (
        answer(chat(server, part(PNG))),
        answer(chat(server, part(save(Image.fromarray(OTHER))))),
    )
    assert mine != others
    unknown = "no picture with the uuid 'logo' is kept here"
    assert refused(chat(server, known), unknown)["code"] == "unknown_uuid"
    assert answer(chat(server, part(PNG, **name))) == mine
    assert answer(chat(server, known)) == mine
    assert answer(chat(server, {**known, "image_url": None})) == mine
    refused(chat(server, known, key=1), unknown)
    refused(chat(server, known, cache_salt="mine"), unknown)
    refused(chat(server, known, mm_processor_kwargs={"do_image_splitting": False}), unknown)
    other = part(save(Image.fromarray(OTHER)), **name)
    assert answer(chat(server, other, key=1)) == others
    assert answer(chat(server, known)) == mine
    assert answer(chat(server, other)) == others  # the content counts, and replaces the picture
    assert answer(chat(server, known)) == others


SPOKEN = (Path(__file__).parents[1] / "speech/digits.wav").read_bytes()
TONE = chirp(1.0)[0]


def spoiled(number):
    samples = TONE.copy()
    samples[100] = number
    return wav(samples, code=3)


def hours(count):
    """Return a FLAC of a second whose head announces hours."""
    data = encode(chirp(1.0), "flac")
    at = data.index(b"fLaC") + 8 + 10
    (numbers,) = struct.unpack_from(">Q", data, at)
    return patched(data, at, ">Q", numbers >> 36 << 36 | count * 3600 * 16_000)


SOUNDS = [
    (hours(10), "36000 s, more than the limit of 7200 s"),
    (wav(TONE, nbytes=2**26, code=3), "cut off"),
    (b"", "empty"),
    (wav(TONE[:0]), "no samples"),
    (spoiled(np.nan), "not finite"),
    (spoiled(np.inf), "not finite"),
    (spoiled(-np.inf), "not finite"),
    (b"ID3\4\0\0\x7f\x7f\x7f\x7f" + encode(chirp(1.0), "mp3"), "damaged"),
    (b"RIFF\0\0\0\0WAVE" + bytes(8) * 10**6, "damaged"),
    (encode(chirp(5.0), "webm")[:20_000], "cut off"),
    (wav(TONE[:999], rate=1, code=3), "1 samples a second"),
    (b"%PDF-1.7\n" + SPOKEN, "no sound of a supported format"),
    (b"PK\x03\x04" + SPOKEN, "no sound of a supported format"),
    (b"#EXTM3U\nhttp://169.254.169.254/latest\n", "no sound of a supported format"),
    (PNG, "no sound of a supported format"),
]


def test_hostile_sounds(tmp_path):
    with serve(tmp_path, "--served-model-name", "m", model="octavo/spoken-words") as server:

        def hear(data):
            url = server.url + "/v1/audio/transcriptions"
            return httpx.post(url, files={"file": data}, data={"model": "m"}, timeout=120)

        def ask():
            response = hear(SPOKEN)
            assert response.status_code == 200, response.text
            return response.json()["text"]

        with honest(ask):
            for data, words in SOUNDS:
                refused(hear(data), words, "file")
            for kind in ("wav", "flac", "mp3", "opus", "m4a", "webm", "aac"):
                whole = encode(chirp(2.0), kind)
                for length in (1, 11, 40, 100, len(whole) // 2, len(whole) - 9):
                    response = hear(whole[:length])
                    if response.status_code != 200:
                        refused(response, "The file|file ", "file")
            assert ask() == hear(SPOKEN + b"PK\x03\x04<script>").json()["text"]
