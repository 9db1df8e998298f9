"""Model runner on a tiny Llama: a request must not affect another's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.kernels.base import Arrived
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import (
    BadWordsTokenIds,
    CoreSamplingParams,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
)
from octavo.models.registry import read_spec
from octavo.plan.setup import WorkerSetup
from octavo.platforms.cpu import CPUPlatform
from octavo.sampling.sampler import NOT_FINITE
from octavo.worker import model_runner
from octavo.worker.graphs import CapturedSteps, EagerSteps
from octavo.worker.model_runner import ModelRunner
from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import make_hf
from tests.params import core_params, unpack_logprobs
from tests.triton import needs_triton

BLOCK_SIZE, BLOCKS, MAX_LEN, MAX_REQS, MAX_DRAFTS = 8, 5, 40, 3, 4
GREEDY = core_params(VOCAB, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder_of(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the model of a kind: one layer if it is interpreted."""
    architecture, config = CASES["llama"]
    shallow = tmp_path_factory.mktemp("shallow")
    make_hf(architecture, **config | {"num_hidden_layers": 1}).save_pretrained(shallow)
    return lambda kind: shallow if kind == "triton" else folder


class GivenDrafts(Proposer):
    """Proposer of the test's drafts."""

    drafts: dict[str, list[int]]

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        batch = self.target.batch
        owner = {row: req_id for req_id, row in batch.row_of.items()}
        for row in rows.tolist():
            assert batch.num_computed_tokens[row] == batch.num_tokens[row] - 1
        return Proposal([self.drafts[owner[row]] for row in rows.tolist()])


class Runner:
    """Model runner whose requests have separate blocks, all allocated at the start."""

    def __init__(self, folder: Path, **settings: object) -> None:
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": MAX_DRAFTS}
        config = EngineConfig.from_kwargs(model=str(folder), max_num_seqs=MAX_REQS, **settings)
        spec = read_spec(open_checkpoint(folder))
        setup = WorkerSetup(
            *(config, spec, folder, "float32", MAX_LEN, 2 * MAX_LEN),
            kept_layers=(0, len(spec.layers) - 1),
        )
        platform = CPUPlatform()
        budget = platform.estimate_memory(setup)
        assert budget is not None
        setup = replace(setup, scratches=budget.scratches)
        self.runner = ModelRunner(setup, platform, "cpu", self._make_proposer)
        kv = KVCacheConfig(4 * BLOCKS + 1, BLOCK_SIZE, make_kv_cache_groups(spec.caches))
        self.runner.initialize_kv_cache(kv)
        self._first_block = 1

    def _make_proposer(self, target: Target) -> Proposer:
        self.proposer = GivenDrafts(target)
        return self.proposer

    def new(
        self,
        req_id: str,
        token_ids: Sequence[int],
        params: CoreSamplingParams = GREEDY,
        *,
        block_ids: list[int] | None = None,
        computed: int = 0,
    ) -> ScheduledRequest:
        """Return a request's first part, whose number of tokens `step` sets."""
        blocks = list(range(self._first_block, self._first_block + BLOCKS))
        self._first_block += BLOCKS
        data = NewRequestData(list(token_ids), len(token_ids), params, computed)
        return ScheduledRequest(req_id, 0, [block_ids or blocks], new=data)

    def step(
        self,
        counts: dict[str, int],
        new: Sequence[ScheduledRequest] = (),
        finished: Sequence[str] = (),
        more_blocks: dict[str, list[int]] | None = None,
        copies: Sequence[tuple[int, int]] = (),
        drafts: dict[str, list[int]] | None = None,
        grammar: GrammarOutput | None = None,
    ) -> model_runner.PendingOutput:
        """Run a step of the given numbers of tokens, and their drafts."""
        blocks = {req_id: [ids] for req_id, ids in (more_blocks or {}).items()}
        drafts, first = drafts or {}, {request.req_id: request for request in new}
        scheduled = []
        for req_id, count in counts.items():
            request = first.get(req_id) or ScheduledRequest(req_id, 0, blocks.get(req_id))
            if count == 1:  # a place more than drafts
                request.num_drafts = len(drafts.get(req_id, [])) + (req_id in drafts)
            request.num_tokens = count + request.num_drafts
            request.has_grammar = grammar is not None and req_id in grammar.req_ids
            scheduled.append(request)
        work = SchedulerOutput(
            scheduled_reqs=scheduled,
            total_num_scheduled_tokens=sum(request.num_tokens for request in scheduled),
            finished_req_ids=list(finished),
            blocks_to_copy=list(copies),
        )
        self.proposer.drafts = drafts
        self.runner.execute_model(work)
        if scheduled:
            assert self.runner._step is not None
            self.result = self.runner._step.result
        return self.runner.sample_tokens(grammar)

    def generate(self, request: ScheduledRequest, count: int) -> list[int]:
        """Return the tokens of a request that runs alone."""
        assert request.new is not None
        req_id = request.req_id
        tokens = token_of(self.step({req_id: len(request.new.token_ids)}, [request]).get(), req_id)
        while len(tokens) < count:
            tokens += token_of(self.step({req_id: 1}).get(), req_id)
        return tokens


