import pytest

from octavo.errors import ConfigError
from octavo.server.auth import ApiKeys, private_salt
from octavo.server.errors import AuthenticationError
from tests.server.fake_engine import with_server


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_each_key_opens_and_nothing_else_does():
    keys = ApiKeys(["one", "twö"])
    assert keys.check(b"Bearer one") == "one"
    assert keys.check("bearer twö".encode()) == "twö"
    bad_headers = [b"", b"one", b"Basic one", b"Bearer", b"Bearer on", b"Bearer one two", b"\xff"]
    for bad in (None, *bad_headers):
        with pytest.raises(AuthenticationError):
            keys.check(bad)


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="api_key is empty"):
        ApiKeys(["one", " "])


def test_without_keys_everything_opens():
    assert ApiKeys([]).check(None) is None
    assert ApiKeys([]).check(b"Bearer x") is None


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


def test_each_key_has_its_own_prefix_cache():
    async def scenario(served):
        for key in ("a", "b", "a"):
            for body in ({}, {"cache_salt": "s"}):
                await served.http.post(
                    "/v1/completions", json={"prompt": "hi", **body}, headers=bearer(key)
                )
        salts = [r.cache_salt for r in served.engine.requests]
        assert None not in salts
        assert salts[:2] == salts[4:]
        assert len(set(salts)) == 4

    with_server(scenario, api_key=["a", "b"])
