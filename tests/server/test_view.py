"""Live view of the engines: scopes of keys, shared events, limits, history, death."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from octavo.frontend.output_processor import LiveAnswer
from octavo.frontend.step_log import EngineDeath, StepLog
from octavo.kv_cache.block_map import OWNER_SHIFT, BlockMap
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.observability.steps import StepPart, StepPreemption, StepRecord, StepWait
from octavo.observability.view_events import StepViewer, label_of
from octavo.server import view_picture, viewers
from octavo.server.auth import tenant_of
from octavo.server.view_picture import Picture
from octavo.system import clock
from tests.server.fake_engine import Call, FakeAsyncLLM, with_server


def read(body):
    """Return the pairs of name and data of server-sent events."""
    found = []
    for event in body.decode().split("\n\n"):
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        if any(lines):
            name, data = lines
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def record(number, *parts, wait=None, preemptions=(), failed=False):
    """Return a record of a step; parts are tuples of `StepPart`."""
    found = StepRecord(
        number,
        *(number + i / 1000 for i in (0, 1, 2, 12, 13)),
        [StepPart(*part) for part in parts],
        wait,
        list(preemptions),
        failed,
        0.004,
    )
    return msgspec.Raw(msgspec.msgpack.encode(found))


class FakeEngine:
    """What a picture reads of an engine."""

    def __init__(self, num_engines=1, first=0):
        self.config = SimpleNamespace(parallel=SimpleNamespace(first_engine=first))
        self.step_log = StepLog()
        self.engine_stats = {}
        self.num_engines = num_engines
        self.answers = []
        self.reason = "ok"
        self.maps = {}

    def live_answers(self):
        return iter(self.answers)

    def engine_of(self, core_id):
        return 1 if self.num_engines > 1 else 0

    def health(self):
        return SimpleNamespace(ok=True, reason=self.reason)

    async def block_maps(self):
        return self.maps


def answer(number, tenant=None, prompt=10, output=0):
    return LiveAnswer(
        f"secret-{number}#{number}", f"secret-{number}", tenant, prompt, output, 0, 5.0
    )


def rows(update, audience=None):
    """Return the rows of an update's event with the requests."""
    ((_, event),) = read(update.requests[audience])
    return event["rows"]


class TestLabels:
    @pytest.mark.parametrize(
        ("core_id", "label"),
        [
            ("cmpl-0_x#17", "17"),
            ("2_cmpl-x#17", "17-2"),
            ("cmpl#5-x#1.17", "1.17"),
            ("0_cmpl-x#1.17", "1.17-0"),
        ],
    )
    def test_a_label_is_a_number(self, core_id, label):
        assert label_of(core_id) == label

    def test_an_id_without_a_number_is_not_shown(self):
        with pytest.raises(AssertionError):
            label_of("cmpl-secret")


class TestSteps:
    def view(self, *records):
        steps = StepViewer().view([(0, bytes(r)) for r in records], 1.0)
        return json.loads(msgspec.json.encode(steps))

    def test_times_are_split(self):
        (step,) = self.view(record(1, ("a#7", 1)))
        assert step == {
            "engine": 0,
            "number": 1,
            "at": 2.0,
            "schedule": 1.0,
            "forward": 6.0,
            "sample": 4.0,
            "output": 1.0,
            "parts": [["7", 1]],
        }

    def test_equal_parts_are_sent_once(self):
        a, b = ("a#1", 1), ("b#2", 1)
        steps = self.view(record(1, a), record(2, a), record(3, a, b), record(4, a, b))
        assert [step.get("parts") for step in steps] == [
            [["1", 1]],
            None,
            [["1", 1], ["2", 1]],
            None,
        ]

    def test_the_first_step_of_an_event_has_its_parts(self):
        viewer = StepViewer()
        for number in (1, 2):
            (step,) = viewer.view([(0, bytes(record(number, ("a#1", 1))))], 1.0)
            assert step.parts is not None

    def test_engines_do_not_share_parts(self):
        records = [(0, bytes(record(1, ("a#1", 1)))), (1, bytes(record(1, ("a#1", 1))))]
        assert all(step.parts is not None for step in StepViewer().view(records, 1.0))

    def test_all_kinds_of_parts_and_events(self):
        wait = StepWait("d#4", "BLOCKS")
        lost = [StepPreemption("e#5", "a#1"), StepPreemption("f#6", None)]
        (step,) = self.view(
            record(
                1,
                ("a#1", 3, 2),
                ("b#2", 8, 0, 16, 24),
                ("c#3", 8),
                wait=wait,
                preemptions=lost,
                failed=True,
            )
        )
        assert step["parts"] == [["1", 3, 2], ["2", 8, 0, 1], ["3", 8]]
        assert step["wait"] == ["4", "BLOCKS"]
        assert step["preempted"] == [["5", "1"], ["6", None]]
        assert step["failed"] is True


