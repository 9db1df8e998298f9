"""Media of chats in prompts: order, bounds, and errors that name the picture."""

import asyncio
import base64
import hashlib
import io
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from octavo.config import ModelConfig
from octavo.errors import ContextLengthError, RequestError
from octavo.frontend.chat_media import ChatMedia
from octavo.frontend.media_cache import MediaCache
from octavo.frontend.pictures import Pictures
from octavo.frontend.prompt_media import PromptMedia, media_key
from octavo.media.content import MediaItem
from octavo.multimodal.processors.registry import make_processor

SETTINGS = {
    "size": {"shortest_edge": 3136, "longest_edge": 100_000},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "placeholder": "<pad>",
    "embed_token": "<pad>",
}


def url(height, width):
    pixels = np.zeros((height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class Letters:
    """Tokenizer of letters."""

    def encode(self, text, add_special_tokens=True, max_tokens=None):
        assert not add_special_tokens
        return [7] if text == "<pad>" else [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "a.png").write_bytes(base64.b64decode(url(28, 84).partition(",")[2]))
    return folder


@pytest.fixture(scope="module")
def chat_media(folder):
    processor = make_processor("qwen2_vl", SETTINGS)
    pictures = Pictures("qwen2_vl", processor, SimpleNamespace(max_num_tokens=1000), 3)
    settings = ModelConfig(allowed_local_media_path=str(folder))
    return ChatMedia(PromptMedia([pictures], Letters(), 40), settings, Letters(), 40)


def read(chat_media, *sources, pieces=("a<pad>",), **options):
    return chat_media.read_prompt_now(pieces, items_of(sources), **options)


def items_of(sources):
    return [
        MediaItem("image", source, None, f"picture {i + 1}") for i, source in enumerate(sources)
    ]


def test_kinds(chat_media):
    kind = chat_media.kinds["image"]
    assert (kind.placeholder, kind.limit, kind.reserved) == ("<pad>", 3, ("<pad>",))


def test_pictures_are_in_order(chat_media, folder):
    image = Image.new("RGB", (9, 9))
    prompt = read(chat_media, url(56, 84), image, f"file://{folder}/a.png")
    first, second, third = prompt["multi_modal_data"]["image"]
    assert (first.parts[0].place.grid, second, third.parts[0].place.grid) == (
        (1, 2, 3),
        image,
        (1, 2, 4),
    )
    assert prompt["prompt"] == "a<pad>"
    assert "prompt_token_ids" not in prompt


def test_pieces_are_tokenised_separately(chat_media):
    prompt = read(chat_media, pieces=["a<", "pad>"])
    assert prompt == {"prompt": "a<pad>", "prompt_token_ids": list(map(ord, "a<pad>"))}


def test_settings_of_a_request(chat_media):
    settings = {"max_pixels": 3136}
    prompt = read(chat_media, url(112, 112), mm_processor_kwargs=settings)
    assert prompt["multi_modal_data"]["image"][0].parts[0].place.grid == (1, 2, 2)
    assert prompt["mm_processor_kwargs"] == settings
    with pytest.raises(RequestError, match="nonsense is not allowed") as error:
        read(chat_media, url(9, 9), mm_processor_kwargs={"nonsense": 1})
    assert error.value.param == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("data:;base64,AAAA", "picture 2: the file is no picture"),
        ("data:;base64,A*", "picture 2: the base64 is malformed"),
        ("https://a.example/b.png", "picture 2: the host a.example is not allowed"),
        ("file:///etc/passwd", "picture 2: the file is not below"),
        (url(1, 300), "picture 2: .* at most 200 times"),
    ],
)
def test_errors_name_the_picture(chat_media, source, match):
    with pytest.raises(RequestError, match=match) as error:
        read(chat_media, url(28, 28), source)
    assert error.value.param == "messages"


def test_limits_of_the_process_name_the_picture(chat_media, monkeypatch):
    failed = Future()
    failed.set_exception(RequestError("The file was given up.", "picture 2"))
    monkeypatch.setattr(chat_media._files["image"], "read", lambda *_: failed)
    with pytest.raises(RequestError, match=r"^picture 2: The file was given up\.$") as error:
        read(chat_media, Image.new("RGB", (9, 9)), url(28, 28))
    assert error.value.param == "messages"


def test_pictures_are_bounded_while_they_are_read(chat_media):
    found = []
    items = items_of([url(112, 112)] * 2)
    asyncio.run(chat_media.read_prompt(["a"], items, None, found.append))
    assert found == [64 * 1176 * 4 + 3 * 8] * 2
    with pytest.raises(ContextLengthError, match=r"first 3 pictures have 48 tokens; .* has 40"):
        read(chat_media, *[url(112, 112)] * 9)

    def full(nbytes):
        raise RequestError("full")

    with pytest.raises(RequestError, match="full"):
        asyncio.run(chat_media.read_prompt(["a"], items, None, full))


class Counting:
    """Reader of files that counts them."""

    def __init__(self, reader):
        self.reader, self.count = reader, 0

    def read(self, *args):
        self.count += 1
        return self.reader.read(*args)


@pytest.fixture
def counting(chat_media, monkeypatch):
    """Return the reader of files of `chat_media`, which keeps at most three items of this size."""
    reader = Counting(chat_media._files["image"])
    monkeypatch.setitem(chat_media._files, "image", reader)
    nbytes = 4 * 6 * 1176 * 4 + 3 * 8 + 1024
    monkeypatch.setattr(chat_media._media, "cache", MediaCache(3 * nbytes))
    return reader


