"""The model runner on a tiny Llama: what one request does must not show in another's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from octavo.config import EngineConfig
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import (
    BadWordsTokenIds,
    CachedRequestData,
    CoreSamplingParams,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from octavo.models.registry import read_spec
from octavo.platforms.cpu import CPUPlatform
from octavo.sampling.sampler import NOT_FINITE
from octavo.worker import model_runner
from octavo.worker.graphs import CapturedSteps, EagerSteps
from octavo.worker.model_runner import ModelRunner, SampledTokens
from octavo.worker.scratch import measure_scratch
from octavo.worker.setup import WorkerSetup
from tests.models.harness import CPU, make_hf
from tests.models.test_parity import CASES, VOCAB
from tests.params import core_params, unpack_logprobs

BLOCK_SIZE, BLOCKS, MAX_LEN, MAX_REQS = 8, 5, 40, 3
GREEDY = core_params(VOCAB, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(path)
    return path


class Runner:
    """A model runner whose requests have blocks of their own, all handed out at the start."""

    def __init__(self, folder: Path, **settings: object) -> None:
        config = EngineConfig.from_kwargs(model=str(folder), max_num_seqs=MAX_REQS, **settings)
        spec = read_spec(folder)
        setup = WorkerSetup(config, spec, folder, "float32", MAX_LEN, 2 * MAX_LEN)
        platform = CPUPlatform()
        backend = platform.make_attention_backend(setup, CPU)
        setup = replace(setup, scratch=measure_scratch(setup, backend))
        self.runner = ModelRunner(setup, platform, CPU)
        kv = KVCacheConfig(4 * BLOCKS + 1, BLOCK_SIZE, make_kv_cache_groups(spec.caches))
        with torch.inference_mode():
            self.runner.initialize_kv_cache(kv)
        self.computed: dict[str, int] = {}
        self._first_block = 1

    def new(
        self, req_id: str, token_ids: Sequence[int], params: CoreSamplingParams = GREEDY
    ) -> NewRequestData:
        blocks = list(range(self._first_block, self._first_block + BLOCKS))
        self._first_block += BLOCKS
        self.computed[req_id] = 0
        return NewRequestData(req_id, list(token_ids), len(token_ids), params, [blocks], 0)

    def step(
        self,
        counts: dict[str, int],
        new: Sequence[NewRequestData] = (),
        finished: Sequence[str] = (),
        more_blocks: dict[str, list[int]] | None = None,
        copies: Sequence[tuple[int, int]] = (),
    ) -> model_runner.PendingOutput:
        """Runs a step of so many tokens of each request."""
        blocks = {req_id: [ids] for req_id, ids in (more_blocks or {}).items()}
        cached = [req_id for req_id in counts if req_id not in {data.req_id for data in new}]
        work = SchedulerOutput(
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=CachedRequestData(
                cached,
                [blocks.get(req_id) for req_id in cached],
                [self.computed[req_id] for req_id in cached],
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=list(finished),
            blocks_to_copy=list(copies),
        )
        for req_id, count in counts.items():
            self.computed[req_id] += count
        with torch.inference_mode():
            self.runner.execute_model(work)
            return self.runner.sample_tokens()

    def generate(self, data: NewRequestData, count: int) -> list[int]:
        """Tokens of a request that runs alone."""
        tokens = token_of(self.step({data.req_id: len(data.token_ids)}, [data]).get(), data.req_id)
        while len(tokens) < count:
            tokens += token_of(self.step({data.req_id: 1}).get(), data.req_id)
        return tokens


def token_of(output: ModelRunnerOutput, req_id: str) -> list[int]:
    return output.sampled_token_ids[output.req_ids.index(req_id)]


@pytest.fixture
def runner(folder: Path) -> Runner:
    return Runner(folder)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Sampled tokens come from the device only once the list says so."""
    arrived = [False]
    monkeypatch.setattr(SampledTokens, "ready", lambda self: arrived[0])
    return arrived


PROMPT, OTHER = [5, 6, 7], [9, 8, 7, 6, 5, 4]


class NanRow:
    """The runner's way to run a step, but one row of logits is no numbers; it notes all ids."""

    def __init__(self, steps: model_runner.StepRunner, row: int) -> None:
        self.steps, self.row, self.ids = steps, row, np.empty(0, np.int64)
        self.buffers, self.put_tokens = steps.buffers, steps.put_tokens

    def run(self, inputs, buffers, params):
        self.ids = np.append(self.ids, inputs.input_ids)
        hidden, logits, tokens = self.steps.run(inputs, buffers, params)
        logits[self.row :][:1] = torch.nan
        return hidden, logits, tokens


