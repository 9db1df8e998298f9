"""Ranks with parts of layers and of all layers: one engine's answers, bit for bit."""

import json
import os
import random
import signal
import threading
import time
from functools import partial
from itertools import pairwise

import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, EngineDeadError, SleepError
from octavo.platforms.cpu import WORKER_RUNTIME_NBYTES
from octavo.sampling_params import StructuredOutputsParams
from octavo.scheduler.speculation import DraftLengths
from tests.e2e import harness
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import make_hf
from tests.ranks import use_ranks

SETTINGS = {
    "skip_tokenizer_init": True,
    "block_size": 8,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
}


@pytest.fixture
def in_ranks(monkeypatch):
    """Run every later engine in the given number of ranks."""
    return partial(use_ranks, monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma2")
    architecture, config = CASES["gemma2"]
    make_hf(architecture, **config).save_pretrained(folder)
    return folder


def load(seed, count):
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(30)]
    prompts, params = [], []
    for i in range(count):
        begin = shared[: rng.choice([0, 9, 30])]
        prompts.append([*begin, *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40)))])
        params.append(
            SamplingParams(
                temperature=rng.choice([0.0, 0.8, 1.5]),
                top_p=rng.choice([1.0, 0.9]),
                seed=i,
                max_tokens=rng.randrange(1, 24),
                ignore_eos=True,
                logprobs=rng.choice([None, 3]),
                prompt_logprobs=rng.choice([None, None, 2]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                n=rng.choice([1, 1, 2]),
            )
        )
    return prompts, params


def answers(llm, seed=1, count=24):
    prompts, params = load(seed, count)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [
        (
            o.prompt_logprobs and list(map(str, o.prompt_logprobs)),
            [(list(a.token_ids), a.logprobs and list(map(str, a.logprobs))) for a in o.outputs],
        )
        for o in outputs
    ]


ROWS = (2, 2, None, "exact", True)


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        ({}, [(2, 1), (1, 2), (2, 2), ROWS]),
        ({"async_scheduling": False, "enforce_eager": True}, [(1, 2), ROWS]),
        # The number of blocks is too small for all: requests are preempted.
        ({"num_gpu_blocks_override": 28}, [(2, 1), (1, 2)]),
        ({"attention_backend": "reference", "enable_prefix_caching": False}, [(2, 1)]),
        ({"kv_cache_dtype": "int8", "quantization": "int4", "dtype": "bfloat16"}, [(2, 2)]),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
            [(2, 2), ROWS],
        ),
        ({"speculative_config": {"method": "suffix"}}, [(1, 2)]),
        ({}, [(1, 2, "1,2"), (1, 3, "1,1,1")]),
    ],
    ids=["plain", "eager", "preempted", "reference", "quantized", "ngram", "suffix", "uneven"],
)
def test_several_ranks_answer_as_one(settings, layouts, folder, in_ranks):
    settings = SETTINGS | settings
    with LLM(str(folder), **settings) as llm:
        expected = answers(llm)
    for layout in layouts:
        in_ranks(*layout)
        with LLM(str(folder), **settings) as llm:
            assert answers(llm) == expected, layout
            llm.llm_engine.client.core.check_integrity()


@pytest.mark.parametrize(
    "case",
    [
        *("llama", "gpt2", "bloom", "opt-350m", "gemma4", "gemma3n"),
        *("nemotron-h", "rwkv7"),  # layers without a cache, or with several
        "deepseek-v3",
    ],
)
def test_parts_of_layers_of_other_models(case, tmp_path, in_ranks):
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    settings = SETTINGS | {"max_model_len": 64, "dtype": "bfloat16"}
    with LLM(str(tmp_path), **settings) as llm:
        expected = answers(llm, count=6)
    in_ranks(2, 2)
    with LLM(str(tmp_path), **settings) as llm:
        assert answers(llm, count=6) == expected


