"""Server in a thread that answers /v1/completions correctly, wrongly or not at all.

`python -m tests.bench.fake_openai --port N` runs it in its own process, with the failures that
`main` lists.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator

Script = Callable[[dict], AsyncIterator[bytes]]

HEADERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
MODELS = {"object": "list", "data": [{"id": "fake", "max_model_len": 64}]}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def token(text: str, finish: str | None = None, **more: object) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": {**counts, "prompt_tokens_details": details}})


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def plain(body: object, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\nConnection: close\r\n\r\n" + data


def good(step_time: float = 0.0) -> Script:
    """Return the requested number of tokens."""

    async def script(body: dict) -> AsyncIterator[bytes]:
        yield HEADERS
        count = body["max_tokens"]
        for i in range(count):
            await asyncio.sleep(step_time)
            yield token(f"t{i} ", "length" if i == count - 1 else None)
        yield usage(len(body["prompt"]), count, cached=1) + DONE

    return script


def fixed(*parts: bytes) -> Script:
    """Return the given bytes for every request, and then close the connection."""

    async def script(body: dict) -> AsyncIterator[bytes]:
        for part in parts:
            yield part
            await asyncio.sleep(0.001)

    return script


async def silent(body: dict) -> AsyncIterator[bytes]:
    await asyncio.sleep(60)
    yield b""


class FakeServer:
    """Server of the module. `bodies`: the requests; `metrics`: texts of /metrics, one a call."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.models = plain(MODELS)
        self.metrics: list[str] = []
        self.bodies: list[dict] = []
        self.heads: list[bytes] = []
        self.num_open = self.most_open = 0
        self.can_reset, self.num_resets = True, 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST /reset_prefix_cache "):
                self.num_resets += 1
                writer.write(plain({}, "200 OK" if self.can_reset else "404 Not Found"))
            elif head.startswith(b"POST"):
                await self._post(head, reader, writer)
            elif head.startswith(b"GET /v1/models "):
                writer.write(self.models)
            elif head.startswith(b"GET /health "):
                writer.write(plain({"status": "ok"}))
            elif head.startswith(b"GET /metrics ") and self.metrics:
                text = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
                writer.write(plain(text.encode(), content_type="text/plain"))
            else:
                writer.write(plain({"error": {"message": "no such page"}}, "404 Not Found"))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _post(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.heads.append(head)
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async for part in self.script(body):
                writer.write(part)
                await writer.drain()
        finally:
            self.num_open -= 1


@contextlib.contextmanager
def fake_server(script: Script) -> Iterator[FakeServer]:
    server = FakeServer(script)
    started, loop = threading.Event(), asyncio.new_event_loop()

    async def main() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        server.stop = asyncio.Event()
        started.set()
        await server.stop.wait()
        await asyncio.sleep(0.01)  # new connections are handled, and so closed
        listener.close()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stop.set)
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--fail", help="Say this and end.")
    parser.add_argument("--hang", action="store_true", help="Never listen.")
    parser.add_argument("--stubborn", action="store_true", help="Ignore SIGTERM.")
    parser.add_argument("--child", action="store_true", help="Start a process that stays.")
    parser.add_argument("--die", action="store_true", help="End at the first request.")
    args, _ = parser.parse_known_args()
    if args.fail:
        sys.exit(args.fail)
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.child:
        child = subprocess.Popen(["sleep", "600"])
        print(f"child {child.pid}", flush=True)

    async def die(body: dict) -> AsyncIterator[bytes]:
        print("out of memory", flush=True)
        signal.raise_signal(signal.SIGKILL)
        yield b""

    async def serve() -> None:
        if not args.hang:
            server = FakeServer(die if args.die else good(args.step_time))
            await asyncio.start_server(server.handle, "127.0.0.1", args.port)
        await asyncio.sleep(600)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