@pytest.mark.parametrize("late_tokens", [False, True])
def test_logits_that_are_no_numbers_fail_their_request_only(
    folder: Path, late: list[bool], late_tokens: bool
) -> None:
    """Steps that were scheduled before that was known compute on, with ids that there are."""
    late[0] = True
    alone = Runner(folder)
    expected = alone.generate(alone.new("b", OTHER), 3)

    runner = Runner(folder)
    runner.runner.steps = steps = NanRow(runner.runner.steps, 0)
    late[0] = not late_tokens
    outputs = [runner.step({"a": 3, "b": 6}, [runner.new("a", PROMPT), runner.new("b", OTHER)])]
    late[0] = True
    # Before this one samples, the tokens that have come are taken in. (On a GPU the next step could
    # be one of the same requests, and would read their tokens there.)
    steps.row = 1
    outputs.append(runner.step({"c": 3}, [runner.new("c", PROMPT)]))
    steps.row = 0
    outputs += [runner.step({"a": 1, "b": 1}), runner.step({"a": 1, "b": 1})]
    first, other, *rest = [output.get() for output in outputs]
    assert other.errors == {}
    for output in (first, *rest):
        assert output.errors == {"a": NOT_FINITE}
        assert token_of(output, "a") == []
    assert [token_of(output, "b")[0] for output in (first, *rest)] == expected
    assert ((steps.ids >= 0) & (steps.ids < VOCAB)).all()


def test_a_late_token_of_an_ended_request_is_not_the_next_one_s(
    folder: Path, late: list[bool]
) -> None:
    """Neither among its tokens nor among those that its penalties count."""
    penalised = core_params(VOCAB, temperature=0.0, presence_penalty=2.0)
    late[0] = True
    alone = Runner(folder)
    [ended] = alone.generate(alone.new("a", PROMPT), 1)
    prompts = [[*PROMPT, (ended + 1) % VOCAB, 11, 12], PROMPT]
    for prompt in prompts:
        alone = Runner(folder)
        expected = alone.generate(alone.new("b", prompt, penalised), 3)
        runner = Runner(folder)
        late[0] = False
        runner.step({"a": 3}, [runner.new("a", PROMPT)])  # its token would be at place 3
        new = [runner.new("b", prompt, penalised)]
        runner.step({"b": 2}, new, finished=["a"])
        assert runner.runner.batch.row_of == {"b": 0}
        late[0] = True
        output = runner.step({"b": 1, "c": 4}, [runner.new("c", [3, 3, 4, 4])]).get()
        left = len(prompt) - 3
        if left:
            output = runner.step({"b": left}).get()
        tokens = token_of(output, "b")
        while len(tokens) < 3:
            tokens += token_of(runner.step({"b": 1}).get(), "b")
        assert tokens == expected


def test_the_first_token_of_the_vocabulary_is_no_failure(runner: Runner, late: list[bool]) -> None:
    zero = core_params(VOCAB, temperature=0.0, logit_bias={0: 100.0})
    late[0] = True
    output = runner.step({"a": 3, "b": 6}, [runner.new("a", PROMPT, zero), runner.new("b", OTHER)])
    assert token_of(output.get(), "a") == [0]
    assert output.get().errors == {}


def test_an_id_that_comes_again_has_only_what_it_asks_for(runner: Runner) -> None:
    """As a request does that was preempted, or a client's next one."""
    asking = core_params(VOCAB, temperature=0.0, prompt_logprobs=2, logprobs=1)
    first = runner.step({"a": 3}, [runner.new("a", PROMPT, asking)]).get()
    assert first.prompt_logprobs["a"].num_rows == 2
    assert set(first.logprobs) == {"a"}
    again = runner.step({"a": 6}, [runner.new("a", OTHER)], finished=["a"]).get()
    assert again.prompt_logprobs == {}
    assert again.logprobs == {}
    [token] = token_of(first, "a")
    biased = core_params(VOCAB, temperature=0.0, logit_bias={(token + 1) % VOCAB: 100.0})
    for params, expected in ((biased, (token + 1) % VOCAB), (GREEDY, token)):
        new = [runner.new("a", PROMPT, params)]
        assert token_of(runner.step({"a": 3}, new, finished=["a"]).get(), "a") == [expected]