class TestPicture:
    def test_states_of_requests_follow_from_the_steps(self):
        engine = FakeEngine()
        engine.answers = [answer(i, prompt=40) for i in range(4)]
        engine.answers[3] = answer(3, prompt=40, output=2)
        picture = Picture(engine)
        lost = [StepPreemption(engine.answers[2].core_id, None)]
        begun = (engine.answers[1].core_id, 16, 0, 8, 40)
        again = (engine.answers[2].core_id, 8, 0, 0, 40)
        engine.step_log.add(0, clock.now(), [record(1, begun, again), record(2, preemptions=lost)])
        chunk = (engine.answers[1].core_id, 8)
        engine.step_log.add(0, clock.now(), [record(3, chunk), record(4, chunk)])
        found = rows(picture.update([None], clock.now()))
        assert [(row[0], row[2], row[5]) for row in found] == [
            ("0", "waiting", 0),
            ("1", "prompt", 40),
            ("2", "preempted", 8),
            ("3", "answer", 40),
        ]
        engine.step_log.add(0, clock.now(), [record(5, again)])
        assert rows(picture.update([None], clock.now()))[2][2] == "prompt"

    def test_other_keys_requests_have_a_number_only(self):
        engine = FakeEngine(num_engines=2, first=4)
        engine.answers = [answer(0, "me"), answer(1, "you"), answer(2, None)]
        update = Picture(engine).update(["me", "", None], clock.now())
        ((_, mine),) = read(update.requests["me"])
        assert [row[3] for row in mine["rows"]] == ["secret-0"]
        assert mine["others"] == [[str(i), 5, "waiting"] for i in range(3)]
        ((_, nobody),) = read(update.requests[""])
        assert [row[3] for row in nobody["rows"]] == ["secret-2"]
        ((_, everything),) = read(update.requests[None])
        assert [row[3] for row in everything["rows"]] == ["secret-0", "secret-1", "secret-2"]
        assert "others" not in everything

    def test_only_news_are_sent(self):
        engine = FakeEngine()
        picture = Picture(engine)
        assert [name for name, _ in read(picture.update([None], clock.now()).news(None))] == [
            "tick",
            "requests",
        ]
        assert picture.update([None], clock.now()).news(None) == b""
        engine.engine_stats = {0: SchedulerStats(num_running_reqs=2)}
        ((_, tick),) = read(picture.update([None], clock.now()).news(None))
        assert tick["stats"] == {"0": {"running": 2}}
        assert picture.update([None], clock.now()).news(None) == b""
        engine.answers = [answer(0, "me")]
        ((name, _),) = read(picture.update([None], clock.now()).news(None))
        assert name == "requests"
        whole = dict(read(picture.update([None], clock.now()).whole(None)))
        assert whole["tick"]["stats"] == {"0": {"running": 2}}
        assert len(whole["requests"]["rows"]) == 1

    def test_a_death_shows_before_and_after_the_revival(self):
        engine = FakeEngine()
        picture = Picture(engine)
        ((_, tick), _) = read(picture.update([None], clock.now()).news(None))
        assert (tick["health"], tick["engines"]) == ("ok", [0])
        engine.reason = "starting the engine again"
        ((_, tick),) = read(picture.update([None], clock.now()).news(None))
        assert tick["health"] == "starting the engine again"
        engine.reason = "ok"
        engine.step_log.deaths.append(EngineDeath(clock.now(), 1.5, 0, "killed"))
        ((_, tick),) = read(picture.update([None], clock.now()).news(None))
        assert tick["health"] == "ok"
        assert [(d["seconds"], d["reason"]) for d in tick["deaths"]] == [(1.5, "killed")]
        assert picture.update([None], clock.now()).news(None) == b""
        ((_, whole), _) = read(picture.update([None], clock.now()).whole(None))
        assert len(whole["deaths"]) == 1

    def test_very_many_requests_are_counted(self):
        engine = FakeEngine()
        engine.answers = [answer(i) for i in range(view_picture.MAX_ROWS + 3)]
        ((_, event),) = read(Picture(engine).update([None], clock.now()).requests[None])
        assert len(event["rows"]) == view_picture.MAX_ROWS
        assert event["more"] == 3

    def test_a_tick_has_the_newest_steps_if_there_are_very_many(self):
        engine = FakeEngine()
        picture = Picture(engine)
        picture.update([None], clock.now())
        number = view_picture._STEPS + 10
        engine.step_log.add(0, 1.0, [record(i + 1, ("a#1", 1)) for i in range(number)])
        ((_, tick),) = read(picture.update([None], clock.now()).news(None))
        assert (tick["first"], len(tick["steps"])) == (10, view_picture._STEPS)

    def test_history_has_all_older_steps_in_pieces(self, monkeypatch):
        monkeypatch.setattr(view_picture, "_STEPS", 8)
        engine = FakeEngine()
        for number in range(1, 31):
            engine.step_log.add(0, float(number), [record(number, ("a#1", 1))])
        picture = Picture(engine)
        update = picture.update([None], clock.now())
        ((_, tick), _) = read(update.news(None))
        numbers = [step["number"] for step in tick["steps"]]
        assert numbers == list(range(23, 31))
        end = update.first
        while True:
            first, piece = picture.history(end)
            if not piece:
                break
            ((name, event),) = read(piece)
            assert (name, event.get("first", 0)) == ("history", first)
            assert event["steps"][0]["parts"] == [["1", 1]]
            numbers = [step["number"] for step in event["steps"]] + numbers
            end = first
        assert numbers == list(range(1, 31))


