"""Beam search alone, compared with transformers; no engine."""

import asyncio
import itertools
from array import array
from types import SimpleNamespace

import pytest
import torch

from octavo.errors import RequestError, SleepError
from octavo.frontend.beam_search import (
    BeamSearch,
    beam_requests,
    beam_search_nbytes,
    make_beam_search,
    run_beam_search,
)
from octavo.messages import CoreSamplingParams
from octavo.outputs import CompletionOutput, FlatLogprobs, RequestOutput
from octavo.sampling_params import MAX_BEAM_WIDTH, BeamSearchParams, SamplingParams
from tests.models.harness import make_hf
from tests.params import core_request

EOS = (2, 3, 5)
PAD = 39
VOCAB = 40
MAX_TOKENS = 9


def row_of(candidates: dict[int, float]) -> FlatLogprobs:
    """Return one position with candidates, the best first; the chosen token is none of them."""
    row = FlatLogprobs(None)
    row.append_rows(
        array("i", [-1, *candidates]).tobytes(),
        array("f", [-50.0, *candidates.values()]).tobytes(),
        array("i", [VOCAB]).tobytes(),
    )
    return row


class TransformersModel:
    """Tiny Llama that ends its texts often, and its results for each prefix."""

    def __init__(self, seed: int) -> None:
        self.hf = make_hf(
            "LlamaForCausalLM",
            seed=seed,
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=1,
            eos_token_id=list(EOS),
            pad_token_id=PAD,
        )
        with torch.no_grad():  # ends compete with other tokens
            self.hf.lm_head.weight *= 0.4
            self.hf.lm_head.weight[list(EOS)] *= 1.5
        torch.manual_seed(seed)
        self.prompt = torch.randint(6, PAD, (5,)).tolist()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def row(self, token_ids: list[int], count: int) -> FlatLogprobs:
        """Return the `count` most probable tokens after prompt and `token_ids`."""
        key = tuple(token_ids)
        if key not in self._known:
            with torch.no_grad():
                logits = self.hf(torch.tensor([self.prompt + token_ids])).logits[0, -1]
            self._known[key] = logits.float().log_softmax(-1)
        values, ids = self._known[key].topk(count)
        return row_of(dict(zip(ids.tolist(), values.tolist(), strict=True)))

    def search(self, params: BeamSearchParams) -> BeamSearch:
        """Run Octavo's search to its end."""
        eos = () if params.ignore_eos else EOS
        search = BeamSearch(params, MAX_TOKENS, eos, VOCAB)
        while search.live:
            search.step([self.row(beam.token_ids, search.num_logprobs) for beam in search.live])
        return search

    def generate(self, params: BeamSearchParams) -> tuple[list[list[int]], list[float]]:
        """Return transformers' beams, padded, and their scores."""
        width = params.beam_width
        ids = torch.tensor([self.prompt])
        with torch.no_grad():
            out = self.hf.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                max_new_tokens=MAX_TOKENS,
                return_dict_in_generate=True,
                output_scores=True,
                eos_token_id=None if params.ignore_eos else list(EOS),
            )
        scores = [] if width == 1 else out.sequences_scores.tolist()
        return [row[len(self.prompt) :] for row in out.sequences.tolist()], scores


@pytest.fixture(scope="module", params=[0, 1, 4])
def model(request):
    return TransformersModel(request.param)


def same_as_transformers(model, params):
    beams = model.search(params).beams
    theirs, scores = model.generate(params)
    assert len(beams) == params.beam_width
    for beam, tokens in zip(beams, theirs, strict=True):
        length = len(beam.token_ids)
        assert beam.token_ids == tokens[:length]
        assert set(tokens[length:]) <= {PAD}
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] in EOS else "length") or (
            params.ignore_eos
        )
        assert len(beam.rows) == length
    for beam, score in zip(beams, scores, strict=False):
        ours = beam.cum_logprob / len(beam.token_ids) ** params.length_penalty
        assert ours == pytest.approx(score, rel=1e-4)
    return beams


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_equal_to_transformers(model, width):
    found = {}
    for penalty, early in itertools.product((0.5, 1.0, 2.0, -1.0), (True, False, "never")):
        if width == 1 and early is not False:
            continue  # transformers' greedy search does not have it
        params = BeamSearchParams(
            beam_width=width, max_tokens=MAX_TOKENS, length_penalty=penalty, early_stopping=early
        )
        beams = same_as_transformers(model, params)
        found[penalty, early] = [beam.token_ids for beam in beams]
    if width == 5:  # the cases that matter
        assert any(found[2.0, early] != found[0.5, early] for early in (True, False, "never"))
        assert any(found[p, True] != found[p, "never"] for p in (0.5, 1.0, 2.0))
        lengths = {len(tokens) for beams in found.values() for tokens in beams}
        assert len(lengths) > 3


def test_equal_to_transformers_without_an_end(model):
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True)
    beams = same_as_transformers(model, params)
    assert all(len(beam.token_ids) == MAX_TOKENS for beam in beams)


def params(width=2, **fields):
    return BeamSearchParams(beam_width=width, max_tokens=8, **fields)


def test_it_asks_for_no_more_candidates_than_it_needs():
    assert BeamSearch(params(4), 8, EOS, VOCAB).num_logprobs == 4 + len(EOS)
    assert BeamSearch(params(4), 8, (), VOCAB).num_logprobs == 4
    assert BeamSearch(params(64), 8, EOS, VOCAB).num_logprobs == VOCAB


def test_of_equals_the_earlier_beam_and_the_lower_token_win():
    search = BeamSearch(params(2), 8, (), VOCAB)
    search.step([row_of({9: -1.0, 7: -1.0, 8: -1.0})])
    assert [beam.token_ids for beam in search.live] == [[7], [8]]
    search.step([row_of({4: -2.0, 3: -2.0}), row_of({1: -2.0, 0: -2.0})])
    assert [beam.token_ids for beam in search.live] == [[7, 3], [7, 4]]


