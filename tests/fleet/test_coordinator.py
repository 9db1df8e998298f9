"""Coordinator between engines that the test drives, and front ends that are real clients."""

import asyncio
from functools import cached_property

import msgspec
import pytest

from octavo.config import ModelConfig
from octavo.engine.core_messages import CoreReady
from octavo.errors import EngineDeadError, ProfilerError, StepFailedError
from octavo.fleet.coordinator import Coordinator, FrontEndConnection
from octavo.fleet.coordinator_client import CoordinatorClient, CoordinatorProcess, addresses_of
from octavo.fleet.supervisor import Recovery
from octavo.frontend.input_processor import InputProcessor
from octavo.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, RequestOptions
from octavo.observability.metrics import EngineMetrics, join_pages
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.sampling_params import SamplingParams
from tests.frontend.test_output_processor import Spec, byte_level
from tests.plan.plans import make_plan

INPUTS = InputProcessor(ModelConfig(), Spec(), byte_level(), 1000)


def request(name):
    return INPUTS.process(name, "ab", SamplingParams(max_tokens=9), RequestOptions(0.0))[0]


class Engines:
    """Stand-in for the engines."""

    def __init__(self, unfinished, on_recovery):
        self.unfinished, self.on_recovery = unfinished, on_recovery
        self.said = asyncio.Queue()
        self.up, self.down, self.missing = True, {}, []
        self.sent, self.aborted, self.calls = [], [], []
        self.failed, self.ended = None, False

    @cached_property
    def ready(self):
        return asyncio.get_running_loop().create_future()

    def family_of(self, index):
        return []

    async def get_output(self):
        outputs = await self.said.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def add_request(self, request):
        # By then it must be known which requests another engine will receive.
        assert request.request_id in {r.request_id for r in self.unfinished()}
        self.sent.append(request.request_id)

    async def abort_requests(self, ids):
        self.aborted += ids

    async def call_utility(self, method, *args):
        self.calls.append((method, *args))
        if method == "stop_profile":
            raise ProfilerError("No profile is being recorded.")
        return "done"

    def fail_calls(self, error):
        self.failed = error

    async def shutdown(self):
        self.ended = True


class Bench:
    """Coordinator, and front ends in the same process."""

    def __init__(self, folder):
        self.folder, self.number, self.life, self.clients = str(folder), 0, 0, {}
        self.metrics = EngineMetrics("m", 1000)
        self.coordinator = Coordinator(self.metrics, self.start, 1)
        self.running = asyncio.create_task(self.coordinator.run())

    def start(self, unfinished, on_recovery):
        self.engines = Engines(unfinished, on_recovery)
        return self.engines

    def join(self, page=b"", connected=True):
        """Return a new front end, and its output reader."""
        self.number += 1
        front_end = FrontEndConnection(
            self.number, *addresses_of(self.folder, self.life, self.number)
        )
        self.coordinator.add(front_end)
        process = CoordinatorProcess(self.folder, self.number, self.life)
        client = CoordinatorClient(process, lambda: page, lambda: client.live)
        client.number, client.seen, client.live = self.number, [], []

        async def read():
            while True:
                client.seen.append(await client.get_output())

        client.reader = asyncio.create_task(read())
        self.clients[client] = front_end
        return client

    async def replace(self):
        """Replace the coordinator by another one, with other engines."""
        self.running.cancel()
        await asyncio.wait({self.running})
        await self.coordinator.shutdown()
        self.life += 1
        self.coordinator = Coordinator(self.metrics, self.start, 1, is_first=False)
        self.running = asyncio.create_task(self.coordinator.run())
        for client in self.clients:
            addresses = addresses_of(self.folder, self.life, client.number)
            self.clients[client] = FrontEndConnection(client.number, *addresses)
            self.coordinator.add(self.clients[client])
            client.process.replace()

    async def say(self, *outputs, stats=None):
        await self.engines.said.put(EngineCoreOutputs(list(outputs), stats, 1.0))

    async def end(self):
        for client in self.clients:
            client.reader.cancel()
            await asyncio.wait({client.reader})
            client.close()
        self.running.cancel()
        await asyncio.wait({self.running})
        await self.coordinator.shutdown()
        assert self.engines.ended


def run(test, folder):
    async def main():
        bench = Bench(folder)
        try:
            await asyncio.wait_for(test(bench), 120)
        finally:
            await bench.end()

    asyncio.run(main())


async def until(is_so):
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.005)


def texts(client):
    """Return the outputs of each request, in order."""
    return [(o.request_id, o.new_token_ids) for outputs in client.seen for o in outputs.outputs]


