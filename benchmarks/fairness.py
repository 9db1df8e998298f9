"""Measure one API key's waits while another key floods the server.

    python benchmarks/fairness.py [--seconds 30] [--flooders 32] [--flags "--max-num-seqs 32"]
    python benchmarks/fairness.py --flood picture [--seconds 20] [--rounds 3]
    python benchmarks/fairness.py --flood sound
    python benchmarks/fairness.py --flood session
    python benchmarks/fairness.py --flood video --model FOLDER

Starts a server with the built-in model, or another one, and two keys. Each of the light key's times
is measured alone first, then under the flood.

text: the light key sends one prompt of --tokens at intervals; the flood consists of --flooders
concurrent long prompts without common prefixes. The time is that to the first token. A third
measurement has both under one key, which fairness is meant to prevent. Under the flood each request
waits at least for the step that is being computed and the one that is scheduled after it. So the
step's budget determines the minimum length of a prompt for a ratio of two: about four steps' worth,
which is also the amount that a key may save up.

picture, sound, video: the flood consists of --flooders (8) concurrent requests with large files:
PNG of 8192 x 8192 pixels, MP3 and WAV of three minutes, or videos of 32 frames of 2048 x 2048.
They are sent in turns, with other bytes after their end, so that the server reads them again. The
light key's requests take turns, too: a text whose answer has 8 tokens, and a small file of the same
kind (a picture of 96 x 96 pixels, a second of sound). The time is that of the whole answer. Sounds
are transcribed, and texts go to another server on the same cores. The small sounds are words with
faint noise, so that each takes the same work. In each of --rounds the light key
is measured alone and then beside the flood; the ratios are those of all rounds together. Videos
need a model that reads them.

session: the flood consists of --flooders (32) sessions of /v1/realtime. Each sends three seconds of
speech, commits them, and sends the next ones when it has the transcript. The light key has a
session of its own, to which it sends a second of speech; the time is that from the first byte to
the transcript.

The target is a ratio of at most 2 of the 99th percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import itertools
import json
import multiprocessing
import random
import shlex
import struct
import sys
import threading
import time
import wave
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from attacks import server

LIGHT, FLOOD = "light-key", "flood-key"
DIGITS = Path(__file__).parents[1] / "tests/speech/digits.wav"
TEXTS, SPEECH = "octavo/stories", "octavo/spoken-words"
# Ids that every model has, and that are no special tokens in most.
FIRST_ID, NUM_IDS = 100, 150


def prompt(chance: random.Random, length: int) -> list[int]:
    """Return random token ids."""
    return [FIRST_ID + chance.randrange(NUM_IDS) for _ in range(length)]


def headers(key: str) -> dict[str, str]:
    """Return the headers with a key."""
    return {"Authorization": f"Bearer {key}"}


def first_token_times(url: str, key: str, length: int, seconds: float) -> list[float]:
    """Return the sorted seconds to the first token of successive requests with pauses."""
    chance = random.Random(1)
    times = []
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=600, headers=headers(key)) as client:
        while time.monotonic() < end or len(times) < 3:
            fields = {"prompt": prompt(chance, length), "max_tokens": 4, "stream": True}
            started = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=fields) as response:
                response.raise_for_status()
                pieces = response.iter_bytes()
                next(pieces)
                times.append(time.perf_counter() - started)
                for _ in pieces:
                    pass
            time.sleep(chance.uniform(0.02, 0.1))
    return sorted(times)


def flood(url: str, key: str, count: int, length: int) -> None:
    """Keep `count` requests of `length` tokens in flight, forever."""

    async def one(client: httpx.AsyncClient, chance: random.Random) -> None:
        while True:
            fields = {"prompt": prompt(chance, length), "max_tokens": 16, "ignore_eos": True}
            with contextlib.suppress(httpx.HTTPError):
                await client.post("/v1/completions", json=fields)

    async def run() -> None:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(
            base_url=url, timeout=600, headers=headers(key), limits=limits
        ) as client:
            await asyncio.gather(*(one(client, random.Random(i)) for i in range(count)))

    asyncio.run(run())


def percentile(times: list[float], share: float) -> float:
    """Return a percentile of sorted times, in milliseconds."""
    return times[min(len(times) - 1, int(share * len(times)))] * 1e3


def show(name: str, times: list[float], alone: list[float]) -> float:
    """Print a line; return the ratio of the 99th percentiles."""
    ratio = percentile(times, 0.99) / percentile(alone, 0.99)
    print(
        f"{name:22}{len(times):8}{percentile(times, 0.5):10.1f}{percentile(times, 0.99):10.1f}"
        f"{ratio:8.2f}",
        flush=True,
    )
    return ratio


class Question:
    """A request: its path, and the arguments of `httpx.Client.post`."""

    def __init__(self, path: str, **arguments: Any) -> None:
        self.path, self.arguments = path, arguments

    def send(self, client: httpx.Client, url: str) -> None:
        """Send it to a server, and wait for the answer."""
        client.post(url + self.path, **self.arguments).raise_for_status()


class Session:
    """Session of /v1/realtime that transcribes what it gets.

    Args:
        url: address of the server.
        key: key of the sender.
    """

    def __init__(self, url: str, key: str) -> None:
        from websockets.sync.client import connect

        self._connection = connect(
            url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription",
            additional_headers=headers(key),
            compression=None,
        )
        self._socket = self._connection.__enter__()
        audio = {"input": {"turn_detection": None}}
        self._send("session.update", session={"type": "transcription", "audio": audio})

    def transcribe(self, pcm: bytes) -> None:
        """Send a sound, int16 at 24 kHz, and wait for its transcript."""
        for begin in range(0, len(pcm), 48_000):
            part = base64.b64encode(pcm[begin : begin + 48_000]).decode()
            self._send("input_audio_buffer.append", audio=part)
        self._send("input_audio_buffer.commit")
        while True:
            event = json.loads(self._socket.recv())
            if event["type"] == "error" or event["type"].endswith(".failed"):
                raise RuntimeError(str(event))
            if event["type"].endswith("input_audio_transcription.completed"):
                return

    def _send(self, kind: str, **fields: Any) -> None:
        self._socket.send(json.dumps({"type": kind, **fields}))


class Turn(Question):
    """A sound for a session.

    Args:
        session: the session.
        pcm: the sound, int16 at 24 kHz.
    """

    def __init__(self, session: Session, pcm: bytes) -> None:
        self.session, self.pcm = session, pcm

    def send(self, client: httpx.Client, url: str) -> None:
        """Implement `Question`."""
        self.session.transcribe(self.pcm)


def chat(text: str, kind: str = "", url: str = "", **fields: Any) -> Question:
    """Return a chat with a text, and with a picture or a video."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if url:
        content.insert(0, {"type": kind, kind: {"url": url}})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
    body |= {"ignore_eos": True, "temperature": 0}
    data = json.dumps(body).encode()
    return Question(
        "/v1/chat/completions", content=data, headers={"Content-Type": "application/json"}
    )


