"""Protocol before any key is checked: raw bytes against a real server."""

import json
import re
import select
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack, suppress
from unittest.mock import Mock

import httpx
import psutil
import pytest

from octavo.server import protocol
from tests.server.test_run import serving

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
MIB = 2**20


@pytest.fixture(scope="module")
def server():
    with serving("ready", "--api-key", "secret", "--max-connections-per-client", "50") as started:
        yield started


@pytest.fixture(scope="module")
def impatient():
    with serving("impatient") as started:
        yield started


def connect(server):
    return socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=60)


def read_all(raw):
    data = b""
    with suppress(ConnectionError):
        while piece := raw.recv(65536):
            data += piece
    return data


def talk(server, *pieces):
    """Send the pieces; return all data until the server ends the connection."""
    with connect(server) as raw:
        with suppress(ConnectionError):
            for piece in pieces:
                raw.sendall(piece)
        return read_all(raw)


def try_again(attempt):
    """Return the first result that is not empty.

    A server that is impatient on a busy machine may end a connection before it reads the request.
    """
    return next(filter(None, (attempt() for _ in range(20))), b"")


def drips(raw, data):
    """Send a byte now and then; return their number at the end of the connection."""
    for i in range(len(data)):
        try:
            raw.sendall(data[i : i + 1])
        except ConnectionError:
            return i
        time.sleep(0.05)
    return len(data)


def rss(server):
    return psutil.Process(server.process.pid).memory_info().rss


def assert_refused(answer, status):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head
    assert b"content-type: application/json" in head
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /?" + b"a" * 90_000 + b" HTTP/1.1\r\n\r\n", 414),
        (GET + b"A: " + b"x" * 33_000 + b"\r\n\r\n", 431),
        (GET + b"".join(b"A%d: x\r\n" % i for i in range(101)) + b"\r\n", 431),
        (GET + b"".join(b"A%d: %b\r\n" % (i, b"x" * 1000) for i in range(40)) + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\r\n" * 50_000, 431),
        (GET + b"Content-Length: x\r\n\r\n", 400),
    ],
)
def test_heads_that_are_too_large_or_wrong(server, head, status):
    assert_refused(talk(server, head), status)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"", b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\n\r\n"),
        (GET, b"A: " + b"x" * 32_000 + b"\r\n\r\n"),
        (GET, b"".join(b"A%d: x\r\n" % i for i in range(98)) + b"\r\n"),
    ],
)
def test_heads_within_the_bounds(server, head, body):
    with connect(server) as raw:
        raw.sendall(head + body)
        assert raw.recv(100).startswith(b"HTTP/1.1 401 ")


def test_a_websocket_has_no_timeout_for_heads(monkeypatch):
    """Else each would end after `HEAD_TIMEOUT`."""
    made = object.__new__(protocol.Protocol)
    base = protocol.HttpToolsProtocol
    monkeypatch.setattr(base, "handle_websocket_upgrade", lambda self: None)
    monkeypatch.setattr(base, "data_received", lambda self, _: self.handle_websocket_upgrade())
    made._deaf = made._in_head = False
    made._unheard_bytes, made._connections, made.cycle, made.client = 0, None, None, None
    made.transport, made.loop = Mock(**{"is_closing.return_value": False}), Mock()
    made._head_timer = None  # the head was complete
    made.data_received(b"GET /v1/realtime")
    made.loop.call_later.assert_not_called()


def test_the_bounds_are_nginxs():
    """The architecture's description and the README have these seconds and bytes."""
    assert (protocol.MAX_URL_BYTES, protocol.MAX_HEAD_BYTES) == (8 * 1024, 32 * 1024)
    assert (protocol.MAX_HEADERS, protocol.MAX_PIPELINED) == (100, 16)
    assert (protocol.HEAD_TIMEOUT, protocol.SEND_TIMEOUT) == (10.0, 60.0)
    assert protocol.KEEP_ALIVE_TIMEOUT == 75


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * 8191), 401),
        (b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * 8192), 414),
        (GET + b"".join(b"A%d: x\r\n" % i for i in range(99)) + b"\r\n", 401),
        (GET + b"".join(b"A%d: x\r\n" % i for i in range(100)) + b"\r\n", 431),
        # Each header counts with its colon, space and end of line.
        (GET + b"A: " + b"x" * (32 * 1024 - 17 - 5) + b"\r\n\r\n", 401),
        (GET + b"A: " + b"x" * (32 * 1024 - 17 - 4) + b"\r\n\r\n", 431),
    ],
)
def test_the_bounds_to_the_byte(server, head, status):
    with connect(server) as raw:
        raw.sendall(head)
        assert raw.recv(100).startswith(b"HTTP/1.1 %d " % status)


def test_as_many_requests_as_may_wait(server):
    one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert talk(server, one * 16 + last).count(b"HTTP/1.1 200 OK") == 17


@pytest.mark.parametrize("trailer", [False, True])
def test_an_endless_header_is_not_kept(server, trailer):
    head = CHUNKED + b"0\r\n"
    before = rss(server)
    answer = talk(server, head if trailer else GET, b"A: ", *[b"x" * MIB] * 80)
    assert rss(server) < before + 30 * MIB
    # The client still sends, so it may find the connection closed before it sees the answer.
    if answer and not trailer:
        assert_refused(answer, 431)


