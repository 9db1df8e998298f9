"""What requests may take, known on arrival, and its budget."""

import pytest

from octavo.engine.request_memory import RequestMemory, request_nbytes
from octavo.errors import QueueFullError, RequestError
from octavo.messages import EngineCoreRequest
from tests.params import Params


def nbytes(prompt=10, **fields):
    params = Params(**fields)
    request = EngineCoreRequest("r", [0] * prompt, params.core(100), 0.0, n=params.n)
    return request_nbytes(request, params, 100)


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": 1000},
        {"n": 2},
        {"max_tokens": 100},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"stop_token_ids": [5]},
        {"allowed_token_ids": [5]},
        {"logit_bias": {5: 1.0}},
        {"stop": ["x"]},
        {"bad_words": ["x"]},
    ],
    ids=str,
)
def test_everything_counts(more):
    assert nbytes(**more) > nbytes()


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
    # The prompt's are the same for all.
    of_prompt = nbytes(prompt=500, prompt_logprobs=20) - nbytes(prompt=500)
    assert nbytes(prompt=500, prompt_logprobs=20, n=64) - nbytes(prompt=500, n=64) == of_prompt


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
    with memory.hold(500):  # what is there already is counted, not refused
        assert memory.used == 500
        with pytest.raises(QueueFullError):
            memory.reserve(1).__enter__()
    with pytest.raises(KeyError), memory.reserve(50):
        raise KeyError
    assert memory.used == 0