def test_a_file_is_read_once(chat_media, folder, counting):
    """The URL does not count; the content, the settings and the scope do."""

    def read_in(scope, source, settings=None, share=None):
        work = chat_media.read_prompt(["a"], items_of([source]), settings, share=share, scope=scope)
        before = counting.count
        (item,) = asyncio.run(work)["multi_modal_data"]["image"]
        return item, counting.count - before

    file = url(28, 84)
    first, count = read_in(None, file)
    assert count == 1
    for source in (file, f"file://{folder}/a.png", file.replace("image/png", "image/x")):
        assert read_in(None, source) == (first, 0)
    small, count = read_in(None, file, {"min_pixels": 1})
    assert (small.num_embeds, first.num_embeds, count) == (3, 8, 1)
    assert read_in(None, file, {"min_pixels": 1}) == (small, 0)
    chat_media._media.cache.clear()
    assert read_in(None, file) == (first, 1)
    for scope in ("mine", "other"):  # also the time of an answer tells them nothing
        assert read_in(scope, file) == (first, 1)
        assert read_in(scope, file) == (first, 0)


def test_the_files_that_are_kept_are_bounded(chat_media, counting):
    files = [url(56, 84 + i) for i in range(4)]
    sizes = [read(chat_media, file)["multi_modal_data"]["image"][0].nbytes for file in files]
    cache = chat_media._media.cache
    assert sizes == [24 * 1176 * 4 + 3 * 8] * 4
    assert (len(cache), cache.nbytes) == (3, cache.max_nbytes)
    assert counting.count == 4
    read(chat_media, files[3])
    assert counting.count == 4
    read(chat_media, files[0])
    assert counting.count == 5


def test_a_file_that_cannot_be_read_is_not_kept(chat_media, counting):
    for count in (1, 2):
        with pytest.raises(RequestError, match="no picture"):
            read(chat_media, "data:;base64,AAAA")
        assert (counting.count, len(chat_media._media.cache)) == (count, 0)


def test_a_uuid_finds_no_file(chat_media, counting):
    """No client can name a file by its digest."""
    file = base64.b64decode(url(28, 84).partition(",")[2])
    read(chat_media, url(28, 84))
    digest = hashlib.sha256(file)
    cache = chat_media._media.cache
    assert cache.get(media_key(None, digest.digest(), "image", {})) is not None
    for uuid in (digest.hexdigest(), digest.digest().decode("latin-1")):
        assert cache.get(media_key(None, uuid, "image", {})) is None


def test_slow_hosts_delay_no_files(chat_media, monkeypatch):
    fetch = chat_media._fetcher.fetch

    async def never(source, param):
        if source.startswith("https:"):
            await asyncio.Event().wait()
        return await fetch(source, param)

    monkeypatch.setattr(chat_media._fetcher, "fetch", never)

    async def main():
        slow = [
            asyncio.create_task(chat_media.read_prompt(["a"], items_of(["https://a.example/"])))
            for _ in range(40)
        ]
        await asyncio.sleep(0)
        prompt = await chat_media.read_prompt(["a"], items_of([url(56, 84)]))
        for task in slow:
            task.cancel()
        return prompt

    assert asyncio.run(main())["multi_modal_data"]["image"][0].num_embeds == 6


def test_callers_with_an_event_loop(chat_media):
    async def main():
        return read(chat_media, url(56, 84))

    assert asyncio.run(main())["multi_modal_data"]["image"][0].num_embeds == 6


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_keeps_the_place_of_a_begun_file(chat_media, monkeypatch, begun):
    """Its helper process cannot give the file up, so it has no place for other files."""

    async def main():
        reading = Future()
        if begun:
            reading.set_running_or_notify_cancel()
        given = asyncio.Event()

        def start(*_):
            given.set()
            return reading

        monkeypatch.setattr(chat_media._files["image"], "read", start)
        free = chat_media._slots._free
        task = asyncio.create_task(chat_media.read_prompt(["a"], items_of([url(30, 33)])))
        await given.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reading.cancelled() != begun
        assert chat_media._slots._free == free - begun
        if begun:
            reading.set_exception(RequestError("nobody hears this"))
            await asyncio.gather(*chat_media._keeping)
        assert chat_media._slots._free == free

    asyncio.run(main())


def test_a_tenant_leaves_a_helper_process_to_others(chat_media, monkeypatch):
    """Also files that are known wait for no file that is read."""
    count = chat_media._files["image"].num_processes
    known = url(28, 84)
    monkeypatch.setattr(chat_media._media, "cache", MediaCache(10**6))
    read(chat_media, known)

    async def main():
        begun = []

        def start(file, *_):
            begun.append(Future())
            begun[-1].set_running_or_notify_cancel()
            return begun[-1]

        def send(source, share):
            work = chat_media.read_prompt(["a"], items_of([source]), share=share)
            return asyncio.create_task(work)

        async def let_others_run():
            for _ in range(20):
                await asyncio.sleep(0)

        monkeypatch.setattr(chat_media._files["image"], "read", start)
        flood = [send(url(31, 40 + i), "flood") for i in range(9)]
        await let_others_run()
        assert len(begun) == count - 1
        other = send(url(32, 40), "other")
        await let_others_run()
        assert len(begun) == count
        begun[-1].set_result(small := SimpleNamespace(num_embeds=1, nbytes=1))
        assert (await other)["multi_modal_data"]["image"] == [small]
        await send(known, "other")
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        for reading in begun[:-1]:
            reading.set_result(small)
        await asyncio.gather(*chat_media._keeping)
        assert (chat_media._slots._free, chat_media._turns["image"]._free) == (4, count)

    asyncio.run(main())