@pytest.mark.parametrize(
    ("layout", "more"), [((1, 2), {}), ((2, 2), {"speculative_config": {"method": "ngram"}})]
)
def test_structured_outputs_in_ranks(layout, more, in_ranks):
    """Grammars force drafts, which one rank proposes and another one checks."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [100, 200]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = [
        SamplingParams(
            temperature=0.9,
            seed=i,
            max_tokens=60,
            structured_outputs=StructuredOutputsParams(json=schema) if i % 3 else None,
        )
        for i in range(6)
    ]
    prompts = [f"Once upon a time {i}" for i in range(6)]
    settings = {"max_model_len": 128, "max_num_seqs": 4} | more
    with LLM("octavo/stories", **settings) as llm:
        expected = [it.outputs[0].text for it in llm.generate(prompts, params, use_tqdm=False)]
    in_ranks(*layout)
    with LLM("octavo/stories", **settings) as llm:
        got = [it.outputs[0].text for it in llm.generate(prompts, params, use_tqdm=False)]
    assert got == expected
    assert all(json.loads(text) for text in (got[1], got[2]))


@pytest.mark.parametrize(("stages", "splits_rows"), [(1, False), (2, True)])
def test_sums_over_ranks_do_not_depend_on_the_load(stages, splits_rows, folder, in_ranks):
    """The most probable token does not change either."""
    prompts = [{"prompt_token_ids": ids} for ids in load(5, 12)[0]]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(folder), **SETTINGS) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
    in_ranks(2, stages, None, "reduce", splits_rows)
    with LLM(str(folder), **SETTINGS) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
        assert got == expected
        crowded = answers(llm)
    with LLM(str(folder), **SETTINGS | {"max_num_seqs": 2, "enable_prefix_caching": False}) as llm:
        assert answers(llm) == crowded


def test_steps_of_different_requests_are_in_the_stages_at_once(folder, in_ranks):
    in_ranks(1, 2)
    with LLM(str(folder), **SETTINGS) as llm:
        core = llm.llm_engine.client.core
        steps, schedule = [], core.scheduler.schedule

        def note():
            output = schedule()
            steps.append({r.req_id for r in output.scheduled_reqs})
            return output

        core.scheduler.schedule = note
        prompts = [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(6)]
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    middle = [step for step in steps if step][4:-4]
    assert len(middle) > 20
    assert all(len(step) == 3 for step in middle)
    assert all(not one & next_ for one, next_ in pairwise(middle))


def test_ranks_with_more_heads_than_others(tmp_path, in_ranks):
    """OLMo 2 norms the queries of all ranks together."""
    architecture, config = CASES["olmo2"]
    config = config | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
    make_hf(architecture, **config).save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected, alone = answers(llm, count=8), llm.llm_engine.memory_plan
    in_ranks(2)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        assert answers(llm, count=8) == expected
        plan, caches = llm.llm_engine.memory_plan, cache_nbytes(llm)
    assert plan.block_nbytes == alone.block_nbytes
    assert sum(caches) == plan.kv_cache
    assert caches[0] == 2 * caches[1]


def cache_nbytes(llm):
    """Return the bytes of each rank's KV cache."""
    ranks = llm.llm_engine.client.core.executor.ranks
    return [sum(t.nbytes for t in rank._worker.runner.state.kv_tensors) for rank in ranks]


def test_the_plan_counts_all_ranks(folder, in_ranks):
    with LLM(str(folder), **SETTINGS) as llm:
        alone = llm.llm_engine.memory_plan
    in_ranks(2)
    with LLM(str(folder), **SETTINGS) as llm:
        plan = llm.llm_engine.memory_plan
        caches = cache_nbytes(llm)
    assert plan.nbytes("runtime") == alone.nbytes("runtime") + 2 * WORKER_RUNTIME_NBYTES
    # Norms and embedding twice.
    assert 1 < plan.nbytes("weights") / alone.nbytes("weights") < 2
    assert (plan.num_blocks, plan.block_nbytes) == (alone.num_blocks, alone.block_nbytes)
    assert sum(caches) == plan.kv_cache


def test_the_plan_counts_all_stages(folder, in_ranks):
    with LLM(str(folder), **SETTINGS) as llm:
        alone = llm.llm_engine.memory_plan
    in_ranks(1, 2)
    with LLM(str(folder), **SETTINGS) as llm:
        plan = llm.llm_engine.memory_plan
        ranks = llm.llm_engine.client.core.executor.ranks
        caches = cache_nbytes(llm)
        weights = [rank._worker.runner._weights[0].nbytes for rank in ranks]
    assert sum(caches) == plan.kv_cache
    assert 0.9 < plan.nbytes("weights") / sum(weights) < 1.1  # next to the tables of positions
    # The tied table twice.
    assert 1 < plan.nbytes("weights") / alone.nbytes("weights") < 2


@pytest.mark.parametrize(("size", "stages", "broken"), [(2, 1, 1), (1, 2, 0), (1, 2, 1), (2, 2, 3)])
def test_a_failed_rank_ends_the_engine(size, stages, broken, folder, in_ranks):
    in_ranks(size, stages)
    with LLM(str(folder), **SETTINGS) as llm:
        answers(llm, count=1)
        runner = llm.llm_engine.client.core.executor.ranks[broken]._worker.runner
        runner.state.steps.run = partial(int, "broken")
        with pytest.raises(EngineDeadError, match="group"):
            answers(llm, count=1)


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_in_processes(layout, folder):
    settings = SETTINGS | {"num_threads": 1, "dtype": "bfloat16"}
    with LLM(str(folder), **settings) as llm:
        expected = answers(llm)
    with LLM(str(folder), **settings, **{layout: 2}) as llm:
        assert answers(llm) == expected
        executor = llm.llm_engine.client.core.executor
        os.kill(executor.pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"worker 1 .* was killed by SIGKILL"):
            answers(llm)
        assert time.monotonic() - started < 60


