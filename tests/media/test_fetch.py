"""URLs of media: allowed hosts and folders, addresses, redirects, limits, and names that lie."""

import asyncio
import base64
import contextlib
import os

import pytest

from octavo.errors import RequestError, UnsupportedError
from octavo.media import fetch
from octavo.media.fetch import MediaFetcher, is_public, read_data_url

BODY = b"picture" * 1000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 7000\r\n\r\n" + BODY


@contextlib.asynccontextmanager
async def server(answers):
    """Run an HTTP server on this machine; yield its port and the paths that are asked."""
    asked, tasks = [], []

    async def serve(reader, writer):
        tasks.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        asked.append(path)
        if answers[path] is None:  # never answers
            await reader.read()
        else:
            writer.write(answers[path])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with running:
        try:
            yield running.sockets[0].getsockname()[1], asked
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)


def here(host, port):
    """Resolve every host to this machine."""

    async def found():
        return ["127.0.0.1"]

    return found()


def run(url, answers=None, domains=("files.example",), **options):
    """Fetch a URL, in which {} is the server's port; return the bytes and the paths asked."""

    async def main():
        async with server(answers or {"/a.png": OK}) as (port, asked):
            fetcher = MediaFetcher(
                domains, **{"resolver": here, "is_allowed": lambda _: True, **options}
            )
            try:
                return await fetcher.fetch(url.format(port), "messages[0]"), asked
            finally:
                run.asked = asked

    return asyncio.run(main())


def refused(match, url, *args, kind=RequestError, **options):
    with pytest.raises(kind, match=match) as error:
        run(url, *args, **options)
    assert error.value.status == 400
    assert error.value.param == "messages[0]"
    return run.asked


def moved(to):
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


def test_allowed_host():
    assert run("http://files.example:{}/a.png")[0] == BODY
    assert run("http://FILES.example.:{}/a.png")[0] == BODY


def test_host_needs_the_option():
    asked = refused(
        r"host evil\.example is not allowed; .*--allowed-media-domains evil\.example",
        "http://evil.example:{}/a.png?secret=1",
    )
    assert asked == []
    refused("files.example is not allowed", "http://files.example:{}/a.png", domains=())
    refused("host sub.files.example is not", "http://sub.files.example:{}/a.png")


@pytest.mark.parametrize("url", ["http://files.example@127.0.0.1:{}/", "http://:{}/a.png"])
def test_user_names_and_missing_hosts(url):
    assert refused("no host, or has a user name", url) == []


@pytest.mark.parametrize("url", ["ftp://files.example/a", "gopher://x/", "javascript:1", "a.png"])
def test_other_schemes(url):
    refused(r"is not supported; use https:, .* or send base64 as data:", url)


@pytest.mark.parametrize("odd", ["\n", "\r\n", "\t", "\0", "\\", "\x7f"])
def test_characters_that_parsers_of_urls_read_differently(odd):
    asked = refused("control character or a backslash", f"http://files.example{odd}:{{}}/a.png")
    asked += refused("white space at an end", " data:;base64,AAAA")
    assert asked == []


def test_malformed_urls():
    refused("malformed", "http://[::1/a")
    refused("malformed", "http://files.example:99999999/a")
    refused("at most 8192", "http://files.example/" + "a" * 9000)


@pytest.mark.parametrize("host", ["169.254.169.254", "[::1]", "127.1", "2130706433"])
def test_no_option_allows_an_address_that_is_not_public(host):
    asked = refused(
        f"the address {host.strip('[]')} is not public", f"http://{host}/a", is_allowed=is_public
    )
    assert asked == []


def test_address_that_is_connected_to_must_be_public():
    asked = refused(
        "files.example has the address 127.0.0.1, which is not public",
        "http://files.example:{}/a.png",
        is_allowed=is_public,
    )
    assert asked == []


def test_one_private_address_among_public_ones_is_refused():
    async def both(host, port):
        return ["93.184.215.14", "10.0.0.7"]

    assert (
        refused("address 10.0.0.7", "http://files.example/", resolver=both, is_allowed=is_public)
        == []
    )


def test_name_that_changes_its_address_after_the_first_answer():
    """The check is on the address of each connection, and a redirect to the same host is one."""
    answers = iter([["127.0.0.1"], ["169.254.169.254"]])

    async def lies(host, port):
        return next(answers)

    asked = refused(
        "files.example has the address 169.254.169.254",
        "http://files.example:{}/a.png",
        {"/a.png": moved("/b.png"), "/b.png": OK},
        resolver=lies,
        is_allowed=lambda address: address == "127.0.0.1",
    )
    assert asked == ["/a.png"]


@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]"])
def test_literal_addresses_are_checked(host):
    domains = [host.strip("[]")]
    asked = refused(
        "is not public", f"http://{host}:{{}}/a.png", None, domains, is_allowed=is_public
    )
    assert asked == []


HOSTS = ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "2852039166"]


@pytest.mark.parametrize("host", HOSTS)
def test_other_spellings_of_local_addresses_are_checked(host):
    options = {"resolver": fetch.resolve, "is_allowed": is_public}
    asked = refused(
        "is not public|cannot be reached", f"http://{host}:{{}}/a.png", None, [host], **options
    )
    assert asked == []