def token_of(output: ModelRunnerOutput, req_id: str) -> list[int]:
    return output.sampled_token_ids[output.req_ids.index(req_id)]


@pytest.fixture
def runner(folder: Path) -> Runner:
    return Runner(folder)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list; sampled tokens arrive from the device only once it contains True."""
    arrived = [False]
    monkeypatch.setattr(Arrived, "ready", lambda self: arrived[0])
    return arrived


PROMPT, OTHER = [5, 6, 7], [9, 8, 7, 6, 5, 4]


class NanRow:
    """Way to run a step where one row of logits is NaN; it notes all ids."""

    def __init__(self, steps: model_runner.StepRunner, row: int) -> None:
        self.steps, self.row, self.ids = steps, row, np.empty(0, np.int64)
        self.buffers, self.put_tokens = steps.buffers, steps.put_tokens

    def run(self, inputs, params):
        self.ids = np.append(self.ids, inputs.table.first(inputs.size).input_ids)
        result = self.steps.run(inputs, params)
        result.logits[self.row :][:1].numpy()[...] = np.nan
        return result


@pytest.mark.parametrize("late_tokens", [False, True])
def test_logits_that_are_no_numbers_fail_their_request_only(
    folder: Path, late: list[bool], late_tokens: bool
) -> None:
    """Steps that were scheduled before that was known continue to compute, with valid ids."""
    late[0] = True
    alone = Runner(folder)
    expected = alone.generate(alone.new("b", OTHER), 3)

    runner = Runner(folder)
    runner.runner.state.steps = steps = NanRow(runner.runner.state.steps, 0)
    late[0] = not late_tokens
    outputs = [runner.step({"a": 3, "b": 6}, [runner.new("a", PROMPT), runner.new("b", OTHER)])]
    late[0] = True
    # Before this one samples, the arrived tokens are processed. (On a GPU the next step could be
    # one of the same requests, and would read their tokens there.)
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
    """It is not among the tokens of the next one, nor counted by its penalties."""
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
        assert runner.runner.state.batch.row_of == {"b": 0}
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
    """A preempted request, or a client's next one, does so."""
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
    output = runner.step({"a": 8}, [runner.new("a", LONG, block_ids=[7])])
    assert output.ready()
    assert (output.get().req_ids, output.get().sampled_token_ids) == (["a"], [[]])
    runner.step({"a": 4}, more_blocks={"a": [2, 11]})
    tokens = token_of(runner.step({"a": 7}).get(), "a")
    while len(tokens) < 8:
        more = {"a": [5]} if len(LONG) + len(tokens) == 25 else None
        tokens += token_of(runner.step({"a": 1}, more_blocks=more).get(), "a")
    assert tokens == expected