@pytest.mark.parametrize("layout", ["pipeline_parallel_size"])
def test_workers_end_in_order_though_steps_are_in_flight(layout, folder):
    with LLM(str(folder), **SETTINGS, num_threads=1, **{layout: 2}) as llm:
        engine = llm.llm_engine
        for i in range(4):
            params = SamplingParams(max_tokens=50, ignore_eos=True)
            engine.add_request(str(i), {"prompt_token_ids": [5, 6, 7]}, params)
        for _ in range(8):
            engine.step()
        workers = engine.client.core.executor._group.workers
    assert [worker.process.returncode for worker in workers] == [0, 0]


def test_streams_outlive_a_stage(tmp_path):
    """The stage that samples dies: another engine continues. The chaos test kills other ranks."""
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "seed": 1}
    flags = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M", "--num-threads", "1"]
    with harness.serve(tmp_path, "-pp", "2", *flags, spare=True) as server:
        expected = server.post("/v1/completions", body).json()["choices"]
        workers = server.engine_process().children()
        assert len(workers) == 2
        timer = threading.Timer(0.1, workers[1].kill)
        timer.start()
        assert server.post("/v1/completions", body).json()["choices"] == expected
        timer.join()
        server.wait_for_metric("octavo:engine_restarts_total", 1)
        harness.wait_for(server, "/ready")
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        _, left = psutil.wait_procs(family, timeout=60)
        assert left == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-tp", "99"], r"--tensor-parallel-size=99 is more than the \d+ attention heads"),
        (
            ["-pp", "2", "--pipeline-layers", "1,1"],
            "--pipeline-layers='1,1' has 2 stages with 2 la",
        ),
        (["-pp", "3", "--pipeline-layers", "1,1"], "--pipeline-layers='1,1' is for 2 stages, and"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_server_listens(flags, said, tmp_path):
    with pytest.raises(AssertionError, match=said), harness.serve(tmp_path, *flags):
        pass
    assert "loading" not in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=false"),
        ({"speculative_config": {"model": "octavo/stories-draft"}}, "no draft model"),
    ],
)
def test_what_stages_cannot_do_is_refused(settings, said, in_ranks):
    in_ranks(1, 2)
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size=2 needs {said}"):
        LLM(**settings)


TEXTS = ["Lily had a red ball. She put the red ball in", "Tom", "The dog saw a cat. " * 9]
STORIES = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 24}


def stories(llm, prompts=TEXTS):
    params = [SamplingParams(temperature=t, seed=4, max_tokens=16, logprobs=2) for t in (0, 0.9)]
    outputs = [o for p in params for o in llm.generate(prompts, p, use_tqdm=False)]
    return [(o.outputs[0].token_ids, str(o.outputs[0].logprobs)) for o in outputs]


@pytest.mark.parametrize(
    ("draft", "acceptance"),
    [("draft", "exact"), ("medusa", "exact"), ("eagle", "exact"), ("draft", "rejection")],
)
def test_rank_0_drafts(draft, acceptance, in_ranks, monkeypatch):
    """Rejection sampling keeps a draft by its probability: the drafts are the same ones, too."""
    # The maximum: the best number depends on the drafts' time.
    monkeypatch.setattr(DraftLengths, "choose", lambda self, num_reqs: self.most)
    speculative = {"model": f"octavo/stories-{draft}", "acceptance": acceptance}
    settings = STORIES | {"speculative_config": speculative}
    with LLM(**settings) as llm:
        expected, accepted = stories(llm), llm.stats().num_accepted_tokens_per_pos
        plan = llm.llm_engine.memory_plan
    in_ranks(2)
    with LLM(**settings) as llm:
        assert stories(llm) == expected
        assert list(llm.stats().num_accepted_tokens_per_pos) == list(accepted)
        assert sum(accepted)
        ranks = llm.llm_engine.client.core.executor.ranks
        runners = [rank._worker.runner for rank in ranks]
        # EAGLE also has the target's LM head.
        assert [len(runner._weights) for runner in runners] == [2 + (draft == "eagle"), 1]
        drafting = llm.llm_engine.memory_plan
        assert drafting.block_nbytes == plan.block_nbytes
        of_draft = sum(weights.nbytes for weights in runners[0]._weights[1:])
        assert plan.nbytes("draft model") <= drafting.nbytes("draft model")
        assert of_draft <= drafting.nbytes("draft model")


