"""Engines that sleep: memory is really returned, and answers do not change."""

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import pytest

from octavo import LLM, SamplingParams
from octavo.config import BUILTIN_MODEL
from octavo.errors import ConfigError, ModelError, RequestError, SleepError
from octavo.models.hub import resolve_model
from octavo.scheduler.speculation import DraftLengths
from tests.e2e.harness import serve

SMALL = {"max_model_len": 256, "kv_cache_memory_bytes": "8M", "max_num_seqs": 8}
PROMPTS = ["Once upon a time", "Lily had a red ball.", "The dog", "In the morning"]
PARAMS = SamplingParams(max_tokens=30, temperature=0.8, seed=5, logprobs=1, ignore_eos=True)


def answers(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(o.outputs[0].token_ids, str(o.outputs[0].logprobs)) for o in outputs]


@pytest.fixture(scope="module")
def llm():
    with LLM(enable_sleep_mode=True, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected():
    with LLM(**SMALL) as llm:
        return answers(llm)


SCRIPT = """
import json, os
from octavo import LLM, SamplingParams

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

sizes = []
with LLM(enable_sleep_mode=True, kv_cache_memory_bytes="32M", max_num_seqs=4,
         max_num_batched_tokens=512) as llm:
    plan = llm.memory_plan
    prompts = [[(i + j) % 500 + 4 for j in range(1400)] for i in range(4)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for level in (1, 2):
        llm.generate(prompts, params, use_tqdm=False)
        sizes.append(resident())
        llm.sleep(level)
        sizes.append(resident())
        llm.wake_up(["weights"])
        sizes.append(resident())
        llm.wake_up(["kv_cache"])
    llm.generate(prompts, params, use_tqdm=False)
    sizes.append(resident())
    used = 4 * len(prompts[0]) // plan.block_size * plan.block_nbytes
print(json.dumps([sizes, plan.nbytes("weights"), used, plan.steady]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux only")
def test_memory_is_given_back_and_taken_up_again():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes, weights, used, planned = json.loads(done.stdout)
    full, asleep, loaded, full_again, asleep_again, _, last = sizes
    slack = 4 * 2**20
    assert used > 15 * 2**20
    for before, after in ((full, asleep), (full_again, asleep_again)):
        assert before - after > weights + used - slack
    assert weights - slack < loaded - asleep < weights + slack
    assert abs(asleep_again - asleep) < slack
    for after in (full_again, last):
        assert after - asleep > weights + used - slack
    assert max(sizes) <= planned


def test_the_same_bits_after_waking(llm, expected):
    assert answers(llm) == expected
    for level in (1, 2, 0, 1):
        llm.sleep(level)
        llm.sleep(level)
        assert llm.llm_engine.is_sleeping()
        assert llm.wake_up() is True
        assert llm.wake_up() is True
        assert not llm.llm_engine.is_sleeping()
        assert answers(llm) == expected


@pytest.fixture
def most_drafts(monkeypatch):
    """Make engines use all possible drafts: the best number depends on the drafts' time."""
    monkeypatch.setattr(DraftLengths, "choose", lambda lengths, num_reqs: lengths.most)


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"model": "octavo/stories-draft"}},
        {"speculative_config": {"model": "octavo/stories-eagle"}},
        {"speculative_config": {"model": "octavo/stories-medusa"}},
        {"quantization": "int4", "enforce_eager": True},
        {"weight_cache": "off", "kv_cache_dtype": "int8"},
        {"attention_backend": "reference"},
    ],
    ids=["draft", "eagle", "medusa", "int4", "no-cache", "reference"],
)
def test_all_that_an_engine_may_be_made_of(settings):
    with LLM(enable_sleep_mode=True, **SMALL, **settings) as llm:
        before = answers(llm)
        accepted = sum(llm.stats().num_accepted_tokens_per_pos[:1])
        runner = llm.collective_rpc(lambda worker: worker.runner)[0]
        llm.sleep()
        assert not any(cache.numpy().any() for cache in runner._caches)
        llm.wake_up()
        assert answers(llm) == before
        if "speculative_config" in settings:
            assert len(runner._weights) == 2
            assert llm.stats().num_accepted_tokens_per_pos[0] > accepted