class TestBlocks:
    def expand(self, cells, runs):
        for first, count, value in np.array(runs).reshape(-1, 3).tolist():
            cells[first : first + count] = value
        return cells

    def test_a_viewer_can_follow_the_maps(self):
        rng = np.random.default_rng(0)
        engine = FakeEngine()
        picture = Picture(engine)
        cells, states, labels = {}, {}, {}
        for step in range(20):
            owners = [f"secret#{i + step // 5}" for i in range(3)]
            found = rng.integers(0, 4096, 50) * rng.integers(0, 2, 50)
            owned = rng.integers(0, 4, 50)
            data = (found | owned << OWNER_SHIFT).astype("<u4")
            data[: 10 + step] = data[0]
            picture._maps = {0: BlockMap(50, 1, data.tobytes(), data[:5].tobytes(), owners)}
            update = picture.update([None], clock.now())
            for text in (update.news(None), update.whole(None)):
                for event in (e for name, e in read(text) if name == "tick"):
                    changes = event["blocks"]["0"]
                    if "num_cells" in changes:
                        cells = np.zeros(changes["num_cells"], int)
                        states = np.zeros(changes["num_states"], int)
                    self.expand(cells, changes.get("runs", []))
                    self.expand(states, changes.get("states", []))
                    labels |= {int(i): label for i, label in changes.get("owners", {}).items()}
                seen = [(cell & 4095, labels.get(cell >> OWNER_SHIFT)) for cell in cells.tolist()]
                names = [None, *map(label_of, owners)]
                assert seen == [(c & 4095, names[c >> OWNER_SHIFT]) for c in data.tolist()]
                assert (states & 4095 == data[:5] & 4095).all()

    def test_an_equal_map_is_no_news(self):
        picture = Picture(FakeEngine())
        found = BlockMap(3, 1, np.array([4096, 0, 1], "<u4").tobytes(), b"", ["a#1"])
        picture._maps = {0: found}
        assert b"blocks" in picture.update([None], clock.now()).news(None)
        picture._maps = {0: found}
        assert picture.update([None], clock.now()).news(None) == b""