def test_each_gets_its_own(tmp_path):
    async def test(bench):
        a, b = bench.join(), bench.join()
        await a.add_request(request("r#1.0"))
        await until(lambda: len(bench.engines.sent) == 1)
        await b.add_request(request("r#2.0"))
        await until(lambda: len(bench.engines.sent) == 2)
        await bench.say(EngineCoreOutput("r#1.0", [1]), EngineCoreOutput("r#2.0", [2]))
        await bench.say(EngineCoreOutput("r#2.0", [3]), EngineCoreOutput("unknown", [4]))
        await until(lambda: texts(b) == [("r#2.0", [2]), ("r#2.0", [3])])
        await until(lambda: texts(a) == [("r#1.0", [1])])
        assert [r.output_token_ids for r in bench.engines.unfinished()] == [[1], [2, 3]]
        await a.abort_requests(["r#1.0"])
        await until(lambda: bench.engines.aborted == ["r#1.0"])
        await bench.say(EngineCoreOutput("r#1.0", [5]))  # it was in transit
        await bench.say(EngineCoreOutput("r#2.0", [6], finish_reason=FinishReason.LENGTH))
        await until(lambda: texts(b)[-1] == ("r#2.0", [6]))
        assert len(texts(a)) == 1
        assert bench.engines.unfinished() == []

    run(test, tmp_path)


def test_how_the_engines_are(tmp_path):
    async def test(bench):
        client, engines = bench.join(), bench.engines
        engines.up, engines.missing = False, [1]
        await until(lambda: client.missing == [1])
        assert not client.up
        engines.up, engines.missing = True, []
        # Front ends send the coordinator whole requests.
        engines.ready.set_result(CoreReady(make_plan(64, 8), kept_items_nbytes=1000))
        assert await client.ready == CoreReady(make_plan(64, 8))
        await until(lambda: client.up)
        engines.down = {1: "is being started"}
        await until(lambda: client.down == engines.down)
        late = bench.join()
        await until(lambda: late.up and late.down == engines.down)
        # Their statistics are sent to all, with the last output.
        await bench.say(stats=SchedulerStats(num_running_reqs=3))
        await bench.say(stats=SchedulerStats(num_running_reqs=7))
        for each in (client, late):
            await until(lambda each=each: each.seen and each.seen[-1].stats.num_running_reqs == 7)
        assert b"octavo:num_requests_running" in bench.metrics.render()
        assert bench.metrics.load()["num_requests_running"] == 7

    run(test, tmp_path)


def test_calls(tmp_path):
    async def test(bench):
        a, b = bench.join(), bench.join()
        assert await a.call_utility("reset_prefix_cache") == "done"
        with pytest.raises(ProfilerError, match="No profile is being recorded"):
            await b.call_utility("stop_profile")
        await b.add_request(request("r#2.0"))
        await until(lambda: bench.engines.sent)
        await a.call_utility("trim_memory")  # an idle front end knows nothing of the other
        assert [name for name, *_ in bench.engines.calls] == ["reset_prefix_cache", "stop_profile"]
        await b.abort_requests(["r#2.0"])
        await until(lambda: bench.engines.aborted)
        await a.call_utility("trim_memory")
        assert bench.engines.calls[-1] == ("trim_memory",)

    run(test, tmp_path)


def test_metrics_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.fleet.coordinator._PAGE_SECONDS", 60)

    def page(count):
        metrics = EngineMetrics("m", 1000)
        metrics.record_generation_tokens(count)
        return metrics.render()

    def tokens(pages):
        [line] = [
            line
            for line in join_pages(pages).decode().splitlines()
            if line.startswith("octavo:generation_tokens_total{")
        ]
        return float(line.split()[-1])

    async def test(bench):
        a, b = bench.join(page(1)), bench.join(page(20))
        for client in (a, b):
            assert tokens(await client.pages()) == 21
        bench.engines.on_recovery(Recovery("died", 4, 1.5, 0))
        joined = join_pages(await a.pages()).decode()
        assert 'octavo:engine_restarts_total{engine="0",model_name="m"} 1.0' in joined
        assert 'sleep_state="awake"} 1.0' in joined
        # Counts of a front end that has ended are not forgotten.
        await bench.coordinator.remove(bench.clients[b])
        assert tokens(await a.pages()) == 21
        bench.join(page(300))
        assert tokens(await a.pages()) == 321
        before = len(await a.pages())
        for _ in range(3):  # the number of ended front ends does not matter: they have one page
            await bench.coordinator.remove(list(bench.coordinator._front_ends)[-1])
            bench.join(page(1000))
            await a.pages()
        assert tokens(await a.pages()) == 3321
        assert len(await a.pages()) == before

    run(test, tmp_path)


