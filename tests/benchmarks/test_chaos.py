"""Chaos test in a short form, and its detection of errors."""

import asyncio
from types import SimpleNamespace

import chaos
import pytest
from chaos import Answer

from tests.hybrid import save_hybrid


def test_answers_are_the_same_however_they_are_cut():
    def event(text, ids, **more):
        choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": {"tokens": [text]}}
        return {"id": "x", "created": 5, "model": "m", "choices": [{**choice, **more}]}

    one, two = Answer(), Answer()
    one.add(event("ab", [1, 2], finish_reason="stop"))
    two.add(event("a", [1]) | {"id": "y"})
    two.add(event("b", [2], finish_reason="stop"))
    one.choices[0]["logprobs"] = two.choices[0]["logprobs"] = None
    assert one == two
    two.add({"choices": [{"index": 0, "text": "c"}]})
    assert one != two
    one.add({"error": {"message": "gone"}})
    assert "gone" in one.error


def test_requests_are_of_many_kinds_and_always_the_same():
    asked = chaos.requests(32, 50)
    assert asked == chaos.requests(32, 50)
    assert {path for path, _ in asked} == {chaos.COMPLETIONS, chaos.CHAT}
    fields = {name for _, body in asked for name in body}
    assert fields >= {"n", "logprobs", "prompt_logprobs", "stop", "structured_outputs", "seed"}


@pytest.mark.parametrize("change", [" lost", None])
def test_what_is_lost_or_changed_is_counted(monkeypatch, change):
    answered = 0

    async def ask(self, path, body):
        nonlocal answered
        answered += 1
        await asyncio.sleep(0)
        text = "all" if answered <= 3 or change is None else change
        return Answer({0: {"text": text}})

    class Killer(SimpleNamespace):
        failure = None

        def start(self):
            pass

        def is_alive(self):
            return answered < 9

    monkeypatch.setattr(chaos.Load, "ask", ask)
    monkeypatch.setattr(chaos, "Killer", lambda *args: Killer())
    site = SimpleNamespace(url="http://x", is_elastic=False)
    args = chaos.parse(["--streams", "3", "--kills", "1"])
    wrong, count, _ = asyncio.run(chaos.storm(site, args))
    assert count >= 6
    assert len(wrong) == (0 if change is None else count)


def test_each_role_dies_in_its_turn():
    site = SimpleNamespace(
        processes=lambda: [("core", None), ("worker", None), *[("spare", None)] * 50]
    )
    roles = ("core", "worker", "spare", "node")
    killer = chaos.Killer(site, None, 30, roles, ("SIGKILL",), 1, 0.0, 0)
    for _ in range(30):
        [(role, _)] = killer._draw()
        killer.done[role, "SIGKILL"] += 1
    assert killer.done == {(role, "SIGKILL"): 10 for role in ("core", "worker", "spare")}


def test_what_processes_are():
    for words, role in (
        (["python", "-m", "octavo.executor.worker_process", "7"], "worker"),
        (["python", "-m", "octavo", "serve", "--uds", "x"], "server"),
        (["ray::WorkerActor.hear"], "worker"),
        (["ray::ServerActor"], "actor"),
        (["python", "-m", "octavo.text.template_process"], None),
        ([], None),
    ):
        assert chaos._role(words) == role


def test_nine_deaths_of_replicas_workers_and_a_node_under_32_streams(capsys, tmp_path):
    """One server with everything: an engine here and one on a node, each with two workers.

    The model has attention and recurrent states.
    """
    flags = ["--kills", "9", "--at-once", "5", "--pause", "0.2", "--max-tokens", "24"]
    flags += ["--model", save_hybrid(tmp_path)]
    flags += ["--roles", "core", "worker", "node"]
    # Each stopped process is found after a second.
    flags += ["--kinds", "SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "--layout", "nodes-tp2"]
    flags += ["--flags", "--num-threads", "1", "--max-model-len", "256"]
    flags += ["--progress-timeout", "4"]  # an engine may wait for a second on a busy machine
    passed = chaos.main([*flags, "--kv-cache-memory-bytes", "8M"]) == 0
    out = capsys.readouterr().out
    assert passed, out
    assert "9 kills" in out
    assert "of spare" not in out
    assert "all go on after" in out
    assert ", 0 lost, changed or left" in out