def test_copied_blocks_hold_what_was_computed(folder: Path) -> None:
    whole, runner = Runner(folder), Runner(folder)
    expected = whole.generate(whole.new("a", LONG), 3)
    runner.step({"a": 19}, [runner.new("a", LONG)])  # blocks 1 to 5
    data = runner.new("b", LONG, computed=18)  # blocks 6 to 10
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
    assert isinstance(captured.runner.state.steps, CapturedSteps)
    assert isinstance(eager.runner.state.steps, EagerSteps)
    assert captured.generate(captured.new("a", LONG), 4) == eager.generate(eager.new("a", LONG), 4)


KINDS: dict[str, dict[str, object]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "reference": {"attention_backend": "reference"},
    "triton": {"attention_backend": "triton", "batch_invariant": True},
}
KIND = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_triton if kind == "triton" else ()) for kind in KINDS]
)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)

    def packed(self) -> LogprobsLists:
        lists = LogprobsLists.join(self.logprobs)
        return lists.select(0, lists.num_rows)


def answer_three(
    runner: Runner,
    draft: Callable[[str, int], list[int]] = lambda *_: [],
    num_tokens: int = 12,
) -> tuple[dict[str, Answer], int]:
    """Return greedy and sampled answers, and one with penalties whose prompt is in chunks.

    Args:
        runner: a runner without requests.
        draft: returns drafts for a request with the given number of tokens.
        num_tokens: number of tokens of each answer.

    Returns:
        The answers, and their number of steps.
    """
    sampled = {"temperature": 1.0, "top_p": 0.95, "min_tokens": 5, "all_stop_token_ids": [7, 9]}
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.7}
    requests = {
        "a": (PROMPT, core_params(VOCAB, temperature=0.0, logprobs=2)),
        "b": (OTHER, core_params(VOCAB, seed=5, **sampled)),
        "c": (LONG[:11], core_params(VOCAB, seed=6, logprobs=1, **sampled, **penalties)),
    }
    new = {req_id: runner.new(req_id, *request) for req_id, request in requests.items()}
    answers = {req_id: Answer() for req_id in requests}
    chunks = {"a": [3], "b": [6], "c": [5, 6]}
    steps = 0
    while any(len(answer.tokens) < num_tokens for answer in answers.values()):
        steps += 1
        counts, drafts = {}, {}
        for req_id in "abc" if steps > 1 else "ab":
            left = num_tokens - len(answers[req_id].tokens)
            if chunks[req_id]:
                counts[req_id] = chunks[req_id].pop(0)
            elif left:
                counts[req_id] = 1
                drafts[req_id] = draft(req_id, len(answers[req_id].tokens))[: left - 1]
        output = runner.step(
            counts, [new.pop(req_id) for req_id in counts if req_id in new], drafts=drafts
        ).get()
        assert output.errors == {}
        for req_id in counts:
            answers[req_id].tokens += token_of(output, req_id)
            if req_id in output.logprobs:
                lists = output.logprobs[req_id]
                assert lists.num_rows == len(token_of(output, req_id))
                answers[req_id].logprobs.append(lists)
    return answers, steps


# Interpreted, answers take seconds: there drafts are right and wrong within one.
WRONG = [(kind, w) for kind in ("captured", "eager", "reference") for w in (0.0, 0.3, 1.0)]
WRONG += [pytest.param("triton", 0.3, marks=needs_triton)]


@pytest.mark.parametrize(("kind", "wrong"), WRONG)
def test_drafts_change_nothing_but_the_number_of_steps(
    folder_of: Callable[[str], Path], kind: str, wrong: float
) -> None:
    """Bit for bit, except the reference, which adds in another order for more tokens."""
    num_tokens, folder = 7 if kind == "triton" else 12, folder_of(kind)
    expected, many = answer_three(Runner(folder, **KINDS[kind]), num_tokens=num_tokens)
    assert len({tuple(answer.tokens) for answer in expected.values()}) == 3
    rng = np.random.default_rng(3)

    def draft(req_id: str, done: int) -> list[int]:
        right = expected[req_id].tokens[done : done + int(rng.integers(1, MAX_DRAFTS + 1))]
        return [(token + 1) % VOCAB if rng.random() < wrong else token for token in right]

    answers, steps = answer_three(Runner(folder, **KINDS[kind]), draft, num_tokens)
    for req_id, answer in expected.items():
        assert answers[req_id].tokens == answer.tokens
        if kind != "reference":
            assert answers[req_id].packed() == answer.packed()
    assert len(expected["a"].logprobs) == num_tokens
    assert steps == many if wrong == 1.0 else steps < many