def test_redirect():
    answers = {"/a.png": moved("/b.png"), "/b.png": OK}
    assert run("http://files.example:{}/a.png", answers) == (BODY, ["/a.png", "/b.png"])


@pytest.mark.parametrize(
    ("to", "match"),
    [
        ("http://evil.example/b", "host evil.example is not allowed"),
        ("//evil.example/b", "host evil.example is not allowed"),
        ("file:///etc/passwd", "redirects to a URL of the kind file:"),
        ("gopher://files.example/", "'gopher' is not supported"),
        ("http://user@files.example/b", "user name"),
        ("http://[::1", "redirects to a malformed URL"),
        ("http://files.example:x/", "malformed"),
        ("/a.png", "redirects more than 5 times"),
    ],
)
def test_redirects_are_checked(to, match):
    refused(match, "http://files.example:{}/a.png", {"/a.png": moved(to)})


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "files.example answers .* 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "is empty"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "more than 33554432 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\nabc", "cannot be reached"),
        (b"nonsense\r\n\r\n", "cannot be reached"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "HTTP status 302"),
    ],
)
def test_answers_that_are_no_file(answer, match):
    refused(match, "http://files.example:{}/a.png", {"/a.png": answer})


def test_compressed_bombs_are_not_unpacked():
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
    url = "http://files.example:{}/a.png"
    refused(r"compressed \(gzip\)", url, {"/a.png": answer}, kind=UnsupportedError)


def test_endless_body(monkeypatch):
    monkeypatch.setattr(fetch, "MAX_NBYTES", 5000)
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY
    refused("more than 5000 bytes", "http://files.example:{}/a.png", {"/a.png": answer})


def test_server_that_never_answers(monkeypatch):
    monkeypatch.setattr(fetch, "MAX_SECONDS", 0.05)
    refused("did not send the file within", "http://files.example:{}/a.png", {"/a.png": None})


def test_nobody_listens_and_no_address():
    refused("files.example cannot be reached", "http://files.example:1/a.png")

    async def nowhere(host, port):
        raise OSError(-2, "Name or service not known")

    refused("cannot be reached", "http://files.example/a.png", resolver=nowhere)


def test_data_urls():
    encoded = base64.b64encode(BODY).decode()
    for head in ("data:image/png;base64,", "DATA:;BASE64,", "data:image/png;charset=a;base64,"):
        assert run(head + encoded)[0] == BODY
    for url in ("data:image/png," + encoded, "data:", "data:;base64", "data:" + ";" * 10**6):
        refused("malformed", url)
    refused("base64 is malformed", "data:;base64,a*b=")
    refused("is empty", "data:;base64,")


def test_size_of_data_urls(monkeypatch):
    monkeypatch.setattr(fetch, "MAX_NBYTES", 300)
    with pytest.raises(RequestError, match="more than 300 bytes"):
        read_data_url("data:;base64," + "A" * 1000, "messages")


@pytest.fixture
def folder(tmp_path):
    """Folder of readable files, beside a secret one."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    (open_to_all / "a b.png").write_bytes(BODY)
    (tmp_path / "open-secret").write_bytes(b"secret")
    (open_to_all / "link").symlink_to(tmp_path / "open-secret")
    (open_to_all / "circle").symlink_to(open_to_all / "circle")
    os.mkfifo(open_to_all / "pipe")
    return open_to_all


def test_local_files(folder):
    for host in ("", "localhost"):
        url = f"file://{host}{folder}/a%20b.png"
        assert run(url, allowed_local_media_path=str(folder))[0] == BODY


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("/../open-secret", "not below the folder"),
        ("/%2e%2e/open-secret", "not below the folder"),
        ("-secret", "not below the folder"),
        ("/link", "not below the folder"),
        ("/pipe", "is no file"),
        ("", "is no file|Is a directory"),
        ("/absent", "cannot be read"),
        ("/%00", "cannot be read"),
        ("/circle", "cannot be read"),
    ],
)
def test_local_files_outside(folder, path, match):
    refused(match, f"file://{folder}{path}", allowed_local_media_path=str(folder))


def test_local_files_need_the_option(folder):
    refused("--allowed-local-media-path", f"file://{folder}/a%20b.png")
    refused(
        "other is not this machine",
        f"file://other{folder}/a%20b.png",
        allowed_local_media_path=str(folder),
    )


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "127.0.0.1",
        "127.9.9.9",
        "100.64.0.1",
        "100.100.100.200",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.1.1",
        "198.18.0.1",
        "192.0.2.1",
        "192.0.0.192",
        "192.88.99.1",
        "168.63.129.16",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fec0::1",
        "3fff::1",
        "::127.0.0.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b:1::7f00:1",
        "2001:0:a00:1::",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::",
        "64:ff9b::a9fe:a9fe",
        "2001:db8::1",
        "name",
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "93.184.215.14", "2606:2800:21f::1", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_public_addresses(address):
    assert is_public(address)