def test_requests_are_kept_through_a_sleep(llm, expected):
    inboxes = llm.llm_engine.inboxes
    llm.enqueue(PROMPTS, PARAMS)
    for _ in range(7):
        llm.llm_engine.advance()
    llm.sleep(2, mode="keep")
    with pytest.raises(SleepError, match="wake_up"):
        llm.generate("x", use_tqdm=False)
    assert llm.wake_up(["weights"]) is False
    with pytest.raises(SleepError, match="wake_up"):
        llm.generate("x", use_tqdm=False)
    assert llm.wake_up(["kv_cache"]) is True
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [(o.outputs[0].token_ids, str(o.outputs[0].logprobs)) for o in outputs] == expected
    for mode, reason in (("wait", "length"), ("abort", "abort")):
        llm.enqueue(PROMPTS, PARAMS)
        for _ in range(7):
            llm.llm_engine.advance()
        llm.sleep(1, mode=mode)
        llm.wake_up()
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == [reason] * len(PROMPTS)
        for output, (token_ids, _) in zip(outputs, expected, strict=True):
            count = len(output.outputs[0].token_ids)
            assert 0 < count < 30 or reason == "length"
            assert output.outputs[0].token_ids == token_ids[:count]
    assert not inboxes


def test_an_engine_that_is_driven_by_steps(llm, expected):
    engine = llm.llm_engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, PARAMS)
    engine.step()
    engine.sleep(mode="wait")
    found = []
    found += engine.step()
    engine.add_request("late", "x", PARAMS)
    with pytest.raises(SleepError, match="wake_up"):
        engine.step()
    engine.abort_request("late")
    assert not engine.has_unfinished_requests()
    final = {o.request_id: o.outputs[0].token_ids for o in found if o.finished}
    assert [final[str(i)] for i in range(len(PROMPTS))] == [tokens for tokens, _ in expected]
    engine.wake_up()


def test_what_is_refused(llm):
    for level in (3, -1, "1"):
        with pytest.raises(RequestError, match="level"):
            llm.sleep(level)
    with pytest.raises(RequestError, match="tags"):
        llm.wake_up(["weight"])
    assert not llm.llm_engine.is_sleeping()
    with LLM(**SMALL) as other:
        with pytest.raises(SleepError, match="enable_sleep_mode"):
            other.sleep()
        other.sleep(0)
        other.wake_up()
        assert len(other.generate("x", PARAMS, use_tqdm=False)) == 1


def test_where_it_cannot_sleep_the_start_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="enable_sleep_mode works with device=cpu"):
        LLM(enable_sleep_mode=True, attention_backend="triton", **SMALL)


def test_memory_that_others_have_taken(llm, expected, monkeypatch):
    llm.sleep()
    with monkeypatch.context() as patch:
        patch.setattr("octavo.worker.model_runner.cpu_memory", lambda node: (2**40, 2**20))
        with pytest.raises(SleepError, match="1 MiB are free"):
            llm.wake_up()
    assert llm.llm_engine.is_sleeping()
    assert llm.wake_up()
    assert answers(llm) == expected


