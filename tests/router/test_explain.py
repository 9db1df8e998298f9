"""Recent requests and explanations of a router's servers."""

import asyncio

from octavo.config import ServerConfig
from tests.router.servers import Routed, whole


def knows(name, created):
    """Return the answer of a server that knows one request."""
    row = {"id": f"cmpl-{name}", "created": created}

    def answer(request):
        if request.url.endswith("/v1/requests"):
            return whole(object="list", data=[row])(request)
        known = request.url.endswith(f"/{name}/explain?simulate=false")
        return whole(*([] if known else [404]), name=name, error={"message": "unknown"})(request)

    return answer


def lost(request):
    raise OSError("lost")


def test_all_servers_are_asked():
    async def main():
        servers = [knows("a", 1), lost, knows("b", 3), knows("c", 2)]
        async with Routed(servers) as routed:
            found = (await routed.client.get("/v1/requests")).json()
            assert found["object"] == "list"
            assert [row["id"] for row in found["data"]] == ["cmpl-b", "cmpl-c", "cmpl-a"]
            for name in "abc":
                answer = await routed.client.get(f"/v1/requests/{name}/explain?simulate=false")
                assert (answer.status_code, answer.json()["name"]) == (200, name)
            answer = await routed.client.get("/v1/requests/d/explain?simulate=false")
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, "unknown")

    asyncio.run(main())


def test_no_server_answers():
    async def main():
        async with Routed([lost]) as routed:
            for path in ("/v1/requests", "/v1/requests/a/explain"):
                answer = await routed.client.get(path)
                assert answer.status_code == 503
                assert "No server answers now" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_a_refusal_is_passed_back():
    async def main():
        async with Routed([whole(400, error={"message": "off"})] * 2) as routed:
            for path in ("/v1/requests", "/v1/requests/a/explain"):
                answer = await routed.client.get(path)
                assert (answer.status_code, answer.json()["error"]["message"]) == (400, "off")

    asyncio.run(main())


def test_one_of_several_keys_sees_no_requests_of_others():
    """Servers without keys show all requests to everyone."""

    async def main():
        keys = ServerConfig(api_key=["one", "two"], admin_key=["boss"])
        async with Routed([knows("a", 1)], config=keys) as routed:
            for path in ("/v1/requests", "/v1/requests/a/explain?simulate=false"):
                for key, status in (("one", 404), ("two", 404), ("boss", 200)):
                    headers = {"Authorization": f"Bearer {key}"}
                    answer = await routed.client.get(path, headers=headers)
                    assert answer.status_code == status
            assert len(routed.servers[0].asked) == 2
        async with Routed([knows("a", 1)], config=ServerConfig(api_key=["one"])) as routed:
            headers = {"Authorization": "Bearer one"}
            assert (await routed.client.get("/v1/requests", headers=headers)).status_code == 200

    asyncio.run(main())