def test_an_end_that_is_not_among_the_best_is_dropped():
    search = BeamSearch(params(2), 8, (2,), VOCAB)
    search.step([row_of({7: -1.0, 8: -1.5, 2: -2.0})])
    assert not search.beams
    search.step([row_of({2: -0.5, 7: -3.0, 8: -4.0}), row_of({9: -0.1, 2: -3.0, 6: -5.0})])
    assert [beam.token_ids for beam in search.beams] == [[7, 2]]
    assert [beam.token_ids for beam in search.live] == [[8, 9], [7, 7]]


def test_a_vocabulary_that_is_too_small_for_the_beams():
    search = BeamSearch(params(5), 2, (0,), 3)
    row = row_of({1: -0.5, 2: -1.0, 0: -2.0})
    search.step([row])
    assert [beam.token_ids for beam in search.live] == [[1], [2]]
    search.step([row, row])
    assert not search.live
    assert len(search.beams) == 5
    search = BeamSearch(params(2), 2, (0,), 1)  # only the end is possible
    search.step([row_of({0: 0.0})])
    assert [beam.token_ids for beam in search.beams] == [[0]]
    assert not search.live


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": MAX_BEAM_WIDTH + 1}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
        ({"structured_outputs": 1}, "structured_outputs"),
        ({"watermarking": True}, "watermarking"),
    ],
)
def test_bad_parameters_are_named(fields, name):
    with pytest.raises(RequestError, match=name) as raised:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields))
    assert raised.value.param == name


def test_the_longest_answers_have_a_score():
    search = BeamSearch(params(1, length_penalty=-10.0), 2**40, (), VOCAB)
    assert search._score(-1.0, 2**40) < -1e100


SPEC = SimpleNamespace(is_encoder_decoder=False, vocab_size=VOCAB)
REQUEST = core_request(
    "r",
    [1, 2, 3],
    CoreSamplingParams(temperature=0.0, max_tokens=4, all_stop_token_ids=frozenset({2})),
    cache_salt="salt",
    turn=7,
)


def test_requests_of_a_step():
    search = make_beam_search(params(2), REQUEST, SPEC)
    (first,) = beam_requests(REQUEST, search)
    assert first.sampling_params.logprobs == search.num_logprobs == 3
    search.step([row_of({7: -1.0, 8: -1.5, 2: -2.0})])
    requests = beam_requests(REQUEST, search)
    assert [r.prompt_token_ids for r in requests] == [[1, 2, 3, 7], [1, 2, 3, 8]]
    assert [r.options.turn for r in requests] == [7, 8]
    assert {r.options.cache_salt for r in requests} == {"salt"}
    assert all(r.sampling_params.max_tokens == 1 for r in requests)
    assert not any(r.sampling_params.all_stop_token_ids for r in requests)
    assert len({r.request_id for r in [first, *requests]}) == 3


def test_memory_grows_with_the_width():
    small, large = (
        beam_search_nbytes(REQUEST, make_beam_search(params(k), REQUEST, SPEC), VOCAB)
        for k in (1, 32)
    )
    assert large > 20 * small


class FakeStream:
    """Engine that answers a beam's request with a candidate that depends on its length."""

    def __init__(self, fail_at: int | None = None, block_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.block_at = block_at
        self.live: set[str] = set()
        self.seen = 0
        self.blocked = asyncio.Event()

    async def __call__(self, request, its_params):
        assert its_params.max_tokens == 1
        self.live.add(request.request_id)
        self.seen += 1
        number = self.seen
        try:
            if number == self.fail_at:
                raise RequestError("this one fails")
            if self.block_at is not None and number >= self.block_at:
                self.blocked.set()
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            completion = CompletionOutput(0, "", [7], logprobs=row_of({7: -1.0, 8: -1.5, 2: -2.0}))
            yield RequestOutput("x", None, [], None, [completion], True, num_cached_tokens=number)
        finally:
            self.live.remove(request.request_id)


async def run(stream):
    search = make_beam_search(params(2), REQUEST, SPEC)
    return await run_beam_search(REQUEST, "hi", search, SamplingParams(), None, stream)


def test_a_whole_search():
    stream = FakeStream()
    output = asyncio.run(run(stream))
    assert stream.seen == 1 + 2 * 3
    assert not stream.live
    assert output.finished
    assert output.prompt == "hi"
    assert output.num_cached_tokens == 1
    assert [c.token_ids for c in output.outputs] == [[7, 7, 7, 7], [7, 7, 7, 8]]
    assert [c.cumulative_logprob for c in output.outputs] == [-4.0, -4.5]
    assert [(c.index, c.finish_reason) for c in output.outputs] == [(0, "length"), (1, "length")]


def test_one_failure_ends_all():
    stream = FakeStream(fail_at=3, block_at=4)
    with pytest.raises(RequestError, match="this one fails"):
        asyncio.run(run(stream))
    assert not stream.live


def test_a_search_that_a_sleep_ends():
    async def stream(request, its_params):
        completion = CompletionOutput(0, "", [], finish_reason="abort")
        yield RequestOutput("x", None, [], None, [completion], True)

    with pytest.raises(SleepError, match="put to sleep"):
        asyncio.run(run(stream))


def test_being_cancelled_ends_all():
    async def scenario():
        stream = FakeStream(block_at=2)
        task = asyncio.create_task(run(stream))
        await stream.blocked.wait()
        await asyncio.sleep(0)
        assert len(stream.live) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not stream.live

    asyncio.run(scenario())
