"""Batch invariance: one request, one answer, bit for bit, with any other requests."""

import contextlib
import random
import threading
from dataclasses import dataclass

import psutil
import pytest
from msgspec.structs import replace

from octavo import LLM, SamplingParams
from octavo.kernels import native
from tests.drafts import SETTINGS, Drafter
from tests.e2e.harness import embed
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import make_hf
from tests.models.test_encoder_decoders import make_model
from tests.models.test_encoders import ENCODERS
from tests.plugins import NO_REPEAT, install

PROMPT_LEN = 150
DTYPES = ["bfloat16", "float32"]


@dataclass(frozen=True)
class Answer:
    """Parts that must not change: tokens and the exact logprobs of all reported candidates."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 4000) for _ in range(count)]


def params(temperature: float, **fields: object) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_p=0.95 if temperature else 1.0,
        seed=1234,
        max_tokens=24,
        ignore_eos=True,
        logprobs=5,
        repetition_penalty=1.1 if temperature else 1.0,
        **fields,
    )


TARGETS = [(tokens(1, PROMPT_LEN), params(0.0)), (tokens(2, PROMPT_LEN - 37), params(0.9))]


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
    outputs = llm.generate(
        [ids if isinstance(ids, dict) else {"prompt_token_ids": ids} for ids, _ in requests],
        [p for _, p in requests],
        use_tqdm=False,
    )
    return [
        Answer(
            tuple(o.outputs[0].token_ids),
            tuple(
                tuple((t, lp.logprob) for t, lp in sorted(position.items()))
                for position in o.outputs[0].logprobs or []
            ),
        )
        for o in outputs
    ]


def alone(llm: LLM) -> list[Answer]:
    return [answers(llm, [target])[0] for target in TARGETS]


def others(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    return [
        (
            tokens(100 + i, rng.randrange(1, 300)),
            SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.3]),
                top_k=rng.choice([0, 20]),
                seed=i,
                max_tokens=rng.randrange(1, 40),
                ignore_eos=True,
                logprobs=rng.choice([None, 2]),
            ),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def expected(dtype):
    with LLM(dtype=dtype, enable_prefix_caching=False, max_model_len=512) as llm:
        result = alone(llm)
        assert len(set(result[0].token_ids)) > 3  # not one token over and over
        return result


def test_among_64_others(dtype, expected):
    crowd = others(64)
    with LLM(
        dtype=dtype,
        enable_prefix_caching=False,
        max_model_len=512,
        distributed_executor_backend="mp" if dtype == "bfloat16" else "uni",
    ) as llm:
        result = answers(llm, [*crowd[:20], TARGETS[0], *crowd[20:50], TARGETS[1], *crowd[50:]])
    assert [result[20], result[51]] == expected


@pytest.mark.parametrize(
    "chunks", [{"bfloat16": 1, "float32": 7}, {"bfloat16": 16, "float32": 512}]
)
def test_prompt_in_chunks(dtype, expected, chunks):
    with LLM(
        dtype=dtype,
        enable_prefix_caching=False,
        long_prefill_token_threshold=chunks[dtype],
        max_model_len=512,
    ) as llm:
        assert alone(llm) == expected
        assert answers(llm, TARGETS) == expected


def test_with_and_without_a_prefix_hit(dtype, expected):
    with LLM(dtype=dtype, async_scheduling=dtype == "bfloat16", max_model_len=512) as llm:
        assert alone(llm) == expected
        assert llm.stats().prefix_cache_hits == 0
        assert alone(llm) == expected
        assert llm.stats().prefix_cache_hits >= 2 * (PROMPT_LEN - 37 - 16)
        # A hit on a part of the prompt only.
        ids, its_params = TARGETS[0]
        answers(llm, [([*ids[:70], *tokens(9, 30)], its_params)])
        llm.reset_prefix_cache()
        answers(llm, [([*ids[:70], *tokens(9, 30)], its_params)])
        assert answers(llm, [TARGETS[0]]) == expected[:1]


def test_n_answers_are_those_of_n_requests(dtype):
    """Siblings compute only the last token of the prompt, with and without prefix caching."""
    settings = {"enable_prefix_caching": dtype == "bfloat16", "max_num_seqs": 8}
    with LLM(dtype=dtype, max_model_len=512, **settings) as llm:
        ids, its_params = TARGETS[1][0][:109], TARGETS[1][1]
        many = llm.generate([ids], replace(its_params, n=5), use_tqdm=False)[0].outputs
        steps = its_params.max_tokens - 1
        assert llm.stats().num_scheduled_tokens == len(ids) + 4 + 5 * steps
        llm.reset_prefix_cache()
        seeds = [replace(its_params, seed=1234 + i) for i in range(5)]
        alone = [llm.generate([ids], one, use_tqdm=False)[0].outputs[0] for one in seeds]
    assert [o.token_ids for o in many] == [o.token_ids for o in alone]
    assert [o.logprobs for o in many] == [o.logprobs for o in alone]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_with_drafts_right_and_wrong(dtype, expected, async_scheduling, monkeypatch):
    """Alone and among others, greedy, sampled, with penalties; prefixes are cached on the way."""
    drafter = Drafter(monkeypatch, [answer.token_ids for answer in expected])
    settings = {"async_scheduling": async_scheduling} | SETTINGS
    settings["enforce_eager"] = async_scheduling == (dtype == "float32")  # all four pairs
    with LLM(dtype=dtype, max_model_len=512, max_num_seqs=16, **settings) as llm:
        assert alone(llm) == expected
        assert drafter.num_tokens > 1.2 * drafter.num_steps
        assert answers(llm, [*others(10), *TARGETS])[-2:] == expected
        ids, its_params = TARGETS[0]  # the state after rejected drafts does not count as known
        longer = ([*ids, *expected[0].token_ids], its_params)
        found = answers(llm, [longer])
        llm.reset_prefix_cache()
        assert answers(llm, [longer]) == found
        llm._client.core.check_integrity()


def test_a_prompt_cached_to_its_last_token(dtype):
    """A prompt that ends at a block border and is cached whole: its last block is copied."""
    target = (tokens(3, 64), params(0.0))
    with LLM(dtype=dtype, max_model_len=512) as llm:
        first = answers(llm, [target])
        assert answers(llm, [target]) == first
        assert llm.stats().prefix_cache_hits == 63


@pytest.mark.parametrize(
    ("case", "quantization"),
    [
        *((case, None) for case in ("qwen3.5", "lfm2", "mamba2", "falcon-h1", "jamba", "rwkv7")),
        *((case, None) for case in ("deepseek-v2", "kimi-linear")),
        *(("qwen3-moe", quantization) for quantization in ("int8", "int4", "fp8")),
    ],
)
def test_states_latents_and_quantized_experts(case, quantization, dtype, tmp_path):
    """Alone, among others, in chunks, after a prefix hit."""
    architecture, config = CASES[case]
    make_hf(architecture, **config | {"max_position_embeddings": 256}).save_pretrained(tmp_path)
    prompts = [[i % VOCAB for i in tokens(seed, 5 + 30 * seed)] for seed in range(6)]
    requests = [(ids, params(0.9 * (i % 2))) for i, ids in enumerate(prompts)]
    settings = {"dtype": dtype, "max_model_len": 256, "skip_tokenizer_init": True}
    settings["quantization"] = quantization
    with LLM(str(tmp_path), **settings, enable_prefix_caching=False, max_num_seqs=1) as llm:
        expected = answers(llm, requests)
    with LLM(str(tmp_path), **settings, max_num_batched_tokens=48, max_num_seqs=8) as llm:
        assert answers(llm, requests) == expected
        assert answers(llm, requests[::-1])[::-1] == expected
        assert llm.stats().prefix_cache_hits > 0


def test_after_forced_preemptions(dtype, expected):
    with LLM(
        dtype=dtype,
        enable_prefix_caching=False,
        max_model_len=336,
        num_gpu_blocks_override=25,
    ) as llm:
        # Four that fit at first and then grow; the targets arrive last and are preempted.
        growing = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        crowd = [(tokens(50 + i, 12), growing) for i in range(4)]
        result = answers(llm, [*crowd, *TARGETS])
        assert llm.stats().num_preemptions >= 2
    assert result[-2:] == expected


def test_with_blocks_from_elsewhere(dtype, expected, tmp_path):
    """Blocks from memory and from a folder, while others are computed and preempted."""
    connectors = [
        {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 2**21},
        },
        {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
        },
    ]
    with LLM(
        dtype=dtype,
        max_model_len=512,
        num_gpu_blocks_override=64,
        preemption_mode="swap" if dtype == "bfloat16" else "recompute",
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": connectors},
        },
    ) as llm:
        crowd = others(12)
        for _ in range(3):
            result = answers(llm, [*crowd[:4], TARGETS[0], *crowd[4:], TARGETS[1]])
            assert [result[4], result[13]] == expected
            llm.reset_prefix_cache()
        stats = llm.llm_engine.stats()
        assert stats.external_prefix_cache_hits >= 2 * 240
        assert stats.num_preemptions > 0


def test_with_prompts_that_another_engine_computed(dtype, expected):
    def engine(role):
        settings = {"cpu_bytes_to_use": 2**24}
        config = {"kv_connector": "P2PConnector", "kv_role": role}
        config["kv_connector_extra_config"] = settings
        return LLM(dtype=dtype, max_model_len=512, kv_transfer_config=config)

    def with_transfer(sampling_params, transfer, **fields):
        extra = {"kv_transfer_params": transfer}
        return replace(sampling_params, extra_args=extra, **fields)

    with engine("kv_producer") as one, engine("kv_consumer") as two:
        crowd = others(12)
        remote = {"do_remote_decode": True}
        there = one.generate(
            [{"prompt_token_ids": ids} for ids, _ in TARGETS],
            [with_transfer(p, remote, max_tokens=1) for _, p in TARGETS],
            use_tqdm=False,
        )
        targets = [
            (ids, with_transfer(p, output.kv_transfer_params))
            for (ids, p), output in zip(TARGETS, there, strict=True)
        ]
        result = answers(two, [*crowd[:4], targets[0], *crowd[4:], targets[1]])
        assert [result[4], result[13]] == expected
        stats = two.llm_engine.stats()
        assert stats.external_prefix_cache_hits >= 240
        assert stats.num_failed_loads == 0


@pytest.mark.parametrize(
    "settings",
    [
        {
            "bfloat16": {"long_prefill_token_threshold": 7, **SETTINGS},
            "float32": {"enforce_eager": True, "async_scheduling": False},
        },
        {"bfloat16": {}, "float32": {"max_model_len": 336, "num_gpu_blocks_override": 25}},
    ],
    ids=["drafts or eager", "captured or preempted"],
)
def test_embeddings_instead_of_tokens(dtype, expected, settings):
    """The table's rows in place of ids: alone, among others, cached, and with the prompt's end
    computed again."""
    settings = settings[dtype]
    with LLM(
        **{"dtype": dtype, "max_model_len": 512, "enable_prompt_embeds": True} | settings
    ) as llm:
        targets = [
            (ids, replace(its_params, repetition_penalty=1.0)) for ids, its_params in TARGETS
        ]
        by_ids = [answers(llm, [target])[0] for target in targets]
        assert by_ids[0] == expected[0]
        given = [({"prompt_embeds": embed(llm, ids)}, its_params) for ids, its_params in targets]
        hits = llm.stats().prefix_cache_hits
        assert [answers(llm, [target])[0] for target in given] == by_ids
        assert llm.stats().prefix_cache_hits == hits  # not those of the ids
        growing = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        crowd = [(tokens(50 + i, 12), growing) for i in range(4)]
        result = answers(llm, [*crowd, *given, *targets])
        assert result[-4:] == by_ids * 2
        assert llm.stats().prefix_cache_hits > hits
        assert llm.stats().num_preemptions >= 2 or "num_gpu_blocks_override" not in settings
        llm._client.core.check_integrity()


def test_with_a_plug_ins_processor(tmp_path, monkeypatch):
    """Only requests that name it use it, including resumed ones and those of one group."""
    install(tmp_path, monkeypatch, NO_REPEAT, "NoRepeat", "no_repeat")
    targets = [(ids, params(p.temperature, extra_args={"no_repeat": 8})) for ids, p in TARGETS]
    settings = {"max_model_len": 336, "dtype": "bfloat16"}
    with LLM(enable_prefix_caching=False, **settings) as llm:
        plain, expected = alone(llm), [answers(llm, [target])[0] for target in targets]
        assert all(len(set(a.token_ids[i : i + 9])) == 9 for a in expected for i in range(15))
        assert expected != plain
    with LLM(num_gpu_blocks_override=25, **settings) as llm:
        growing = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        crowd = [(tokens(50 + i, 12), growing) for i in range(4)]
        result = answers(llm, [*crowd, *targets, *TARGETS])
        assert llm.stats().num_preemptions >= 2
        assert result[-4:] == expected + plain
        # A request with wrong arguments fails alone, and an unknown key is named.
        for wrong, says in (({"no_repeat": -1}, "no positive"), ({"repeat": 1}, "'repeat'")):
            prompts = [{"prompt_token_ids": ids} for ids, _ in TARGETS]
            both = [params(0.0, extra_args=wrong), TARGETS[1][1]]
            failed, other = llm.generate(prompts, both, use_tqdm=False)
            assert says in str(failed.outputs[0].stop_reason)
            assert tuple(other.outputs[0].token_ids) == plain[1].token_ids
        many = params(0.9, extra_args={"no_repeat": 8}, n=3)
        prompt = {"prompt_token_ids": targets[1][0]}
        choices = llm.generate([prompt], many, use_tqdm=False)[0].outputs
        assert tuple(choices[0].token_ids) == expected[1].token_ids
        for choice in choices:
            assert all(len(set(choice.token_ids[i : i + 9])) == 9 for i in range(15))


def test_plainest_kernels_agree_with_themselves():
    """The same promise on the plainest instruction set; kernel tests have all types."""
    best = native.isa()
    native.set_isa("neon" if "neon" in native.available_isas() else "portable")
    try:
        with LLM(dtype="bfloat16", enable_prefix_caching=False, max_model_len=512) as llm:
            reference = alone(llm)
            assert answers(llm, [*others(8), *TARGETS])[-2:] == reference
    finally:
        native.set_isa(best)


@pytest.mark.parametrize(
    ("case", "processes"),
    [
        ("qwen3-moe", {}),
        ("granite-hybrid-moe", {"tensor_parallel_size": 2}),
        ("qwen3-moe", {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_engines_that_divide_the_experts(case, processes, tmp_path):
    """One process with all experts, and two engines that divide them, also when one dies."""
    requests, expected = save_mixture(case, tmp_path)
    settings = MIXTURE | {"data_parallel_size": 2} | processes
    with LLM(str(tmp_path), **settings) as llm:
        assert answers(llm, requests) == expected
        assert answers(llm, requests[3:4]) == expected[3:4]
        assert llm.stats().num_experts > 1
        check_deaths(llm, requests, expected)


# Decisions from the tokens of one step, so that experts move all the time.
EPLB = {"window_size": 1, "step_interval": 2}


@pytest.mark.parametrize(
    ("case", "redundant", "processes"),
    [
        ("qwen3-moe", 1, {"tensor_parallel_size": 2}),
        ("granite-hybrid-moe", 1, {"data_parallel_size": 2}),
        ("qwen3-moe", 3, {"data_parallel_size": 2, "tensor_parallel_size": 2}),
        ("qwen3-moe", 1, {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_experts_that_move_between_steps(case, redundant, processes, tmp_path):
    """Before, during and after moves, also when an engine dies in the middle of one."""
    requests, expected = save_mixture(case, tmp_path)
    eplb = EPLB | {"num_redundant_experts": redundant}
    settings = MIXTURE | processes | {"enable_eplb": True, "eplb_config": eplb}
    with LLM(str(tmp_path), **settings, weight_cache="off") as llm:
        for _ in range(3):
            assert answers(llm, requests) == expected
        assert answers(llm, requests[3:4]) == expected[3:4]
        stats = llm.stats()
        assert stats.num_expert_rearrangements > 5
        assert 1 / 4 <= stats.eplb_balancedness <= 1  # of at most four processes
        if "data_parallel_size" in processes:
            check_deaths(llm, requests, expected)


MIXTURE = {"dtype": "bfloat16", "max_model_len": 256, "skip_tokenizer_init": True}
MIXTURE |= {"num_threads": 1, "enable_expert_parallel": True, "kv_cache_memory_bytes": 2**20}


def save_mixture(case, folder):
    """Save a small mixture; return requests and the answers of one process."""
    architecture, config = CASES[case]
    make_hf(architecture, **config | {"max_position_embeddings": 256}).save_pretrained(folder)
    prompts = [[i % VOCAB for i in tokens(seed, 5 + 20 * seed)] for seed in range(6)]
    requests = [(ids, params(0.9 * (i % 2))) for i, ids in enumerate(prompts)]
    settings = {"dtype": "bfloat16", "max_model_len": 256, "skip_tokenizer_init": True}
    with LLM(str(folder), **settings, max_num_seqs=1) as llm:
        return requests, answers(llm, requests)


def check_deaths(llm, requests, expected):
    """Kill engines while they compute."""

    def kill(engine, is_worker):
        """Kill an engine, or one of its workers if it has some."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it is being replaced
            process = psutil.Process(llm._client.pids[engine])
            workers = process.children() if is_worker else []
            max(workers, key=lambda it: it.pid, default=process).kill()

    for engine, seconds in ((0, 0.05), (1, 0.3), (0, 0.3)):
        timer = threading.Timer(seconds, kill, (engine, seconds == 0.3))
        timer.start()
        assert answers(llm, requests * 2) == expected * 2
        timer.join()
    assert answers(llm, requests) == expected


