"""Malformed requests: each receives a 4xx with OpenAI's error form, and does not disturb others."""

import asyncio

from tests.server.fake_engine import ANSWER, with_server
from tests.server.malformed import cases

LIMIT = 4 * 2**20


def test_malformed_requests_while_a_healthy_one_is_answered():
    table = cases(LIMIT)
    assert len(table) >= 200
    assert len({case.name for case in table}) == len(table)

    async def scenario(served):
        served.engine.paused = True
        healthy = asyncio.create_task(served.complete(max_tokens=20))
        for case in table:
            response = await served.http.request(
                case.method, case.path, content=case.body, headers=case.headers
            )
            case.check(response.status_code, response.content)
        assert not healthy.done()
        served.engine.paused = False
        response = await healthy
        assert response.json()["choices"][0]["text"] == ANSWER
        # In a batch with one bad prompt the others may have started; they were aborted.
        assert len(served.engine.aborted) == len(served.engine.requests) - 1

    with_server(scenario, max_request_bytes=LIMIT)