LONG = [3 + 7 * i % 90 for i in range(19)]


def test_prompt_logprobs_are_the_same_in_chunks(folder: Path) -> None:
    params = core_params(VOCAB, temperature=0.0, prompt_logprobs=2)
    whole = Runner(folder)
    expected = whole.step({"a": 19}, [whole.new("a", LONG, params)]).get().prompt_logprobs["a"]
    token_ids, logprobs, ranks = unpack_logprobs(expected)
    assert [ids[0] for ids in token_ids] == LONG[1:]
    assert {len(ids) for ids in token_ids} == {3}
    assert len(logprobs) == len(ranks) == 18
    runner = Runner(folder)
    new = [runner.new("a", LONG, params)]
    parts = [runner.step({"a": 8, "b": 3}, [*new, runner.new("b", PROMPT)]).get()]
    parts += [runner.step({"b": 1, "a": count}).get() for count in (1, 9)]
    parts.append(runner.step({"a": 1, "b": 1}).get())
    lists = [output.prompt_logprobs.get("a") for output in parts]
    assert lists[-2] is not None
    assert [part.num_rows for part in lists[:-2] if part] == [8, 1]
    assert lists[-2].num_rows == 9
    # One token of the prompt is left over for the last chunk, whose logits choose the next token.
    assert lists[-1] is None
    for name in ("token_ids", "ranks", "logprobs"):
        joined = b"".join(getattr(part, name) for part in lists if part)
        assert joined == getattr(expected, name)
    assert not any("b" in output.prompt_logprobs for output in parts)


def test_blocks_come_as_they_are_needed(folder: Path) -> None:
    whole, runner = Runner(folder), Runner(folder)
    expected = whole.generate(whole.new("a", LONG), 8)
    data = runner.new("a", LONG)
    data.block_ids = [[7]]
    output = runner.step({"a": 8}, [data])
    assert output.ready()
    assert (output.get().req_ids, output.get().sampled_token_ids) == (["a"], [[]])
    runner.step({"a": 4}, more_blocks={"a": [2, 11]})
    tokens = token_of(runner.step({"a": 7}).get(), "a")
    while len(tokens) < 8:
        more = {"a": [5]} if runner.computed["a"] == 24 else None
        tokens += token_of(runner.step({"a": 1}, more_blocks=more).get(), "a")
    assert tokens == expected


def test_copied_blocks_hold_what_was_computed(folder: Path) -> None:
    whole, runner = Runner(folder), Runner(folder)
    expected = whole.generate(whole.new("a", LONG), 3)
    runner.step({"a": 19}, [runner.new("a", LONG)])  # blocks 1 to 5
    data = runner.new("b", LONG)  # blocks 6 to 10
    data.num_computed_tokens = runner.computed["b"] = 18
    tokens = token_of(
        runner.step({"b": 1}, [data], finished=["a"], copies=[(1, 6), (2, 7), (3, 8)]).get(), "b"
    )
    while len(tokens) < 3:
        tokens += token_of(runner.step({"b": 1}).get(), "b")
    assert tokens == expected


def test_parameters_that_cannot_be_used_fail_their_request_once(runner: Runner) -> None:
    bad = msgspec.structs.replace(GREEDY, bad_words=BadWordsTokenIds(b"12345678", b"123"))
    new = [runner.new("bad", PROMPT, bad), runner.new("b", OTHER)]
    first = runner.step({"bad": 2, "b": 6}, new).get()
    assert set(first.errors) == {"bad"}
    assert "its sampling parameters cannot be used" in first.errors["bad"]
    assert len(token_of(first, "b")) == 1
    second = runner.step({"bad": 1, "b": 1}).get()
    assert second.errors == {}, "it has been told"
    assert len(token_of(second, "b")) == 1
    assert runner.step({}, finished=["bad", "b"]).get().req_ids == []


def test_steps_are_captured_unless_eager_is_enforced(folder: Path) -> None:
    captured, eager = Runner(folder), Runner(folder, enforce_eager=True)
    assert isinstance(captured.runner.steps, CapturedSteps)
    assert isinstance(eager.runner.steps, EagerSteps)
    assert captured.generate(captured.new("a", LONG), 4) == eager.generate(eager.new("a", LONG), 4)
