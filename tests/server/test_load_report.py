"""Load of the server in a header, for load balancers."""

from __future__ import annotations

import json

import pytest

from octavo.messages import SchedulerStats
from tests.server.fake_engine import with_server

NAMES = {
    "kv_cache_usage_perc": 0.25,
    "num_requests_running": 4.0,
    "num_requests_waiting": 3.0,
}


@pytest.mark.parametrize("chat", [False, True])
def test_the_header(chat):
    async def scenario(served):
        served.engine.metrics.record_scheduler_stats(
            SchedulerStats(kv_cache_usage=0.25, num_waiting_reqs=3, num_running_reqs=4)
        )
        body = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
        path = "/v1/chat/completions" if chat else "/v1/completions"

        async def header(**headers):
            response = await served.http.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
            return response.headers.get("endpoint-load-metrics")

        asked = "endpoint-load-metrics-format"
        found = await header(**{asked: "JSON"})
        assert json.loads(found.removeprefix("JSON ")) == {"named_metrics": NAMES}
        assert await header(**{asked: "text"}) == (
            "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_running=4.0, "
            "named_metrics.num_requests_waiting=3.0"
        )
        assert await header(**{asked: "BIN"}) is None
        assert await header() is None

    with_server(scenario)