def test_one_that_does_not_answer_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.fleet.coordinator._PAGE_SECONDS", 0.05)

    async def test(bench):
        a, b = bench.join(b"# HELP x y\n"), bench.join()
        b.reader.cancel()
        assert len(await a.pages()) == 4
        await b.add_request(request("r#2.0"))
        await until(lambda: bench.engines.sent)
        for _ in range(1000):
            await bench.say(EngineCoreOutput("r#2.0", [1]))
        await a.add_request(request("r#1.0"))
        await until(lambda: len(bench.engines.sent) == 2)
        await bench.say(EngineCoreOutput("r#1.0", [1]))
        await until(lambda: texts(a))

    run(test, tmp_path)


def test_one_that_is_gone_wants_nothing(tmp_path):
    async def test(bench):
        a, b = bench.join(), bench.join()
        for client, name in ((a, "r#1.0"), (b, "r#2.0")):
            await client.add_request(request(name))
        await until(lambda: len(bench.engines.sent) == 2)
        await bench.coordinator.remove(bench.clients[a])
        assert bench.engines.aborted == ["r#1.0"]
        assert [r.request_id for r in bench.engines.unfinished()] == ["r#2.0"]
        await bench.say(EngineCoreOutput("r#1.0", [1]), EngineCoreOutput("r#2.0", [1]))
        await until(lambda: texts(b))

    run(test, tmp_path)


def test_another_coordinator_goes_on(tmp_path):
    async def test(bench):
        a, b = bench.join(), bench.join()
        bench.engines.ready.set_result(CoreReady(make_plan(64, 8)))
        await until(lambda: a.up and b.up)
        for client, name in ((a, "r#1.0"), (b, "r#2.0"), (b, "r#3.0")):
            await client.add_request(request(name))
        await until(lambda: len(bench.engines.sent) == 3)
        await bench.say(EngineCoreOutput("r#1.0", [1]), EngineCoreOutput("r#2.0", [2]))
        await until(lambda: texts(a) and texts(b))
        bench.engines.call_utility = asyncio.Event().wait
        asked = asyncio.create_task(a.call_utility("stats"))
        # As in their records; the third one has been aborted meanwhile.
        a.live = [msgspec.structs.replace(request("r#1.0"), output_token_ids=[1])]
        b.live = [msgspec.structs.replace(request("r#2.0"), output_token_ids=[2])]
        await bench.replace()
        with pytest.raises(StepFailedError, match="try again"):
            await asked
        assert not a.up
        await until(lambda: sorted(bench.engines.sent) == ["r#1.0", "r#2.0"])
        found = {r.request_id: r.output_token_ids for r in bench.engines.unfinished()}
        assert found == {"r#1.0": [1], "r#2.0": [2]}
        bench.engines.ready.set_result(CoreReady(make_plan(64, 8)))
        await until(lambda: a.up and b.up)
        await bench.say(EngineCoreOutput("r#1.0", [5]), EngineCoreOutput("r#2.0", [6]))
        await until(lambda: texts(a) == [("r#1.0", [1]), ("r#1.0", [5])])
        assert [r.output_token_ids for r in bench.engines.unfinished()] in (
            [[1, 5], [2, 6]],
            [[2, 6], [1, 5]],
        )
        await bench.say(EngineCoreOutput("r#2.0", [7], finish_reason=FinishReason.STOP))
        await until(lambda: texts(b)[-1] == ("r#2.0", [7]))

    run(test, tmp_path)


def test_one_that_dies_before_the_model_is_loaded(tmp_path):
    async def test(bench):
        client = bench.join()
        await bench.replace()
        await bench.engines.said.put(EngineDeadError("killed while it loads"))
        with pytest.raises(EngineDeadError, match="killed while"):
            await bench.running
        assert not bench.coordinator.is_final  # the front ends are not notified
        await bench.replace()
        bench.engines.ready.set_result(CoreReady(make_plan(64, 8)))
        assert await client.ready == CoreReady(make_plan(64, 8))

    run(test, tmp_path)


def test_the_end_of_the_engines_is_told(tmp_path):
    async def test(bench):
        a, b = bench.join(), bench.join()
        asked = asyncio.create_task(a.call_utility("reset_prefix_cache"))
        await asked
        await bench.engines.said.put(EngineDeadError("it died too often"))
        for client in (a, b):
            with pytest.raises(EngineDeadError, match="died too often"):
                await client.reader
        with pytest.raises(EngineDeadError, match="died too often"):
            await bench.running
        assert str(bench.engines.failed) == "it died too often"

    run(test, tmp_path)
