"""A server of an encoder-decoder: texts, errors, and an engine that dies."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.config import BUILTIN_DRAFT_MODEL
from octavo.errors import ConfigError
from octavo.sampling.logits_processors.repeated_ngrams import KEY
from octavo.worker.encoder_runner import EncoderRunner
from tests.e2e.harness import serve
from tests.models.harness import make_hf
from tests.models.test_encoder_decoders import MODELS, SOUNDS, T5, make_inputs, make_llm, make_model
from tests.models.test_speech_models import MOONSHINE, sounds
from tests.revival import DyingEncoder
from tests.small_tokenizers import byte_level, save

OFFLOAD = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
OFFLOAD |= {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24}}
TEXTS = ["Translate this.", "x", "Another text that is a bit longer than the others.", "x"]
SETTINGS = {"dtype": "bfloat16", "max_model_len": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    sizes = {"vocab_size": 270, "n_positions": 400, "eos_token_id": 269}
    make_hf("T5ForConditionalGeneration", **T5 | sizes).save_pretrained(folder)
    rules = {"min_length": 9, "no_repeat_ngram_size": 1, "length_penalty": 3.0}
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | rules))
    return save(byte_level(), folder)


def params(max_tokens):
    return SamplingParams(temperature=0.8, seed=3, max_tokens=max_tokens, ignore_eos=True)


def test_texts_errors_and_a_death(folder, tmp_path):
    with LLM(str(folder), **SETTINGS) as llm:
        outputs = llm.generate(TEXTS, params(300), use_tqdm=False)
    assert [output.encoder_prompt for output in outputs] == TEXTS
    assert outputs[0].prompt is None
    expected = [output.outputs[0].text for output in outputs]
    flags = ["--dtype", "bfloat16", "--max-model-len", "400"]
    with (
        serve(tmp_path, *flags, model=str(folder), spare=True) as server,
        ThreadPoolExecutor(8) as pool,
    ):

        def complete(text, **fields):
            body = {"model": str(folder), "prompt": text, "max_tokens": 300, "temperature": 0.8}
            body |= {"seed": 3, "ignore_eos": True, "vllm_xargs": {KEY: 0}}
            return server.post("/v1/completions", body | fields)

        answers = complete(TEXTS).json()
        assert [choice["text"] for choice in answers["choices"]] == expected
        assert answers["usage"]["prompt_tokens"] == sum(
            len(output.prompt_token_ids) + len(output.encoder_prompt_token_ids)
            for output in outputs
        )

        # The rules of generation_config.json are defaults.
        for fields, least in (({}, 6), ({"min_tokens": 0, "logit_bias": {"269": 100}}, 1)):
            body = {"model": str(folder), "prompt": "x", "return_token_ids": True, "max_tokens": 6}
            answer = server.post("/v1/completions", body | fields).json()["choices"][0]
            assert len(answer["token_ids"]) == len(set(answer["token_ids"])) == least

        # A prompt that is rendered and sent again has the same answer.
        sent = {"model": str(folder), "prompt": TEXTS[0], "max_tokens": 4, "temperature": 0}
        (rendered,) = server.post("/v1/completions/render", sent).json()
        assert rendered["token_ids"] == outputs[0].encoder_prompt_token_ids
        again = server.post("/inference/v1/generate", rendered).json()["choices"][0]
        plain = server.post("/v1/completions", sent | {"return_token_ids": True}).json()
        assert again["token_ids"] == plain["choices"][0]["token_ids"]

        for path, body, said in (
            ("/v1/completions", {"prompt": "a" * 401}, "reads at most 400 tokens"),
            ("/v1/completions", {"prompt": ""}, "encoder's prompt is empty"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "template"),
        ):
            answer = server.post(path, {"model": str(folder), **body})
            assert answer.status_code == 400, answer.text
            assert said in answer.json()["error"]["message"]

        jobs = server.begin_together(lambda: [pool.submit(complete, text) for text in TEXTS])
        server.engine_process().kill()
        assert [job.result().json()["choices"][0]["text"] for job in jobs] == expected


def test_an_encoder_that_fails(folder, monkeypatch):
    """It fails the requests with its input, and no others; the input may work again."""
    run, bad = EncoderRunner.run, True

    def fail(self, items):
        if bad and any(item.num_rows < 4 for item in items):
            raise ValueError("a bad item")
        return run(self, items)

    monkeypatch.setattr(EncoderRunner, "run", fail)
    with LLM(str(folder), **SETTINGS, distributed_executor_backend="uni") as llm:
        engine = llm.llm_engine
        for _ in range(2):
            for index, text in enumerate(TEXTS):
                engine.add_request(str(index), text, params(30))
            found = {}
            while engine.has_unfinished_requests():
                found |= {output.request_id: output.outputs[0] for output in engine.step()}
            reasons = [found[str(index)].stop_reason for index in range(4)]
            assert reasons[0] is reasons[2] is None
            assert all("(text) failed: ValueError: a bad" in reasons[i] for i in (1, 3))
        bad = False
        outputs = llm.generate(TEXTS, params(30), use_tqdm=False)
        assert [found[str(i)].text for i in (0, 2)] == [outputs[i].outputs[0].text for i in (0, 2)]
        assert len(outputs[1].outputs[0].token_ids) == 30


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def make_alone(tmp_path_factory):
    """Return a function: name -> a model's folder, prompts, and their answers one after the other.

    Decoders begin with more tokens than a block has.
    """

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        if name in MODELS:
            make_model(folder, name)
            prompts = make_inputs()
        else:
            architecture, config = SPEECH[name]
            make_hf(architecture, **config).save_pretrained(folder)
            random = np.random.default_rng(0)
            frames = sounds() if name == "moonshine" else random.normal(size=(3, 50, 6))
            features = [frame.astype(np.float32) for frame in frames]
            prompts = [{"encoder_prompt": {"input_features": one}} for one in features]
        prompts = begin_with(prompts, BEGIN)
        with make_llm(folder, max_num_seqs=1, enable_prefix_caching=False) as llm:
            found = [line for prompt in prompts for line in bits(llm, [prompt])]
        return folder, prompts, found

    return make


LONG = {"max_target_positions": 64}
SPEECH = {
    "whisper": (SOUNDS["whisper"][0], SOUNDS["whisper"][1] | LONG),
    "distil-whisper": (SOUNDS["whisper-turbo"][0], SOUNDS["whisper-turbo"][1] | LONG),
    "moonshine": ("MoonshineForConditionalGeneration", MOONSHINE),
}
EACH = ["t5", "flan-t5", "bart", "t5gemma", "marian", "m2m100", *SPEECH]
BEGIN = [3, *range(5, 27)]


@pytest.fixture(params=["flan-t5", "bart", "whisper"])
def alone(make_alone, request):
    return make_alone(request.param)


@pytest.fixture(params=EACH)
def each(make_alone, request):
    return make_alone(request.param)


def bits(llm, prompts, extra=None, tokens=20):
    """Return a greedy and a sampled answer to each prompt, with their logprobs."""
    several = [prompt for prompt in prompts for _ in range(2)]
    params = [
        SamplingParams(
            max_tokens=tokens,
            temperature=0.8 * (i % 2),
            seed=3,
            ignore_eos=True,
            logprobs=2,
            extra_args=({KEY: 3} if i % 2 else {}) | ({} if extra is None else extra[i]),
        )
        for i in range(len(several))
    ]
    outputs = llm.generate(several, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2, "speculative_config": NGRAM, "max_num_batched_tokens": 64},
        {"tensor_parallel_size": 2, "enable_sequence_parallel": True},
        {"enable_chunked_prefill": False},
        {"kv_transfer_config": OFFLOAD, "preemption_mode": "swap", "num_gpu_blocks_override": 16},
    ],
    ids=["stages", "rows", "whole", "offload"],
)
def test_layouts(alone, settings):
    folder, prompts, expected = alone
    with make_llm(folder, **settings) as llm:
        assert bits(llm, prompts) == expected
        if "kv_transfer_config" in settings:
            assert llm.reset_prefix_cache()
        assert bits(llm, prompts) == expected
        if "speculative_config" in settings:
            assert llm.stats().num_draft_tokens > 0
        if "num_gpu_blocks_override" in settings:
            assert llm.stats().num_preemptions > 0
            assert llm.reset_prefix_cache()
            assert bits(llm, prompts[:1]) == expected[:2]
            assert llm.stats().external_prefix_cache_hits > 0


def test_ranks_with_a_store(make_alone):
    """Each rank loads its part of the rows."""
    folder, prompts, expected = make_alone("bart")
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with make_llm(folder, kv_transfer_config=OFFLOAD, **ranks) as llm:
        assert bits(llm, prompts) == expected
        runs = watch_encoder(llm)
        assert llm.reset_prefix_cache()
        assert bits(llm, prompts) == expected
        assert not runs


def begin_with(prompts, tokens):
    """Return prompts of the encoder, each with the same tokens for the decoder."""
    return [
        (p if isinstance(p, dict) else {"encoder_prompt": p}) | {"decoder_prompt": tokens}
        for p in prompts
    ]


def watch_encoder(llm):
    """Return a list that receives each request whose rows a step computes."""
    scheduler, runs = llm._client.core.scheduler, []
    schedule = scheduler.schedule

    def watched():
        output = schedule()
        runs.extend(output.scheduled_encoder_inputs)
        return output

    scheduler.schedule = watched
    return runs


@pytest.mark.parametrize("begin", [1, len(BEGIN)], ids=["rows", "rows-and-tokens"])
def test_prefill_elsewhere(each, begin):
    """An engine goes on after another one, and runs no encoder."""
    folder, prompts, expected = each
    if begin < len(BEGIN):
        prompts = begin_with(prompts, BEGIN[:begin])
        with make_llm(folder) as llm:
            expected = bits(llm, prompts)
    config = {"kv_transfer_config": OFFLOAD | {"kv_connector": "P2PConnector"}}
    config |= {"distributed_executor_backend": "uni"}
    with make_llm(folder, **config) as one, make_llm(folder, **config) as two:
        runs = watch_encoder(two)
        asked = {"kv_transfer_params": {"do_remote_decode": True}}
        handed = one.generate(
            [p for p in prompts for _ in range(2)],
            SamplingParams(max_tokens=1, ignore_eos=True, extra_args=asked),
            use_tqdm=False,
        )
        offers = [{"kv_transfer_params": output.kv_transfer_params} for output in handed]
        assert bits(two, prompts, offers) == expected
        assert not runs
        assert (two.stats().external_prefix_cache_hits > 0) == (begin > 16)


@pytest.mark.parametrize("name", ["memory", "file", "folder"])
def test_rows_that_are_loaded(alone, tmp_path, name):
    """Another engine, or one without its prefix cache, runs the encoder only for lost blocks."""
    folder, prompts, expected = alone
    extra = {"cpu_bytes_to_use": 1 << 24}
    if name == "file":
        extra |= {"file_path": str(tmp_path), "file_bytes_to_use": 1 << 24}
    transfer = OFFLOAD | {"kv_connector_extra_config": extra}
    if name == "folder":
        extra = {"shared_storage_path": str(tmp_path)}
        transfer |= {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    config = {"kv_transfer_config": transfer, "distributed_executor_backend": "uni"}
    with make_llm(folder, **config) as llm:
        assert bits(llm, prompts) == expected
        if name == "memory":
            runs = watch_encoder(llm)
            assert llm.reset_prefix_cache()
            assert bits(llm, prompts) == expected
            assert not runs
            connector = llm._client.core.scheduler._connector
            lost = next(key for key in connector._memory if key[0] == 1)
            connector._memory.remove(lost)
            assert llm.reset_prefix_cache()
            assert bits(llm, prompts) == expected
            assert len(runs) == 1
            return
    with make_llm(folder, **config) as llm:
        runs = watch_encoder(llm)
        assert bits(llm, prompts) == expected
        assert not runs
        connector, begin = llm._client.core.scheduler._connector, 4096
        if name == "file":
            copies = connector._file.num_slots * connector.layout.copy_nbytes
            (path,) = tmp_path.iterdir()
            begin = path.stat().st_size - copies
    for path in tmp_path.rglob("*"):  # damage all copies
        if path.is_file():
            data = np.fromfile(path, np.uint8)
            data[begin + 7 :: 64] ^= 1
            path.write_bytes(data.tobytes())
    with make_llm(folder, **config) as llm:
        runs = watch_encoder(llm)
        assert bits(llm, prompts) == expected
        assert len(runs) == len(prompts)
        assert llm.stats().num_failed_loads > 0


def test_death_in_the_encoder(each, tmp_path, monkeypatch):
    """Before and after, prompts are in chunks, and requests are preempted."""
    folder, prompts, expected = each
    dying = DyingEncoder(tmp_path, monkeypatch)
    tokens = 96 if "moonshine" in folder.name else 48
    settings = {"max_num_batched_tokens": tokens, "num_gpu_blocks_override": 16}
    with make_llm(folder, block_size=16, **settings, **dying.settings) as llm:
        with dying.once(llm):
            assert bits(llm, prompts * 2) == expected * 2
        # The new engine may have got the requests after most of their tokens.
        assert bits(llm, prompts * 2) == expected * 2
        assert llm.stats().num_preemptions > 0


def test_two_ranks(each):
    folder, prompts, expected = each
    with make_llm(folder, tensor_parallel_size=2, num_threads=1) as llm:
        assert bits(llm, prompts) == expected


def test_answers_and_beams_share_one_run(tmp_path):
    make_model(tmp_path, "bart")
    with make_llm(tmp_path, distributed_executor_backend="uni") as llm:
        runs = watch_encoder(llm)
        several = SamplingParams(n=5, seed=1, max_tokens=9, ignore_eos=True)
        (output,) = llm.generate([[5, 6, 7]], several, use_tqdm=False)
        assert len(runs) == 1
        for index, answer in enumerate(output.outputs):
            single = SamplingParams(seed=1 + index, max_tokens=9, ignore_eos=True)
            (alone,) = llm.generate([[5, 6, 7]], single, use_tqdm=False)
            assert alone.outputs[0].token_ids == answer.token_ids
        beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
        (search,) = llm.beam_search([{"prompt_token_ids": [5, 6, 7]}], beams)
        assert len(search.sequences) == 3
        assert len(runs) == 1
        llm.beam_search([{"prompt_token_ids": [5, 6, 8]}], beams)
        assert len(runs) == 2
        assert llm._client.core.scheduler.kv_cache_manager.num_used_blocks == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"model": BUILTIN_DRAFT_MODEL}},
        {"enable_lora": True},
        {"enable_prompt_embeds": True},
    ],
)
def test_settings_that_are_not_supported(settings, folder):
    (name,) = settings
    name = {"speculative_config": "draft model"}.get(name, name)
    with pytest.raises(ConfigError, match=f"T5ForCond.* is not supported with .*{name}"):
        LLM(str(folder), **SETTINGS, **settings)