def test_weights_that_change_while_they_sleep(tmp_path, expected):
    source = resolve_model(BUILTIN_MODEL)
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (weights,) = tmp_path.glob("*.safetensors")
    before = weights.read_bytes()
    after = before[: len(before) // 2] + bytes(4096) + before[len(before) // 2 + 4096 :]
    with LLM(str(tmp_path), weight_cache="off", enable_sleep_mode=True, **SMALL) as llm:
        assert answers(llm) == expected
        llm.sleep(1)
        weights.write_bytes(after)
        for _ in range(2):
            with pytest.raises(ModelError, match="has changed since the model was loaded"):
                llm.wake_up()
            assert llm.llm_engine.is_sleeping()
        llm.sleep(2)
        llm.wake_up()
        changed = answers(llm)
        assert changed != expected
        # As in scripts for vLLM.
        llm.sleep(2)
        weights.write_bytes(before)
        llm.wake_up(["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(["kv_cache"])
        assert answers(llm) == expected
        llm.sleep(1)
        weights.unlink()
        with pytest.raises(ModelError):
            llm.wake_up()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--enable-sleep-mode", "--enable-admin", "--max-model-len", "512"]
    folder = tmp_path_factory.mktemp("sleep")
    with serve(folder, *flags, "--kv-cache-memory-bytes", "24M", "--max-num-seqs", "32") as server:
        yield server


def stream(server, index, texts, **fields):
    """Collect a stream's text and its finish reason."""
    body = {"prompt": PROMPTS[index % 4], "max_tokens": 100, "seed": index, "ignore_eos": True}
    text, reason = "", None
    with (
        suppress(httpx.HTTPError),
        httpx.stream(
            "POST",
            server.url + "/v1/completions",
            json={**body, "stream": True, **fields},
            timeout=240,
        ) as lines,
    ):
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    texts[index] = text, reason


def streams(server, meanwhile=lambda: None, **fields):
    """Return the texts of 32 simultaneous streams, by number."""
    texts = {}
    clients = [
        threading.Thread(target=stream, args=(server, i, texts), kwargs=fields) for i in range(32)
    ]
    for client in clients:
        client.start()
    meanwhile()
    for client in clients:
        client.join()
    assert len(texts) == 32
    return texts


def test_streams_go_on_after_a_sleep_or_say_that_they_were_ended(server):
    def resident():
        return server.engine_process().memory_info().rss

    def sleeping(path):
        def run():
            started = server.metric("octavo:generation_tokens_total")
            while server.metric("octavo:generation_tokens_total") < started + 320:
                time.sleep(0.02)
            before = resident()
            assert server.post(path, {}).status_code == 200
            assert server.get("/is_sleeping").json() == {"is_sleeping": True}
            assert resident() < before - 10 * 2**20
            assert server.get("/health").json()["status"] == "ok"
            assert server.get("/ready").json()["reason"] == "asleep"
            metrics = server.get("/metrics").text
            assert 'sleep_state="weights_offloaded"} 1.0' in metrics
            timeout = httpx.Timeout(120, read=0.5)
            with pytest.raises(httpx.ReadTimeout):  # it waits, and ends with its client
                server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}, timeout)
            late = server.post(
                "/v1/completions", {"prompt": "x", "max_tokens": 3, "deadline_ms": 300}
            )
            assert late.status_code == 408
            assert server.post("/wake_up", {}).json() == {"status": "awake", "tags": None}
            assert server.get("/ready").status_code == 200
            assert 'sleep_state="awake"} 1.0' in server.get("/metrics").text

        return run

    plain = streams(server)
    assert {reason for _, reason in plain.values()} == {"length"}
    assert streams(server, sleeping("/sleep?mode=keep")) == plain
    for _ in range(10):  # all may end before the call arrives
        cut = streams(server, sleeping("/sleep"))
        reasons = {reason for _, reason in cut.values()}
        assert reasons <= {"abort", "length"}
        for index, (text, _) in cut.items():
            assert plain[index][0].startswith(text.rstrip("\ufffd"))
        if "abort" in reasons:
            break
    assert "abort" in reasons
    assert streams(server, sleeping("/sleep?mode=wait")) == plain


def test_a_server_ends_while_it_sleeps(server):
    answers = []
    assert server.post("/sleep", {}).status_code == 200
    client = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", {"prompt": "x"}))
    )
    client.start()
    while server.get("/load").json() != {"server_load": 1}:
        pass
    server.process.terminate()
    assert server.process.wait(60) == 0  # no drain: no answer could finish
    client.join()
    assert answers[0].status_code == 503
    assert "server stopped" in answers[0].json()["error"]["message"]
