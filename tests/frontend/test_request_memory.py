"""Maximum memory of requests, known on arrival, and its budget."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from octavo.errors import QueueFullError, RequestError
from octavo.frontend import request_memory
from octavo.frontend.request_memory import RequestMemory, logprobs_nbytes, request_nbytes
from octavo.messages import PromptEmbeds
from octavo.sampling_params import StructuredOutputsParams
from tests.params import Params, core_request


def nbytes(prompt=10, **fields):
    params = Params(**fields)
    request = core_request("r", [0] * prompt, params.core(100), n=params.n)
    return request_nbytes(request, params, 100)


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": 1000},
        {"n": 2},
        {"max_tokens": 100},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"logprob_token_ids": [5]},
        {"stop_token_ids": [5]},
        {"allowed_token_ids": [5]},
        {"logit_bias": {5: 1.0}},
        {"stop": ["x"]},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(regex="x")},
    ],
    ids=str,
)
def test_everything_counts(more):
    assert nbytes(**more) > nbytes()


def test_embeddings_count_in_both_processes_and_once_for_all_answers():
    embeds = PromptEmbeds(bytes(1000 * 64), "bfloat16", 32)

    def of(n, **more):
        params = Params(n=n)
        request = core_request("r", [0] * 1000, params.core(100), n=n, **more)
        return request_nbytes(request, params, 100)

    assert of(1, prompt_embeds=embeds) - of(1) >= 3 * 64_000
    assert of(8, prompt_embeds=embeds) - of(8) == of(1, prompt_embeds=embeds) - of(1)


def test_each_answer_holds_its_tokens_and_refers_to_the_prompt():
    prompt = nbytes(prompt=1000) - nbytes(prompt=0)
    assert prompt >= 1000 * 32
    assert nbytes(prompt=1000, n=100) - nbytes(prompt=0, n=100) >= prompt + 99 * 1000 * 8
    assert nbytes(n=100, max_tokens=50) - nbytes(n=100, max_tokens=10) >= 100 * 40 * 32


def test_candidates_count_for_every_token():
    alone = nbytes(logprobs=0, max_tokens=100)
    assert nbytes(logprobs=20, max_tokens=100) - alone >= 100 * 20 * 8
    assert nbytes(logprobs=-1, max_tokens=100) == nbytes(logprobs=100, max_tokens=100)
    for n in (1, 64):
        more = nbytes(n=n, logprobs=20, max_tokens=100) - nbytes(n=n, max_tokens=100)
        assert more >= n * 100 * 20 * 8
    # The prompt's logprobs are the same for all.
    of_prompt = nbytes(prompt=500, prompt_logprobs=20) - nbytes(prompt=500)
    assert nbytes(prompt=500, prompt_logprobs=20, n=64) - nbytes(prompt=500, n=64) == of_prompt


def test_a_tenant_leaves_room_for_others():
    memory = RequestMemory(1000)
    held = []

    def take(tenant, nbytes=10):
        """Reserve until the budget rejects; return the number of reservations."""
        count = 0
        with contextlib.suppress(QueueFullError):
            while True:
                reserved = memory.reserve(nbytes, tenant)
                reserved.__enter__()
                held.append(reserved)
                count += 1
        return count

    def collect(tenant, nbytes):
        collecting = memory.collect("pictures", tenant)
        add = collecting.__enter__()
        held.append(collecting)
        add(nbytes)

    collect("a", 400)
    flood = 40 + take("a")
    assert 85 <= flood <= 89
    with pytest.raises(QueueFullError, match="the rest is for other keys"):
        memory.reserve(10, "a").__enter__()
    with pytest.raises(QueueFullError, match="The pictures of this request may take"):
        collect("a", 10)
    assert take("b") >= 5
    assert take("c") >= 1
    for reserved in held:
        reserved.__exit__(None, None, None)
    assert memory.used == 0
    assert not memory._of_tenants
    assert take("a", 950) == 1  # a tenant that holds nothing may use all that is free
    assert take(None, 10) == 5


def test_a_budget_is_kept():
    memory = RequestMemory(100)
    with memory.reserve(60):
        with pytest.raises(QueueFullError, match="try again"), memory.reserve(41):
            pytest.fail("was let in")
        with memory.reserve(40):
            assert memory.used == 100
        with pytest.raises(RequestError, match="--request-memory-bytes") as error:
            memory.reserve(101).__enter__()
        assert error.value.status == 400
        assert memory.used == 60
    with memory.hold(500):  # existing data is counted, not rejected
        assert memory.used == 500
        with pytest.raises(QueueFullError):
            memory.reserve(1).__enter__()
    with pytest.raises(KeyError), memory.reserve(50):
        raise KeyError
    assert memory.used == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # 96 bytes for each token of the prompt and 12 more for each answer; 8 KiB for an answer,
        # and 112 bytes for each of its tokens.
        ({"prompt": 10, "max_tokens": 5}, 10 * (96 + 12) + 8192 + 5 * 112),
        ({"prompt": 10, "max_tokens": 5, "n": 3}, 10 * (96 + 36) + 3 * (8192 + 5 * 112)),
        # 8 bytes for each candidate, the token's own included, and 512 for those of one answer.
        ({"prompt": 0, "max_tokens": 5, "logprobs": 2}, 8192 + 5 * 112 + 15 * (8 + 512)),
        ({"prompt": 0, "max_tokens": 5, "logprobs": 0}, 8192 + 5 * 112 + 5 * (8 + 512)),
        ({"prompt": 0, "max_tokens": 5, "logprobs": -1}, 8192 + 5 * 112 + 505 * (8 + 512)),
        (
            {"prompt": 0, "max_tokens": 5, "logprobs": 2, "n": 3},
            3 * (8192 + 5 * 112) + 45 * 8 + 15 * 512,
        ),
        (
            {"prompt": 4, "max_tokens": 1, "prompt_logprobs": 2, "n": 2},
            4 * (96 + 24) + 2 * (8192 + 112) + 12 * (8 + 512),
        ),
        # Packed data counts twice, a caller's id 64 bytes, a stop token three times as much; texts
        # have up to 4 bytes for a character.
        ({"prompt": 0, "max_tokens": 1, "stop_token_ids": [5, 6]}, 8192 + 112 + 2 * 3 * 64),
        ({"prompt": 0, "max_tokens": 1, "allowed_token_ids": [5]}, 8192 + 112 + 2 * 16 + 64),
        ({"prompt": 0, "max_tokens": 1, "logit_bias": {5: 1.0, 6: 1.0}}, 8192 + 112 + 2 * 16),
        ({"prompt": 0, "max_tokens": 1, "stop": ["ab", "c"]}, 8192 + 112 + 4 * 3),
    ],
    ids=str,
)
def test_what_a_request_books(fields, expected):
    assert nbytes(**fields) == expected


def test_what_an_answer_books_while_it_is_sent():
    assert logprobs_nbytes(1000, 10) == 8 * 1000 + 512 * 10


def test_refusals_in_full():
    memory = RequestMemory(64 * 2**20)
    with pytest.raises(RequestError) as never, memory.reserve(64 * 2**20 + 2**20):
        pass
    assert never.value.message == (
        "The request may take 65 MiB (its prompt and parameters, n x max_tokens, logprobs), but "
        "all requests together may take only 64 MiB (--request-memory-bytes). Lower n, max_tokens "
        "or logprobs."
    )
    assert (never.value.param, never.value.code) == ("max_tokens", "request_too_large")
    with memory.reserve(64 * 2**20), pytest.raises(QueueFullError) as full, memory.reserve(2**19):
        pass
    assert full.value.message == (
        "The request may take 0.5 MiB, but 64.0 of the 64 MiB for requests "
        "(--request-memory-bytes) are in use; try again later, or lower n, max_tokens or logprobs."
    )
    assert full.value.retry_after == 1


def test_what_can_be_spared_is_given_up_for_a_request():
    memory = RequestMemory(100)
    asked = []

    def spare(nbytes):
        asked.append(nbytes)
        memory.used -= 30

    memory.spare = spare
    memory.used = 80
    with memory.reserve(20):
        assert asked == []
    with memory.reserve(50):
        assert (asked, memory.used) == ([30], 100)
        with pytest.raises(QueueFullError), memory.reserve(70):
            pass
    assert asked == [30, 70]


def test_memory_is_trimmed_after_the_last_request_though_data_is_kept(monkeypatch):
    calls = []

    async def call_utility(name):
        calls.append(name)

    async def scenario():
        memory = RequestMemory(100)
        memory.used = memory.kept = 7
        client = SimpleNamespace(ready=asyncio.sleep(0), call_utility=call_utility)
        task = asyncio.create_task(request_memory.trim_when_idle(memory, client))
        with memory.hold(5):
            await asyncio.sleep(0.01)
            assert calls == []
        while not calls:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(request_memory, "_TRIM_INTERVAL", 0.001)
    monkeypatch.setattr(request_memory, "trim_memory", lambda: None)
    asyncio.run(scenario())
    assert calls == ["trim_memory"]


def test_results_are_collected_until_they_are_written():
    memory = RequestMemory(2**20)
    spared = []
    memory.spare = spared.append
    with memory.collect() as add, memory.collect() as other:
        add(2**19)
        other(2**18)
        assert memory.used == 2**19 + 2**18
        with pytest.raises(QueueFullError, match=r"do not fit: 0\.8 of the 1 MiB"):
            add(2**19)
        assert spared == [2**18]
        with pytest.raises(RequestError, match="more than the 1 MiB") as failure:
            add(2**19 + 1)
        assert failure.value.code == "request_too_large"
        assert memory.used == 2**19 + 2**18
        add(2**18)
    assert memory.used == 0
