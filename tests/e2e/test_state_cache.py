"""A model with another kind of cache, through a real worker: offline, served, killed, preempted."""

import json

import httpx
import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.kv_connector import peer
from tests import small_tokenizers
from tests.e2e import harness
from tests.state_model import ARCHITECTURE

CONFIG = {
    "architectures": [ARCHITECTURE],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
SETTINGS = {"load_format": "dummy", "max_model_len": 160, "num_threads": 1, "max_num_seqs": 8}
PROMPTS = [[5 + (7 * i + j) % 90 for j in range(3 + 11 * i)] for i in range(8)]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.9 * (i % 2), seed=i, ignore_eos=True, logprobs=2)
    for i in range(8)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the model, and a package on the path that offers its architecture."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizers.save(small_tokenizers.byte_level(), folder)
    assert tokenizer == folder
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 300}))
    package = tmp_path_factory.mktemp("package") / "toystate-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toystate\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        f"[octavo.models]\n{ARCHITECTURE} = tests.state_model:read\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package.parent)
        patch.setenv("PYTHONPATH", f"{package.parent}:.")
        yield str(folder)


def generate(llm):
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def bits(outputs):
    completions = [output.outputs[0] for output in outputs]
    return [
        (c.token_ids, [{t: p.logprob for t, p in at.items()} for at in c.logprobs])
        for c in completions
    ]


def answers(llm):
    return bits(generate(llm))


@pytest.fixture(scope="module")
def expected(model):
    with LLM(model, **SETTINGS) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 8},
        {"enforce_eager": True},
        {"enable_prefix_caching": False, "async_scheduling": False},
        {"attention_backend": "reference"},
        {"distributed_executor_backend": "mp"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_the_load_changes_no_bit(model, expected, settings):
    with LLM(model, **SETTINGS | settings) as llm:
        found = answers(llm)
    if "attention_backend" in settings:  # other bits
        assert found[0][0][:4] == expected[0][0][:4]
    else:
        assert found == expected


def test_preempted_requests_begin_anew(model, expected):
    with LLM(model, num_gpu_blocks_override=24, **SETTINGS | {"max_model_len": 128}) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_preemptions > 0


def test_the_memory_plan_has_it(model):
    with LLM(model, num_gpu_blocks_override=24, **SETTINGS | {"max_model_len": 128}) as llm:
        plan = llm.memory_plan
        assert plan.block_nbytes == 2 * 2 * 16 * 2 * 8 * 4
        assert plan.nbytes("states") == plan.num_states * 2 * 4 * 3 * 32


def offloading(**extra):
    extra = {"cpu_bytes_to_use": 2**22} | extra
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def check_loads(llm, expected):
    """Check that the longer prompts are loaded, up to the last whole block."""
    outputs = generate(llm)
    assert bits(outputs) == expected
    found = [output.num_cached_tokens for output in outputs]
    assert found == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert llm.stats().num_failed_loads == 0
    assert llm.stats().external_prefix_cache_hits == sum(found)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8, "distributed_executor_backend": "mp"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"pipeline_parallel_size": 2, "pipeline_layers": "1,3"},
    ],
    ids=str,
)
def test_offloaded_states(model, expected, settings, tmp_path):
    file = {"file_path": str(tmp_path), "file_bytes_to_use": 2**22}
    with LLM(model, kv_transfer_config=offloading(**file), **SETTINGS | settings) as llm:
        assert answers(llm) == expected
        llm.reset_prefix_cache()
        check_loads(llm, expected)
    with LLM(model, kv_transfer_config=offloading(**file), **SETTINGS | settings) as llm:
        check_loads(llm, expected)  # from the file


def test_a_damaged_file_of_states(model, expected, tmp_path):
    file = {"file_path": str(tmp_path), "file_bytes_to_use": 2**22}
    with LLM(model, kv_transfer_config=offloading(**file), **SETTINGS) as llm:
        assert answers(llm) == expected
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    for at in range(2**16, len(data), 1000):  # after the table
        data[at] ^= 1
    path.write_bytes(data)
    with LLM(model, kv_transfer_config=offloading(**file), **SETTINGS) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_failed_loads > 0
        assert llm.stats().num_used_blocks == 0
        llm.reset_prefix_cache()
        assert answers(llm) == expected


