import asyncio
import socket

import pytest

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.auth import (
    AllowedHosts,
    ApiKeys,
    flow_of,
    private_salt,
    tenant_of,
    with_all_keys,
)
from octavo.server.errors import AuthenticationError, HostError
from tests.server.fake_engine import with_server


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_each_key_opens_and_nothing_else_does():
    keys = ApiKeys(["one", "twö"])
    assert keys.check(b"Bearer one") == ("one", False)
    assert keys.check("bearer twö".encode()) == ("twö", False)
    bad_headers = [b"", b"one", b"Basic one", b"Bearer", b"Bearer on", b"Bearer one two", b"\xff"]
    for bad in (None, *bad_headers):
        with pytest.raises(AuthenticationError):
            keys.check(bad)


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="api_key is empty"):
        ApiKeys(["one", " "])
    with pytest.raises(ConfigError, match="admin_key is empty"):
        ApiKeys(["one"], [""])


def test_without_keys_everything_opens():
    for keys in (ApiKeys([]), ApiKeys([], ["boss"])):
        assert keys.check(None) == (None, False)
        assert keys.check(b"Bearer x") == (None, False)


def test_the_operators_key_opens_everything():
    assert ApiKeys([], ["boss"]).check(b"Bearer boss") == ("boss", True)
    keys = ApiKeys(["one"], ["boss"])
    assert keys.check(b"Bearer boss") == ("boss", True)
    assert keys.check(b"Bearer one") == ("one", False)
    with pytest.raises(AuthenticationError):
        keys.check(b"Bearer bos")


@pytest.fixture
def no_variables(monkeypatch):
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "OCTAVO_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_keys_come_from_flags_a_file_and_the_environment(
    tmp_path, monkeypatch, no_variables, caplog
):
    file = tmp_path / "keys"
    file.write_text("from file\n\n  another \n")
    file.chmod(0o600)
    monkeypatch.setenv("OCTAVO_API_KEY", "from env")
    monkeypatch.setenv("OCTAVO_ADMIN_KEY", "boss")
    config = ServerConfig(api_key=["flag"], api_key_file=str(file), admin_key=["chief"])
    config, sources = with_all_keys(config)
    assert config.api_key == ["flag", "from file", "another", "from env"]
    assert config.admin_key == ["chief", "boss"]
    assert sources == ["--api-key", "--api-key-file", "OCTAVO_API_KEY"]
    assert not caplog.text
    file.chmod(0o644)
    with_all_keys(ServerConfig(api_key_file=str(file)))
    assert "can be read by all users" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key_file": "missing"}, "api_key_file='missing' cannot be read: No such file"),
        ({"api_key_file": "empty"}, "api_key_file='empty' has no key"),
        ({"api_key_file": "bytes"}, "api_key_file='bytes' is not UTF-8"),
        ({"api_key": ["a"], "admin_key": ["a"]}, "admin_key .* is an API key as well"),
        ({"enable_admin": True, "admin_key": ["a"]}, "enable_admin .* admin_key"),
        ({"enable_admin": True, "api_key": ["a", "b"]}, "enable_admin .* several API keys"),
    ],
)
def test_settings_that_do_not_say_who_the_operator_is(
    settings, message, tmp_path, monkeypatch, no_variables
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=message):
        with_all_keys(ServerConfig(**settings))


def test_settings_that_say_it(no_variables):
    for settings in ({}, {"api_key": ["a"]}, {"api_key": ["a", "a"]}):
        assert with_all_keys(ServerConfig(enable_admin=True, **settings))[0].enable_admin


def test_the_server_asks_for_a_key():
    async def scenario(served):
        for path in ("/docs", "/openapi.json", "/health", "/ready", "/metrics"):
            assert (await served.http.get(path)).status_code == 200
        for path in ("/", "/v1/models", "/nothing"):
            response = await served.http.get(path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await served.complete()).status_code == 401
        assert (await served.http.get("/v1/models", headers=bearer("no"))).status_code == 401
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await served.http.get(path)).status_code == 200
        for key in ("a", "b"):
            response = await served.http.get("/v1/models", headers=bearer(key))
            assert response.status_code == 200
        assert not served.engine.requests

    with_server(scenario, api_key=["a", "b"])


def test_salts_are_private_to_a_key():
    assert private_salt(None, None) is None
    assert private_salt(None, "s") == "s"
    salts = [private_salt(key, salt) for key in ("a", "b") for salt in (None, "", "s", "t")]
    assert len(set(salts)) == len(salts)
    assert private_salt("a", "s") == private_salt("a", "s")
    assert not any(salt == "a" for salt in salts)


def test_each_key_is_a_tenant():
    async def scenario(served):
        for key in ("a", "b", "a"):
            await served.http.post(
                "/v1/completions", json={"prompt": ["hi", "you"], "n": 2}, headers=bearer(key)
            )
        tenants = [r.options.tenant for r in served.engine.requests]
        assert tenants == [tenant_of(key) for key in "aabbaa"]
        assert len({*tenants, private_salt("a", None), "a"}) == 4

    with_server(scenario, api_key=["a", "b"])