class Watching:
    """Viewer of a server in this process."""

    def __init__(self, served, key=None):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.call = Call(served, "/v1/engine/view", b"", headers, method="GET")

    async def until(self, found):
        """Wait until `found(events)` is true; return the events."""
        while not found(events := read(self.call.body)):
            assert not self.call.task.done(), self.call.body
            self.call.grown.clear()
            await self.call.grown.wait()
        return events

    async def close(self):
        self.call.disconnect()
        await self.call.task


def has(name):
    return lambda events: any(found == name for found, _ in events)


def test_the_stream_begins_with_the_settings_and_the_state():
    async def scenario(served):
        served.engine.engine_stats[0] = SchedulerStats(num_running_reqs=1)
        watching = Watching(served)
        events = await watching.until(has("requests"))
        assert [name for name, _ in events] == ["hello", "tick", "requests"]
        hello, tick, _ = (event for _, event in events)
        assert (hello["models"], hello["block_size"]) == (["fake"], 16)
        assert hello.get("all_requests", True)
        assert (tick["engines"], tick["health"]) == ([0], "ok")
        assert tick["stats"] == {"0": {"running": 1}}
        await watching.close()
        assert len(served.state.view) == 0

    with_server(scenario)


def test_each_key_sees_its_own_requests_and_the_operator_all():
    async def scenario(served):
        served.engine.paused = True
        answers = [
            asyncio.create_task(
                served.http.post(
                    "/v1/completions",
                    json={"prompt": "hi", "max_tokens": 4},
                    headers={"authorization": f"Bearer {key}", "x-request-id": f"of-{key}"},
                )
            )
            for key in ("a", "b")
        ]
        while served.engine.num_unfinished_requests < 2:
            await asyncio.sleep(0.01)
        shown = {}
        for key in ("a", "b", "boss"):
            watching = Watching(served, key)
            events = dict(await watching.until(has("requests")))
            shown[key] = events["requests"]
            assert events["hello"].get("all_requests", True) is (key == "boss")
            text = watching.call.body.decode()
            for other in {"a", "b"} - {key} if key != "boss" else ():
                assert f"of-{other}" not in text
            await watching.close()
        assert [len(shown[key]["rows"]) for key in ("a", "b", "boss")] == [1, 1, 2]
        for key in ("a", "b"):
            assert len(shown[key]["others"]) == 2
        served.engine.paused = False
        await asyncio.gather(*answers)

    with_server(scenario, api_key=["a", "b"], admin_key=["boss"])


def test_a_key_is_needed_and_the_view_can_be_off():
    async def keys(served):
        response = await served.http.get("/v1/engine/view")
        assert response.status_code == 401

    async def off(served):
        response = await served.http.get("/v1/engine/view")
        assert response.status_code == 404
        assert "--no-ui" in response.text

    with_server(keys, api_key=["a"])
    with_server(off, ui=False)


def test_events_are_encoded_once_for_all_viewers_of_an_audience(monkeypatch):
    encoded = []
    encode = view_picture.encode_event

    def counting(name, event):
        encoded.append(name)
        return encode(name, event)

    monkeypatch.setattr(view_picture, "encode_event", counting)

    async def scenario(served):
        watching = [Watching(served) for _ in range(25)]
        for one in watching:
            await one.until(has("requests"))
        encoded.clear()
        served.engine.engine_stats[0] = SchedulerStats(num_running_reqs=7)
        for one in watching:
            await one.until(lambda events: events[-1][1].get("stats", {}).get("0"))
        assert encoded.count("tick") == 1
        for one in watching:
            await one.close()

    with_server(scenario)