def shared(path):
    extra = {"shared_storage_path": str(path / "kv"), "write_buffer_bytes": 2**22}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}


def test_states_of_two_connectors(model, expected, tmp_path):
    extra = {"connectors": [offloading(), shared(tmp_path)]}
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    with LLM(model, kv_transfer_config=several, **SETTINGS) as llm:
        assert answers(llm) == expected
        llm.reset_prefix_cache()
        check_loads(llm, expected)
    with LLM(model, kv_transfer_config=several, **SETTINGS) as llm:
        check_loads(llm, expected)  # from the folder


def test_states_in_a_shared_folder(model, expected, tmp_path):
    transfer = shared(tmp_path)
    with LLM(model, kv_transfer_config=transfer, **SETTINGS) as llm:
        assert answers(llm) == expected
    with LLM(model, kv_transfer_config=transfer, **SETTINGS) as llm:
        check_loads(llm, expected)
    path = next((tmp_path / "kv").rglob("1-*.0"))  # piece of a state
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    with LLM(model, kv_transfer_config=transfer, **SETTINGS) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_failed_loads == 1


def test_swapped_requests_begin_at_an_offloaded_state(model, expected):
    settings = SETTINGS | {"max_model_len": 128, "preemption_mode": "swap"}
    transfer = {"kv_transfer_config": offloading()}
    with LLM(model, num_gpu_blocks_override=24, **transfer, **settings) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_preemptions > 0
        assert llm.stats().external_prefix_cache_hits > 0


def p2p(**extra):
    return offloading(**extra) | {"kv_connector": "P2PConnector"}


@pytest.mark.parametrize("tcp", [False, True])
def test_states_of_a_peer(model, expected, tcp, monkeypatch):
    if tcp:
        monkeypatch.setattr(peer, "_open", lambda peer: None)
    prefill = {"max_tokens": 1, "extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}
    prefill = [msgspec.structs.replace(params, **prefill) for params in PARAMS]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with (
        LLM(model, kv_transfer_config=p2p(), **SETTINGS) as one,
        LLM(model, kv_transfer_config=p2p(), **SETTINGS) as two,
    ):
        for _ in range(2):  # the second time with states of the prefix cache
            handed = [o.kv_transfer_params for o in one.generate(prompts, prefill, use_tqdm=False)]
            params = [
                msgspec.structs.replace(params, extra_args={"kv_transfer_params": found})
                for params, found in zip(PARAMS, handed, strict=True)
            ]
            outputs = two.generate(prompts, params, use_tqdm=False)
            assert bits(outputs) == expected
            found = [output.num_cached_tokens for output in outputs]
            assert found == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
            assert two.stats().num_failed_loads == 0
            two.reset_prefix_cache()
            one.llm_engine.client.core.scheduler._connector._memory.clear()


def test_what_a_state_cannot_do_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="at least 1,536 "):
        LLM(model, kv_cache_memory_bytes=1535, **SETTINGS)
    with pytest.raises(ConfigError, match="no room for a block and a recurrent state"):
        LLM(model, kv_transfer_config=offloading(cpu_bytes_to_use=4200), **SETTINGS)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* StateSpec"):
        LLM(model, tensor_parallel_size=2, **SETTINGS)


def test_a_stream_survives_the_engine(model, tmp_path):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    with harness.serve(tmp_path, *flags, model=model, spare=True) as server:
        body = {"prompt": PROMPTS[3], "max_tokens": 100, "ignore_eos": True, "seed": 3}
        body |= {"temperature": 0.8, "return_token_ids": True}
        whole = server.post("/v1/completions", body).json()["choices"][0]
        assert len(whole["token_ids"]) == 100
        text = ""
        url, body = server.url + "/v1/completions", body | {"stream": True}
        with httpx.stream("POST", url, json=body, timeout=240) as answer:
            events = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
            for count, event in enumerate(events):
                text += json.loads(event)["choices"][0]["text"]
                if count == 0:  # a server that is slower than its engine sends few events
                    server.engine_process().kill()
        assert text == whole["text"]
        server.wait_for_metric("octavo:engine_restarts_total", 1)