def data_url(kind: str, file: bytes) -> str:
    """Return the data URL of a file."""
    return f"data:{kind};base64," + base64.b64encode(file).decode()


def png(side: int, top: bytes, rest: tuple[bytes, int]) -> bytes:
    """Return a PNG whose upper rows are `top`, and whose other rows are black.

    Args:
        side: width and height in pixels.
        top: the upper rows: for each a 0, and three bytes for each pixel.
        rest: deflated black rows, and the number of their bytes.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(1, wbits=-15)
    body = packer.compress(top) + packer.flush(zlib.Z_FULL_FLUSH) + rest[0]
    # Adler-32 of the whole: black bytes only add the first sum to the second one.
    check = zlib.adler32(top)
    low, high = check & 0xFFFF, check >> 16
    high = (high + rest[1] * low) % 65521
    body = b"\x78\x01" + body + struct.pack(">I", high << 16 | low)
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def pictures(side: int, seed: int) -> Iterator[bytes]:
    """Yield PNG files of random colors, without an end."""
    rng = np.random.default_rng(seed)
    rows = side // 8
    black = (side - rows) * (1 + 3 * side)
    packer = zlib.compressobj(1, wbits=-15)
    rest = packer.compress(bytes(black)) + packer.flush()
    while True:
        top = np.zeros((rows, 1 + 3 * side), np.uint8)
        top[:, 1:] = np.tile(rng.integers(0, 256, 3, np.uint8), side)
        yield png(side, top.tobytes(), (rest, black))


def encoded(kind: str, codec: str, frames: Iterator[Any], rate: int, **settings: Any) -> bytes:
    """Return a file of a video or a sound, by PyAV."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=rate, **settings)
        for frame in frames:
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def videos(side: int, count: int, seed: int) -> Iterator[bytes]:
    """Yield MP4 files of moving noise, without an end."""
    import av

    def frames(rng: np.random.Generator) -> Iterator[Any]:
        small = rng.integers(0, 256, (side // 32, side // 32, 3), np.uint8)
        large = np.repeat(np.repeat(small, 32, 0), 32, 1)
        for i in range(count):
            yield av.VideoFrame.from_ndarray(np.roll(large, 8 * i, 1), "rgb24")

    rng = np.random.default_rng(seed)
    while True:
        yield encoded(
            "mp4",
            "mpeg4",
            frames(rng),
            8,
            options={"qscale": "5"},
            width=side,
            height=side,
            pix_fmt="yuv420p",
        )


def sounds(seconds: float, kind: str, seed: int) -> Iterator[bytes]:
    """Yield files of noise that swells, as WAV or MP3, without an end."""
    import av

    rng = np.random.default_rng(seed)
    rate, length = 16_000, 1152
    while True:
        count = int(seconds * rate) // length + 1
        samples = rng.normal(0, 2000, (count, length)) * rng.uniform(0.1, 1, (count, 1))
        data = samples.astype(np.int16)
        if kind == "wav":
            head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
            head += b"data" + struct.pack("<I", data.nbytes)
            yield b"RIFF" + struct.pack("<I", len(head) + data.nbytes) + head + data.tobytes()
            continue

        def frames(data: Any = data) -> Iterator[Any]:
            for i, part in enumerate(data):
                frame = av.AudioFrame.from_ndarray(part[None], "s16p", "mono")
                frame.sample_rate, frame.pts = rate, i * length
                yield frame

        yield encoded("mp3", "libmp3lame", frames(), rate, layout="mono", format="s16p")


def speech(seconds: int, seed: int, rate: int = 16_000) -> Iterator[bytes]:
    """Yield spoken words with faint noise, int16, without an end."""
    with wave.open(str(DIGITS)) as file:
        said = np.frombuffer(file.readframes(2 * file.getframerate()), np.int16)
    rng = np.random.default_rng(seed)
    count = seconds * rate
    words = np.interp(np.arange(count) * (16_000 / rate) % len(said), np.arange(len(said)), said)
    while True:
        yield (0.9 * words + rng.normal(0, 20, count)).astype(np.int16).tobytes()


def wav(pcm: bytes) -> bytes:
    """Return a WAV file of samples, int16 at 16 kHz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", "not compressed"))
        sound.writeframes(pcm)
    return file.getvalue()


def question(kind: str, file: bytes, number: int) -> Question:
    """Return the request with a file, which no other request has if the number is another one."""
    tail = struct.pack(">I4sI", 12, b"free", number)  # a box of MP4; PNG and WAV have no tail
    match kind:
        case "picture":
            return chat("What is it?", "image_url", data_url("image/png", file + tail))
        case "video":
            return chat("What is it?", "video_url", data_url("video/mp4", file + tail))
        case _:
            return Question(
                "/v1/audio/transcriptions",
                files={"file": ("sound", file)},
                data={"response_format": "json"},
            )


def joined(minute: bytes) -> bytes:
    """Return a sound of a minute as one of three."""
    if not minute.startswith(b"RIFF"):
        return 3 * minute
    data = 3 * minute[44:]
    size = struct.pack("<I", 36 + len(data))
    return b"RIFF" + size + minute[8:40] + struct.pack("<I", len(data)) + data


def large_files(kind: str) -> list[bytes]:
    """Return files for a flood."""
    match kind:
        case "picture":
            return [*itertools.islice(pictures(8192, 1000), 12)]
        case "video":
            return [*itertools.islice(videos(2048, 32, 1000), 6)]
        case _:
            minutes = [
                next(sounds(60, form, 1000 + i)) for i in range(2) for form in ("mp3", "wav")
            ]
            return [joined(minute) for minute in minutes]


def small_files(kind: str) -> Iterator[bytes]:
    """Return small files, without an end."""
    match kind:
        case "picture":
            return pictures(96, 1)
        case "video":
            return videos(64, 4, 1)
        case _:
            return map(wav, speech(1, 1))


def flood_files(url: str, key: str, count: int, kind: str, ready: Any, done: Any) -> None:
    """Keep `count` requests with large files in flight, forever.

    Args:
        url: address of the server.
        key: key of the flood.
        count: number of requests.
        kind: kind of the files.
        ready: event that is set once the first files are made.
        done: counts the answers by their status: 200, and others.
    """
    files, numbers = itertools.cycle(large_files(kind)), itertools.count()
    ready.set()

    async def one(client: httpx.AsyncClient) -> None:
        while True:
            it = question(kind, next(files), next(numbers))
            with contextlib.suppress(httpx.HTTPError):
                response = await client.post(it.path, **it.arguments)
                done[response.status_code != 200] += 1
                if response.status_code != 200:
                    if done[1] == 1:
                        print(response.text[:300], flush=True)
                    await asyncio.sleep(0.1)

    async def run() -> None:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(
            base_url=url, timeout=600, headers=headers(key), limits=limits
        ) as client:
            await asyncio.gather(*(one(client) for _ in range(count)))

    asyncio.run(run())


def flood_sessions(url: str, key: str, count: int, kind: str, ready: Any, done: Any) -> None:
    """Let `count` sessions speak, forever; the arguments are those of `flood_files`."""

    def speak(seed: int) -> None:
        session, sound = Session(url, key), speech(3, seed, 24_000)
        while True:
            session.transcribe(next(sound))
            done[0] += 1

    threads = [threading.Thread(target=speak, args=(1000 + i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    ready.set()


def answer_times(
    makers: dict[str, tuple[str, Callable[[], Question]]], seconds: float
) -> dict[str, list[float]]:
    """Return the seconds of whole answers by kind; kinds take turns, with pauses.

    Args:
        makers: for each kind, the address of its server and a function that makes a request.
        seconds: duration.
    """
    chance = random.Random(1)
    times: dict[str, list[float]] = {kind: [] for kind in makers}
    end = time.monotonic() + seconds
    with httpx.Client(timeout=600, headers=headers(LIGHT)) as client:
        while time.monotonic() < end:
            for kind, (url, make) in makers.items():
                it = make()
                started = time.perf_counter()
                it.send(client, url)
                times[kind].append(time.perf_counter() - started)
                time.sleep(chance.uniform(0.01, 0.05))
    return times


def measure_files(options: argparse.Namespace) -> int:
    """Print the light key's times beside a flood of files; return 1 if the target is missed."""
    kind, spawn = options.flood, multiprocessing.get_context("spawn")
    flags = ["--api-key", LIGHT, "--api-key", FLOOD, *shlex.split(options.flags or "")]
    names = {"sound": SPEECH, "session": SPEECH, "picture": "octavo/stories-eyes"}
    small, numbers = small_files(kind), itertools.count()
    hears = kind in ("sound", "session")
    found: list[dict[str, list[float]]] = [{name: [] for name in ("text", kind)} for _ in range(2)]
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(server([options.model or names[kind], *flags]))
        texts = stack.enter_context(server([TEXTS, *flags])) if hears else url
        makers: dict[str, tuple[str, Callable[[], Question]]] = {
            "text": (texts, lambda: chat(f"{next(numbers)}: a word or two")),
            kind: (url, lambda: question(kind, next(small), next(numbers))),
        }
        if kind == "session":
            session, said = Session(url, LIGHT), speech(1, 1, 24_000)
            makers[kind] = url, lambda: Turn(session, next(said))
        if options.light != "both":
            del makers[kind if options.light == "text" else "text"]
        answer_times(makers, 2.0)
        for _ in range(options.rounds):
            for name, times in answer_times(makers, options.seconds).items():
                found[0][name] += times
            ready, done = spawn.Event(), spawn.Array("i", 2)
            count = 32 if kind == "session" else 8
            flooder = spawn.Process(
                target=flood_sessions if kind == "session" else flood_files,
                args=(url, FLOOD, options.flooders or count, kind, ready, done),
                daemon=True,
            )
            flooder.start()
            ready.wait()
            time.sleep(2.0)
            before, began = done[0], time.monotonic()
            for name, times in answer_times(makers, options.seconds).items():
                found[1][name] += times
            seconds = time.monotonic() - began
            flooder.kill()
            flooder.join()
            print(
                f"flood: {(done[0] - before) / seconds:.2f} answers a second, {done[1]} refused",
                flush=True,
            )
            time.sleep(4.0)
    ratios = []
    print(f"{'':22}{'requests':>8}{'p50 ms':>10}{'p99 ms':>10}{'ratio':>8}")
    for name in makers:
        alone, beside = (sorted(times[name]) for times in found)
        show(f"{name} alone", alone, alone)
        ratios.append(show(f"{name} beside the flood", beside, alone))
        print(
            f"{'':22}{'':8}{percentile(beside, 0.5) / percentile(alone, 0.5):10.2f} (ratio of p50)"
        )
    return int(max(ratios) > 2)


def main() -> int:
    """Print the measurements; return status 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each measurement")
    parser.add_argument("--tokens", type=int, default=480, help="length of the light key's prompts")
    parser.add_argument(
        "--flood", choices=["text", "picture", "sound", "session", "video"], default="text"
    )
    parser.add_argument("--model", help="another model")
    parser.add_argument(
        "--light",
        choices=["text", "file", "both"],
        default="both",
        help="what the light key sends beside a flood of files",
    )
    parser.add_argument("--rounds", type=int, default=1, help="rounds beside a flood of files")
    parser.add_argument("--flooders", type=int, help="number of concurrent requests of the flood")
    parser.add_argument(
        "--flood-tokens", type=int, default=1500, help="length of each prompt of the flood"
    )
    parser.add_argument(
        "--flags",
        help='flags of octavo serve; of texts: "--max-num-batched-tokens 128 --max-num-seqs 16"',
    )
    options = parser.parse_args()
    if options.flood != "text":
        return measure_files(options)
    spawn = multiprocessing.get_context("spawn")
    flags = options.flags or "--max-num-batched-tokens 128 --max-num-seqs 16"
    model = [options.model] if options.model else []
    with server([*model, "--api-key", LIGHT, "--api-key", FLOOD, *shlex.split(flags)]) as url:
        first_token_times(url, LIGHT, options.tokens, 2.0)
        print(f"{'':22}{'requests':>8}{'p50 ms':>10}{'p99 ms':>10}{'ratio':>8}")
        alone = first_token_times(url, LIGHT, options.tokens, options.seconds)
        show("alone", alone, alone)
        ratios = []
        for name, key in (("flood by another key", FLOOD), ("flood by the same key", LIGHT)):
            flooder = spawn.Process(
                target=flood,
                args=(url, key, options.flooders or 32, options.flood_tokens),
                daemon=True,
            )
            flooder.start()
            time.sleep(3.0)
            times = first_token_times(url, LIGHT, options.tokens, options.seconds)
            flooder.kill()
            flooder.join()
            ratios.append(show(name, times, alone))
    return int(ratios[0] > 2)


if __name__ == "__main__":
    sys.exit(main())