FAMILIES = {  # with blocks that the model of the other tests does not have
    "GPTNeoXForCausalLM": {"num_attention_heads": 4},
    "GraniteSWAForCausalLM": {"num_attention_heads": 4, "sliding_window": 20},
    "BitNetForCausalLM": {"num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_other_families(architecture, tmp_path):
    """Among others, in chunks, on other threads, and with a cached prefix."""
    sizes = {"hidden_size": 72, "intermediate_size": 128, "vocab_size": 300}
    sizes |= {"num_hidden_layers": 4, "max_position_embeddings": 128}
    make_hf(architecture, **sizes, **FAMILIES[architecture]).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "bfloat16"}
    requests = [
        ([(7 * i + 3 * j) % 300 for j in range(count)], params(0.9 if i % 2 else 0.0))
        for i, count in enumerate((1, 16, 33, 70, 100))
    ]
    with LLM(enable_prefix_caching=False, **settings) as llm:
        alone = [answers(llm, [request])[0] for request in requests]
        assert len({answer.token_ids for answer in alone}) > 3
        assert answers(llm, requests) == alone
    with LLM(long_prefill_token_threshold=7, num_threads=1, **settings) as llm:
        assert answers(llm, requests[::-1]) == alone[::-1]
        assert answers(llm, requests) == alone
        assert llm.stats().prefix_cache_hits > 0


def encoder_decoder_requests():
    """Return requests with encoder inputs, of which some are equal, and longer decoder prompts."""
    requests = []
    for i, count in enumerate((1, 16, 33, 61, 33, 7)):
        of_decoder = tokens(30 + i, (0, 0, 20, 3, 20, 35)[i])
        prompt = {
            "encoder_prompt": {"prompt_token_ids": [7 + t % 80 for t in tokens(20 + i % 4, count)]},
            "decoder_prompt": {"prompt_token_ids": [7 + t % 80 for t in of_decoder]},
        }
        requests.append((prompt, replace(params(0.9 if i % 2 else 0.0), max_tokens=20)))
    return requests


@pytest.mark.parametrize("case", ["t5", "bart-odd", "t5gemma-own"])
def test_encoder_decoders(case, dtype, tmp_path):
    """Among others, in small steps and chunks, preempted, with known rows, and on two processes."""
    make_model(tmp_path, case)
    settings = {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": dtype}
    requests = encoder_decoder_requests()
    with LLM(enable_prefix_caching=False, **settings) as llm:
        alone = [answers(llm, [request])[0] for request in requests]
        assert len({answer.token_ids for answer in alone}) > 3
        assert answers(llm, requests) == alone
    with LLM(
        max_num_batched_tokens=62, max_num_seqs=8, long_prefill_token_threshold=7, **settings
    ) as llm:
        assert answers(llm, requests[::-1]) == alone[::-1]
        assert answers(llm, requests) == alone
        assert llm.stats().prefix_cache_hits > 0
    blocks = 20 if case == "t5gemma-own" else 16  # which has two kinds of self-attention
    few = {"num_gpu_blocks_override": blocks, "max_num_seqs": 4, "num_threads": 1}
    with LLM(enable_prefix_caching=False, **few, **settings) as llm:
        assert answers(llm, requests) == alone
        assert llm.stats().num_preemptions > 0
    with LLM(tensor_parallel_size=2, **settings) as llm:
        assert answers(llm, requests * 2) == alone * 2
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(pipeline_parallel_size=2, speculative_config=drafts, **settings) as llm:
        assert answers(llm, requests * 2) == alone * 2


@pytest.mark.parametrize("case", ["bert-odd", "modernbert-tokens", "mpnet-model", "deberta"])
def test_vectors_and_scores(case, dtype, tmp_path):
    """Among others, in steps of other sizes, and on one thread."""
    make_hf(ENCODERS[case][0], **ENCODERS[case][1]).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": dtype}
    texts = [
        {"prompt_token_ids": [4 + (7 * i + 3 * j) % 90 for j in range(count)]}
        for i, count in enumerate((1, 16, 33, 70, 50, 7))
    ]

    def results(llm, texts):
        return [output.outputs.data.tobytes() for output in llm.encode(texts, use_tqdm=False)]

    with LLM(**settings) as llm:
        alone = [results(llm, [text])[0] for text in texts]
        assert len(set(alone)) == len(texts)
        assert results(llm, texts) == alone
    with LLM(max_num_batched_tokens=80, max_num_seqs=3, num_threads=1, **settings) as llm:
        assert results(llm, texts[::-1] * 2) == alone[::-1] * 2


@pytest.mark.parametrize("isa", [i for i in native.available_isas() if i.startswith("amx")])
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
def test_tiles_agree_with_themselves(isa, quantization, tmp_path, monkeypatch):
    """The same promise for products on tiles, with a model that is small enough for
    emulated ones."""
    sizes = {"hidden_size": 40, "intermediate_size": 72, "vocab_size": 100}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    make_hf("LlamaForCausalLM", **sizes).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "skip_tokenizer_init": True, "quantization": quantization}
    settings |= {"dtype": "bfloat16", "enable_prefix_caching": False}
    requests = [
        (
            [(7 * i + 3 * j) % 100 for j in range(count)],
            replace(params(0.9 if i % 2 else 0.0), max_tokens=8),
        )
        for i, count in enumerate((1, 15, 17, 33))
    ]
    # Measurements of emulated tiles take half a minute.
    monkeypatch.setattr("octavo.kernels.tuning.tune", lambda *_: None)
    before = native.isa()
    native.set_isa(isa)
    try:
        with LLM(**settings) as llm:
            alone = [answers(llm, [request])[0] for request in requests]
            assert len({answer.token_ids for answer in alone}) > 3
            assert answers(llm, requests) == alone
        with LLM(long_prefill_token_threshold=7, num_threads=1, **settings) as llm:
            assert answers(llm, requests[::-1]) == alone[::-1]
    finally:
        native.set_isa(before)


@pytest.mark.parametrize(
    ("case", "sizes", "blocks"),
    [
        *[("gemma4", {"sliding_window": 40}, 70), ("qwen3.5", {}, 40), ("qwen3-moe", {}, 40)],
        *[
            ("mimo-v2", {"sliding_window": 40}, 70),
            ("llama4-chunks", {"attention_chunk_size": 50}, 90),
        ],
        ("laguna", {"sliding_window": 40}, 70),
    ],
    ids=str,
)
def test_layers_of_several_kinds(case, sizes, blocks, tmp_path, monkeypatch):
    """Layers that read the cache of others, with states, with experts, with small values or with
    chunks: in chunks, cached, with drafts, preempted."""
    architecture, config = CASES[case]
    sizes = {"max_position_embeddings": 304} | sizes
    make_hf(architecture, **config | sizes).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "bfloat16"}
    targets = [([t % VOCAB for t in ids], its_params) for ids, its_params in TARGETS]
    crowd = [([t % VOCAB for t in ids], its_params) for ids, its_params in others(8)]
    with LLM(enable_prefix_caching=False, **settings) as llm:
        expected = [answers(llm, [target])[0] for target in targets]
        assert len(set(expected[0].token_ids)) > 3
        assert answers(llm, [*crowd, *targets])[-2:] == expected
    drafter = Drafter(monkeypatch, [answer.token_ids for answer in expected])
    settings |= {"long_prefill_token_threshold": 23, "num_gpu_blocks_override": blocks} | SETTINGS
    if case == "qwen3-moe":  # room for 8 of 18 experts
        settings |= {"expert_cache": 200_000, "weight_cache": str(tmp_path / "packed")}
    with LLM(**settings) as llm:
        growing = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        crowd = [([3 * i + 5] * 12, growing) for i in range(6)]
        assert answers(llm, [*crowd, *targets])[-2:] == expected
        assert drafter.num_tokens > drafter.num_steps
        assert llm.stats().num_preemptions > 0
        for _ in range(2):  # the first time, others may have filled the cache
            assert answers(llm, targets) == expected
        assert llm.stats().prefix_cache_hits > 0
        llm._client.core.check_integrity()