def test_streams_end_if_the_work_for_them_fails(monkeypatch, caplog):
    def update(self, audiences, time):
        raise RuntimeError("a fault of the view")

    async def scenario(served):
        await Watching(served).until(has("requests"))
        monkeypatch.setattr(view_picture.Picture, "update", update)
        async with asyncio.timeout(60):
            while len(served.state.view):
                await asyncio.sleep(0.01)
        assert "a fault of the view" in caplog.text

    with_server(scenario)


def test_a_viewer_that_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(viewers, "MAX_QUEUE_BYTES", 3000)

    async def scenario(served):
        slow, quick = Watching(served), Watching(served)
        stuck = asyncio.Event()

        async def send(message):
            slow.call.sent.append(message)
            if len(slow.call.sent) > 2:
                await stuck.wait()

        slow.call.send = send
        await quick.until(has("requests"))
        for number in range(1, 400):
            served.engine.step_log.add(0, clock.now(), [record(number, (f"a#{number}", 1))])
            if number % 20 == 0:
                await asyncio.sleep(view_picture.INTERVAL / 4)
        await quick.until(
            lambda events: any(
                e.get("first", 0) + len(e.get("steps", ())) == 399 for _, e in events
            )
        )
        assert len(served.state.view) == 2  # its connection still holds its place
        stuck.set()
        await slow.call.task  # its stream has ended
        assert slow.call.sent[-1]["more_body"] is False
        assert len(served.state.view) == 1
        await quick.close()

    with_server(scenario)


def test_there_are_only_so_many_viewers(monkeypatch):
    monkeypatch.setattr(viewers, "MAX_VIEWERS", 8)

    async def of_one_key(served):
        watching = [Watching(served) for _ in range(8)]
        for one in watching:
            await one.until(has("hello"))
        response = await served.http.get("/v1/engine/view")
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) > 0
        assert "8 viewers" in response.text
        for one in watching:
            await one.close()

    async def of_several_keys(served):
        watching = [Watching(served, "a") for _ in range(8)]
        for one in watching:
            await one.call.wait_for_body()
        assert [one.call.status for one in watching].count(429) == 1  # others have room
        other = Watching(served, "b")
        await other.until(has("hello"))
        for one in [other, *watching]:
            await one.close()

    with_server(of_one_key)
    with_server(of_several_keys, api_key=["a", "b"])


def test_streams_end_when_the_server_drains():
    async def scenario(served):
        watching = Watching(served)
        await watching.until(has("hello"))
        served.state.begin_drain()
        await watching.call.task
        assert watching.call.sent[-1]["more_body"] is False

    with_server(scenario)


def test_nothing_works_without_viewers(monkeypatch):
    async def scenario(served):
        calls = []

        async def block_maps():
            calls.append(None)
            return {}

        monkeypatch.setattr(served.engine, "block_maps", block_maps)
        watching = Watching(served)
        await watching.until(has("hello"))
        await watching.close()
        await asyncio.sleep(0)
        assert all(task.done() for task in served.state.view._tasks)
        num_calls = len(calls)
        await asyncio.sleep(2 * view_picture.INTERVAL)
        assert len(calls) == num_calls

    with_server(scenario)


def test_the_tenant_of_a_key_is_no_secret_that_is_shown():
    async def scenario(served):
        watching = Watching(served, "a")
        await watching.until(has("requests"))
        assert tenant_of("a") not in watching.call.body.decode()
        await watching.close()

    with_server(scenario, api_key=["a", "b"])


def test_a_lost_viewer_leaves_no_task():
    async def scenario(served):
        call = Call(served, "/v1/engine/view", b"", method="GET", cut_after=0)
        await call.task
        assert len(served.state.view) == 0

    with_server(scenario, engine=FakeAsyncLLM)