def test_one_keys_flood_leaves_places_for_others():
    async def scenario(served):
        served.engine.paused = True

        def ask(key, **fields):
            body = {"prompt": "hi", **fields}
            call = served.http.post("/v1/completions", json=body, headers=bearer(key))
            return asyncio.create_task(call)

        flood = [ask("a") for _ in range(100)]
        while served.engine.num_unfinished_requests + sum(t.done() for t in flood) < len(flood):
            await asyncio.sleep(0.005)
        refused = [task.result() for task in flood if task.done()]
        assert len(refused) == 100 - 80  # of 90 places
        assert {r.status_code for r in refused} == {429}
        assert "This API key already has 80 unfinished answers" in refused[0].text
        others = [ask("b") for _ in range(5)]
        while served.engine.num_unfinished_requests < 85:
            await asyncio.sleep(0.005)
        served.engine.paused = False
        assert [(await task).status_code for task in others] == [200] * 5
        await asyncio.gather(*flood)
        assert served.state._num_admitted == 0

    with_server(scenario, api_key=["a", "b"], max_num_queued_reqs=90)


def test_with_one_key_there_is_nobody_to_share_with():
    async def scenario(served):
        await served.http.post("/v1/completions", json={"prompt": "hi"}, headers=bearer("a"))
        assert served.engine.requests[0].options.tenant is None

    with_server(scenario, api_key=["a", "a"])


def test_without_keys_there_are_no_tenants_but_flows():
    """A flow has a share of the tokens, but no separate grammar processes, places or memory."""

    async def scenario(served):
        await served.complete()
        options = served.engine.requests[0].options
        assert options.tenant is None
        assert options.flow == options.share == flow_of("127.0.0.1")

    with_server(scenario)


def test_flows_are_few_and_the_same_in_each_front_end():
    flows = [flow_of(f"10.0.{i // 250}.{i % 250}") for i in range(2000)]
    assert {*flows} == {*range(64)}
    assert (flow_of("10.0.0.1"), flow_of(None)) == (19, None)


def test_each_key_has_its_own_prefix_cache():
    async def scenario(served):
        for key in ("a", "b", "a"):
            for body in ({}, {"cache_salt": "s"}):
                await served.http.post(
                    "/v1/completions", json={"prompt": "hi", **body}, headers=bearer(key)
                )
        salts = [r.options.cache_salt for r in served.engine.requests]
        assert None not in salts
        assert salts[:2] == salts[4:]
        assert len(set(salts)) == 4

    with_server(scenario, api_key=["a", "b"])


def answered(host, *headers, allowed=()):
    """Return whether a server that listens on `host` answers to these Host headers."""
    try:
        AllowedHosts(ServerConfig(host=host, allowed_hosts=list(allowed))).check(headers)
    except HostError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_on_a_loopback_address_other_names_are_not_answered(host):
    for name in ("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000"):
        assert answered(host, name), name
    assert answered(host, "localhost.")
    assert answered(host)  # HTTP/1.0 does not require the header, and every browser sends it
    for name in ("evil.test", "evil.test:8000", "localhost.evil.test", "127.0.0.1.evil.test"):
        assert not answered(host, name), name
    for name in ("", ":8000", "[::1", "[::2]:8000", "localhost@evil.test", "evil.test#localhost"):
        assert answered(host, name) == (name == "[::1"), name
    assert not answered(host, "localhost", "evil.test")


def test_the_name_it_is_bound_to_is_answered():
    assert answered("127.0.0.9", "127.0.0.9:8000")
    assert not answered("127.0.0.1", "127.0.0.9:8000")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid", "a" * 80])
def test_on_other_addresses_all_names_are_answered(host):
    assert answered(host, "anything.test")
    assert AllowedHosts(ServerConfig(host=host)).all_names


def test_who_listens_on_a_name_answers_to_that_name(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    for name in ("gpu1.test", "GPU1.test:8000", "192.0.2.7:8000"):
        assert answered("gpu1.test", name), name
    for name in ("evil.test", "localhost"):
        assert not answered("gpu1.test", name), name
    assert answered("gpu1.test", "evil.test", allowed=["*"])


def test_the_operators_names_count_everywhere():
    for host in ("127.0.0.1", "0.0.0.0"):
        allowed = ["api.test", "::1"]
        assert answered(host, "API.test:443", allowed=allowed)
        assert answered(host, "[::1]:8000", allowed=allowed)
        assert not answered(host, "evil.test", allowed=allowed)
        assert not answered(host, "localhost", allowed=allowed)
        assert answered(host, "evil.test", allowed=["*"])


def test_a_page_whose_name_points_here_reads_nothing():
    async def scenario(served):
        for path in ("/", "/v1/models", "/health", "/metrics", "/openapi.json", "/nothing"):
            response = await served.http.get(path, headers={"Host": "evil.test:8000"})
            assert response.status_code == 421
            error = response.json()["error"]
            assert error["code"] == "host_not_allowed"
            assert "evil.test" in error["message"]
            assert "--allowed-hosts" in error["message"]
        for name in ("localhost:8000", "127.0.0.1"):
            response = await served.http.get("/v1/models", headers={"Host": name})
            assert response.status_code == 200
        response = await served.http.post(
            "/v1/completions", json={"prompt": "hi"}, headers={"Host": "evil.test"}
        )
        assert response.status_code == 421
        assert not served.engine.requests

    with_server(scenario, host="127.0.0.1")