@pytest.mark.parametrize(
    ("layout", "method"), [((2,), {"model": "octavo/stories-eagle"}), ((2, 2), {"method": "ngram"})]
)
def test_ranks_sleep_and_wake_up(layout, method, in_ranks, monkeypatch):
    settings = STORIES | {"enable_sleep_mode": True, "speculative_config": method}
    with LLM(**settings) as llm:
        expected = stories(llm)
    in_ranks(*layout)
    with LLM(**settings) as llm:
        assert stories(llm) == expected
        runners = [rank._worker.runner for rank in llm.llm_engine.client.core.executor.ranks]
        for level in (1, 2):
            llm.sleep(level)
            assert not any(c.numpy().any() for runner in runners for c in runner._caches)
            each = [runner.memory_to_reload()[0] for runner in runners]
            with monkeypatch.context() as patch:  # enough for each rank, but not for both
                free = 2**40, sum(each) - 1
                patch.setattr("octavo.worker.model_runner.cpu_memory", lambda node, free=free: free)
                with pytest.raises(SleepError, match="free some"):
                    llm.wake_up()
            assert [runner.memory_to_reload()[0] for runner in runners] == each
            assert llm.wake_up()
            assert stories(llm) == expected


def test_embeddings_as_prompts(in_ranks):
    settings = STORIES | {"enable_prompt_embeds": True}
    with LLM(**settings) as llm:
        embeds = harness.embed(llm, range(200, 240))
        expected = stories(llm, [{"prompt_embeds": embeds}])
    in_ranks(2)
    with LLM(**settings) as llm:
        assert stories(llm, [{"prompt_embeds": embeds}]) == expected


def test_drafts_and_sleep_in_processes():
    settings = STORIES | {"enable_sleep_mode": True, "num_threads": 1}
    settings["speculative_config"] = {"model": "octavo/stories-eagle"}
    with LLM(**settings) as llm:
        expected = stories(llm)
    with LLM(**settings, tensor_parallel_size=2) as llm:
        assert stories(llm) == expected
        llm.sleep()
        llm.wake_up()
        assert stories(llm) == expected


def random_life(llm, seed):
    """Return the tokens of surviving requests, while others arrive and are aborted at any time."""
    rng, engine = random.Random(seed), llm.llm_engine
    left = [f"r{i}" for i in range(40)]
    doomed = {name: rng.randrange(1, 20) for name in left if rng.random() < 0.4}
    shared = [rng.randrange(3, VOCAB) for _ in range(30)]
    given, lives = {}, {}
    for i, name in enumerate(left):
        prompt = shared[: rng.choice([0, 9, 30])]
        prompt = [*prompt, *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30)))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.2]),
            seed=i,
            max_tokens=rng.randrange(1, 30),
            stop_token_ids=[7, 9, 11],
            repetition_penalty=rng.choice([1.0, 1.3]),
        )
        given[name] = ({"prompt_token_ids": prompt}, params)
    while left or engine.has_unfinished_requests():
        for _ in range(min(len(left), rng.randrange(3))):
            name = left.pop(0)
            engine.add_request(name, *given[name])
        gone = [name for name in doomed if name not in left and not doomed[name]]
        engine.abort_request(gone)
        for name in list(doomed):
            if name in gone:
                del doomed[name]
                lives[name] = None
            elif name not in left:
                doomed[name] -= 1
        for output in engine.step():
            if output.finished and output.request_id not in lives:
                lives[output.request_id] = list(output.outputs[0].token_ids)
    return lives


@pytest.fixture(scope="module")
def undisturbed(folder):
    with LLM(str(folder), **SETTINGS | {"max_num_seqs": 4}) as llm:
        return [random_life(llm, seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ((1, 2), {"num_gpu_blocks_override": 28}),
        ((2, 2), {}),
        ((2, 2), {"num_gpu_blocks_override": 28}),
        ((1, 3), {}),
    ],
)
def test_requests_that_come_and_go(layout, more, folder, undisturbed, in_ranks):
    """A row may be reused while the tokens of its former request are in transit."""
    in_ranks(*layout)
    with LLM(str(folder), **SETTINGS | {"max_num_seqs": 4} | more) as llm:
        for seed, lives in enumerate(undisturbed):
            got = random_life(llm, seed)
            both = {n for n in lives if lives[n] is not None and got[n] is not None}
            assert len(both) > 15
            assert {n: got[n] for n in both} == {n: lives[n] for n in both}
        llm.llm_engine.client.core.check_integrity()