def test_endless_chunk_extensions(server):
    head = CHUNKED + b"5;a="
    before = rss(server)
    talk(server, head, *[b"x" * MIB] * 80)
    assert rss(server) < before + 30 * MIB


def test_pipelined_requests_are_bounded(server):
    before = rss(server)
    answer = talk(server, *[(GET + b"\r\n") * 10_000] * 50)
    assert rss(server) < before + 30 * MIB
    assert answer.count(b"HTTP/1.1 401 ") <= 1 + protocol.MAX_PIPELINED


def test_a_few_pipelined_requests_are_answered_in_order(server):
    paths = [b"/health", b"/nowhere", b"/ready", b"/version"]
    requests = [
        b"GET %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n" % path
        for path in paths
    ]
    with connect(server) as raw:
        raw.sendall(b"".join(requests) + b"nonsense\r\n\r\n")
        answer = read_all(raw)
    statuses = re.findall(rb"HTTP/1.1 (\d+) ", answer)
    assert statuses == [b"200", b"404", b"200", b"200"]


def test_connections_of_one_client_are_bounded(server):
    while len(psutil.Process(server.process.pid).net_connections("tcp")) > 1:
        time.sleep(0.01)  # the server has not seen the end of those of other tests yet
    held = [connect(server) for _ in range(50)]
    try:
        for raw in held:
            raw.sendall(GET)
        with connect(server) as raw:
            assert_refused(read_all(raw), 429)
    finally:
        for raw in held:
            raw.close()
    end = time.monotonic() + 60
    while b" 429 " in talk(server, GET + b"Connection: close\r\n\r\n"):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"GET /health HTT", 408),
        (GET + b"A: b", 408),
        (b"\r\n", None),
    ],
)
def test_a_head_must_come_in_time(impatient, sent, status):
    if status is None:
        assert talk(impatient, sent) == b""
    else:
        assert_refused(try_again(lambda: talk(impatient, sent)), status)


def test_a_head_that_drips(impatient):
    with connect(impatient) as raw:
        assert drips(raw, GET + b"A: " + b"x" * 2000) < 1000


def test_a_body_that_nobody_waits_for(impatient):
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"

    def send():
        with connect(impatient) as raw:
            raw.sendall(head)
            answer = raw.recv(100)
            if answer:
                assert drips(raw, b"x" * 2000) < 1000
        return answer

    assert try_again(send).startswith(b"HTTP/1.1 404 ")


def test_an_idle_connection_is_kept_for_a_while(impatient):
    def ask(raw):
        """Return whether there is an answer."""
        answer = b""
        with suppress(ConnectionError):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not answer.endswith(b"}") and (piece := raw.recv(4096)):
                answer += piece
        return bool(answer)

    def is_kept():
        with connect(impatient) as raw:
            for _ in range(2):
                if not ask(raw):
                    return False
                time.sleep(0.6)  # longer than a head may take
            if not ask(raw):
                return False
            assert read_all(raw) == b""
            return True

    assert try_again(is_kept)


def test_a_client_that_does_not_read_its_stream(impatient):
    """The answer is longer than the buffers of both sides; the server stops writing, and ends."""
    prompts = json.dumps(["x" * 200] * 900)
    body = b'{"prompt":%b,"max_tokens":50,"ignore_eos":true,"stream":true,"n":1,"echo":true}'
    body %= prompts.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = rss(impatient)

    def send():
        with connect(impatient) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with suppress(ConnectionError):
                raw.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                if raw.recv(1):
                    impatient.wait_for("status=200")  # the end of the request is logged
                    return True
        return False

    assert try_again(send)
    assert rss(impatient) < before + 60 * MIB
    assert httpx.get(impatient.url + "/health", timeout=60).status_code == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-keyout", key, "-out", cert]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("the openssl command is not installed")
    return ["--ssl-keyfile", str(key), "--ssl-certfile", str(cert)]


@pytest.fixture(scope="module")
def tls_server(certificate):
    with serving("impatient", *certificate, "--max-connections-per-client", "5") as started:
        yield started


@pytest.fixture
def tls_context(certificate):
    context = ssl.create_default_context(cafile=certificate[-1])
    context.check_hostname = False
    return context


def talk_tls(server, context, data):
    with suppress(OSError), connect(server) as raw, context.wrap_socket(raw) as tls:
        tls.sendall(data)
        return read_all(tls)


def test_a_tls_connection_is_bounded_as_well(tls_server, tls_context):
    sent = GET + b"A: " + b"x" * 33_000 + b"\r\n\r\n"
    assert_refused(try_again(lambda: talk_tls(tls_server, tls_context, sent)), 431)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_half_tls_handshakes_count_and_end(tls_server, tls_context, sent):
    """A client that never finishes them has its limit of connections, and they are freed."""

    def is_refused_first():
        """Return whether one more ends while the time of the others' handshakes is not over."""
        with ExitStack() as stack:
            held = [stack.enter_context(connect(tls_server)) for _ in range(5)]
            for raw in held:
                raw.sendall(sent)
            with connect(tls_server) as more:
                assert read_all(more) == b""
            ended, *_ = select.select(held, [], [], 0)
            for raw in held:
                assert read_all(raw) == b""
        return not ended

    assert try_again(is_refused_first), "half handshakes do not count"
    sent = GET + b"Connection: close\r\n\r\n"
    answer = try_again(lambda: talk_tls(tls_server, tls_context, sent))
    assert answer.startswith(b"HTTP/1.1 200 ")
