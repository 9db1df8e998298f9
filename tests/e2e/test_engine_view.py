"""Live view of real engines: maps, steps, scopes of keys, deaths, several front ends, experts,
states, workers and stages."""

import asyncio
import contextlib
import json
import threading

import httpx
import msgspec
import numpy as np

from octavo.config import EngineConfig
from octavo.fleet.start import EngineProcesses
from octavo.frontend.async_llm import AsyncLLM
from octavo.kv_cache.block_map import OWNER_SHIFT
from octavo.kv_cache.states import SlotKind
from octavo.sampling_params import SamplingParams
from tests.e2e.harness import ENGINE, processes, serve
from tests.e2e.watching import until, watching
from tests.hybrid import save_hybrid
from tests.mixture import save_mixture

SMALL = ["--num-gpu-blocks-override", "300", "--max-model-len", "512"]


def send(url, key=None, tokens=150, **headers):
    """Send a request in a thread."""
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}

    def post():
        response = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
        assert response.status_code == 200, response.text

    thread = threading.Thread(target=post)
    thread.start()
    return thread


@contextlib.contextmanager
def sending(*clients):
    """Repeat the request of each of some clients: the view may miss one that ends too soon.

    Args:
        clients: arguments of `send`.
    """
    stop = threading.Event()

    def repeat(client):
        while not stop.is_set():
            send(**client).join()

    threads = [threading.Thread(target=repeat, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_two_engines_two_keys_and_a_death(tmp_path):
    flags = ["--num-gpu-blocks-override", "300", "--data-parallel-size", "2"]
    flags += ["--api-key", "a", "--api-key", "b", "--admin-key", "boss"]
    with serve(tmp_path, *flags) as server:
        url = server.url
        assert server.get("/v1/engine/view").status_code == 401
        with watching(url, "a") as of_a, watching(url, "boss") as of_boss:
            hello = until(of_a, lambda name, _: name == "hello")
            assert (hello["local_engines"], hello["all_requests"]) == (2, False)
            maps = {}
            until(of_boss, lambda _, e: maps.update(e.get("blocks", {})) or len(maps) == 2)
            assert {m["num_blocks"] for m in maps.values()} == {299}
            request = {"url": url, "tokens": 500}
            clients = [{**request, "key": key, "x-request-id": f"of-{key}"} for key in "abb"]
            with sending(*clients):
                seen = until(of_a, lambda n, e: n == "requests" and len(e["others"]) == 3)
                assert [row[3].split("-")[1:3] for row in seen["rows"]] == [["of", "a"]]
                assert "of-b" not in json.dumps(seen)
                seen = until(of_boss, lambda n, e: n == "requests" and len(e["rows"]) == 3)
                assert "others" not in seen
                steps = until(of_boss, lambda _, e: "steps" in e)["steps"]
                assert all(step["forward"] > 0 for step in steps)
            until(of_boss, lambda n, e: n == "requests" and not e["rows"])

            engines = processes(server.process.pid, ENGINE)
            busy = max(engines, key=lambda c: c.cpu_times().user)
            busy.kill()
            death = until(of_boss, lambda _, e: "deaths" in e)
            assert death["deaths"][0]["seconds"] > 0


def test_several_front_ends_show_the_steps_of_all(tmp_path):
    flags = [*SMALL, "--api-server-count", "2"]
    with serve(tmp_path, *flags) as server, watching(server.url) as events:
        assert until(events, lambda name, _: name == "hello")["front_ends"] == 2
        labels = set()

        def note(_, event):
            parts = [part for s in event.get("steps", ()) for part in s.get("parts", ())]
            seen = {part[0].partition(".")[0] for part in parts}
            labels.update(seen)
            return seen

        while len(labels) < 2:  # the system chooses the front end of each connection
            thread = send(server.url, tokens=60)
            until(events, note)
            thread.join()


def test_a_map_has_the_blocks_of_a_running_request(tmp_path):
    async def run():
        config = EngineConfig.from_kwargs(num_gpu_blocks_override=100, max_model_len=512)
        engine = await AsyncLLM.start(config, EngineProcesses(reports_steps=True))
        try:
            await engine.wait_ready()
            found = []
            params = SamplingParams(max_tokens=450, ignore_eos=True)
            # A map may come after the last token, or before the answer has two blocks.
            while not found:
                async for output in engine.generate("Once upon a time", params, "r"):
                    if not found and len(output.outputs[0].token_ids) > 20:
                        found = [m for m in (await engine.block_maps()).values() if m.owners]
            (block_map,) = found
            owners = np.frombuffer(block_map.cells, "<u4") >> OWNER_SHIFT
            assert [owner.partition("#")[0] for owner in block_map.owners] == ["r"]
            assert 2 <= (owners == 1).sum() <= 30
            after = (await engine.block_maps())[0]
            assert after.owners == []
            cells = np.frombuffer(after.cells, "<u4")
            assert ((cells >> 3 & 7) == 7).sum() >= 20  # known prefixes
            records = [step.record for step in engine.step_log.since(0)]
            assert any(record.sample_seconds > 0 for record in records)
            assert await engine.expert_counts() == {0: []}
            assert msgspec.structs.asdict(engine.engine_stats[0])["num_steps"] > 50
        finally:
            await engine.shutdown()

    asyncio.run(run())


def test_experts_workers_and_the_death_of_a_worker(tmp_path):
    model = save_mixture(tmp_path)
    flags = [*SMALL, "--tensor-parallel-size", "2", "--num-threads", "1"]
    with serve(tmp_path, *flags, model=model) as server, watching(server.url) as events:
        assert until(events, lambda name, _: name == "hello")["tensor_parallel"] == 2
        with sending({"url": server.url, "tokens": 40}):
            balance = until(
                events, lambda _, e: "expert_balance" in e.get("stats", {}).get("0", ())
            )
        assert 0 < min(balance["stats"]["0"]["expert_balance"]) <= 1
        found = []

        def is_counted(_, event):
            found[:] = event.get("experts", {}).get("0", [])
            # Two experts of each layer for 39 tokens of the answer and those of the prompt.
            return found and all(sum(counts) >= 2 * 40 for _, counts in found)

        until(events, is_counted)
        assert [(layer, len(counts)) for layer, counts in found] == [(0, 12), (1, 12), (2, 12)]
        processes(server.process.pid, "octavo.executor.worker_process")[0].kill()
        (death,) = until(events, lambda _, e: "deaths" in e)["deaths"]
        assert (death["engine"], "worker" in death["reason"]) == (0, True)
        send(server.url, tokens=4).join()


def test_states_of_a_hybrid_model_in_two_stages(tmp_path):
    model = save_hybrid(tmp_path)
    flags = [*SMALL, "--pipeline-parallel-size", "2", "--num-threads", "1"]
    with serve(tmp_path, *flags, model=model) as server, watching(server.url) as events:
        assert until(events, lambda name, _: name == "hello")["pipeline_parallel"] == 2
        labels, kinds, owners = {}, set(), set()

        def note(_, event):
            for found in event.get("blocks", {}).values():
                labels.update(found.get("owners", {}))
                cells = found.get("states", [])[2::3]
                kinds.update(SlotKind(cell % 2**OWNER_SHIFT >> 3) for cell in cells)
                owners.update(labels.get(str(cell >> OWNER_SHIFT)) for cell in cells)
            return {SlotKind.FREE, SlotKind.LIVE, SlotKind.SNAPSHOT} <= kinds

        with sending({"url": server.url, "tokens": 400}):
            until(events, note)
        assert None in owners
        assert len(owners) > 1
        assert owners <= {None, *labels.values()}