def test_what_fails_behind_a_draft_fails_in_a_step_of_its_own(folder: Path) -> None:
    """The tokens before it are delivered, as they are without drafts."""
    alone = Runner(folder)
    expected = alone.generate(alone.new("a", PROMPT), 4)
    runner = Runner(folder)
    runner.step({"a": 3, "b": 6}, [runner.new("a", PROMPT), runner.new("b", OTHER)])
    steps = runner.runner.state.steps
    runner.runner.state.steps = NanRow(steps, 2)
    output = runner.step({"a": 1, "b": 1}, drafts={"a": expected[1:]}).get()
    assert output.errors == {}
    assert token_of(output, "a") == expected[1:3]
    runner.runner.state.steps = NanRow(steps, 0)
    output = runner.step({"a": 1, "b": 1}, drafts={"a": expected[3:]}).get()
    assert output.errors == {"a": NOT_FINITE}
    assert token_of(output, "a") == []
    assert len(token_of(output, "b")) == 1


@KIND
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_a_grammar_holds_for_each_position(
    folder_of: Callable[[str], Path], kind: str, penalty: float
) -> None:
    runner = Runner(folder_of(kind), **KINDS[kind])
    params = core_params(VOCAB, temperature=0.0, repetition_penalty=penalty)
    wanted = [41, 7, 33, 9, 60, 2]

    def allow(req_ids: list[str], tokens: list[int]) -> GrammarOutput:
        words = np.zeros((len(tokens), -(-VOCAB // 32)), np.uint32)
        for row, token in zip(words, tokens, strict=True):
            row[token // 32] = 1 << token % 32
        return GrammarOutput(req_ids, words.tobytes())

    new = [runner.new(req_id, PROMPT, params) for req_id in "ab"]
    first = runner.step({"b": 3, "a": 3}, new, grammar=allow(["a"], wanted[:1])).get()
    assert token_of(first, "a") == wanted[:1]
    assert token_of(first, "b") != wanted[:1]
    drafts = {"a": [7, 33, 8], "b": [1]}
    output = runner.step({"b": 1, "a": 1}, drafts=drafts, grammar=allow(["a"], wanted[1:5])).get()
    assert token_of(output, "a") == wanted[1:4]
    output = runner.step({"a": 1, "b": 1}, grammar=allow(["a"], wanted[4:5])).get()
    assert token_of(output, "a") == wanted[4:5]


@KIND
def test_hidden_states_of_layers_are_kept(folder: Path, kind: str) -> None:
    runner, reference = Runner(folder, **KINDS[kind]), Runner(folder, enforce_eager=True)
    for counts, drafts in (({"a": 3, "b": 4}, {}), ({"b": 2}, {}), ({"b": 1, "a": 1}, {"a": [5]})):
        kept = []
        for each in (runner, reference):
            first = not each.runner.state.batch.row_of
            new = [each.new("a", PROMPT), each.new("b", OTHER)] if first else []
            each.step(counts, new, drafts=drafts)
            result, model = each.result, each.runner.model
            assert list(result.kept) == [0, len(model.spec.layers) - 1]
            normed = model.norm(result.kept[len(model.spec.layers) - 1])
            to_host = each.runner.ops.to_host
            np.testing.assert_allclose(to_host(normed), to_host(result.hidden), 1e-3, 1e-4)
            kept.append([to_host(hidden).copy() for hidden in result.kept.values()])
        for one, other in zip(*kept, strict=True):
            assert len(one) == sum(counts.values()) + len(drafts)
            np.testing.assert_allclose(one, other, 1e-3, 1e-4)
