"""KV connectors in real engines: tokens and logprobs have the same bits for all sources."""

import errno
import time
from pathlib import Path

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.config import BUILTIN_DRAFT_MODEL
from octavo.errors import ConfigError, SleepError
from tests.e2e.harness import wait_until
from tests.models.harness import make_hf

TEXT = "Once upon a time there was a little dog who liked to run in the park with his friend. "
PROMPTS = [TEXT * 4 + f"Then number {i} came, and" for i in range(3)]
PARAMS = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
SIZE = {"max_model_len": 256, "num_gpu_blocks_override": 60}
PREFILL = msgspec.structs.replace(
    PARAMS, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
)


def offloading(**extra):
    extra = {"cpu_bytes_to_use": 2**26} | extra
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def folder(path, role="kv_both", **extra):
    extra = {"shared_storage_path": str(path / "kv"), "write_buffer_bytes": 2**24} | extra
    connector = {"kv_connector": "SharedStorageConnector", "kv_role": role}
    return connector | {"kv_connector_extra_config": extra}


def p2p(**config):
    extra = {"cpu_bytes_to_use": 2**26} | config.pop("extra", {})
    return {"kv_connector": "P2PConnector", "kv_connector_extra_config": extra} | config


def bits(outputs):
    return [
        (
            output.outputs[0].token_ids,
            [{i: p.logprob for i, p in row.items()} for row in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def generate(llm, prompts=PROMPTS, params=PARAMS):
    return llm.generate(prompts, params, use_tqdm=False)


def cached(outputs):
    return [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def plain():
    """Return the answers of an engine without a connector, by its settings."""
    known = {}

    def answers(**settings):
        key = str(sorted(settings.items()))
        if key not in known:
            known[key] = bits(generate(LLM(**SIZE, **settings)))
        return known[key]

    return answers


@pytest.fixture(autouse=True)
def own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


KINDS = [
    {},
    {"kv_cache_dtype": "int8"},
    {
        "async_scheduling": False,
        "enforce_eager": True,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
    },
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {"speculative_config": {"model": BUILTIN_DRAFT_MODEL, "num_speculative_tokens": 3}},
]


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_every_tier(settings, plain, tmp_path):
    want = plain(**{k: settings[k] for k in ("dtype", "kv_cache_dtype") if k in settings})
    config = offloading(file_path=str(tmp_path / "kv"), file_bytes_to_use=2**26)
    llm = LLM(**SIZE, **settings, kv_transfer_config=config)
    assert bits(generate(llm)) == want
    llm.reset_prefix_cache()
    outputs = generate(llm)
    assert bits(outputs) == want
    assert min(cached(outputs)) >= 64
    llm.llm_engine.shutdown()
    llm = LLM(**SIZE, **settings, kv_transfer_config=config)  # and after a restart
    outputs = generate(llm)
    assert bits(outputs) == want
    assert min(cached(outputs)) >= 64
    stats = llm.llm_engine.stats()
    assert stats.num_failed_loads == 0
    assert stats.external_prefix_cache_hits >= 64
    assert stats.num_used_blocks == 0
    llm.llm_engine.shutdown()


@pytest.mark.parametrize(
    ("first", "second", "settings"),
    [
        ({}, {}, {"kv_cache_dtype": "int8", "max_num_batched_tokens": 32, "max_num_seqs": 8}),
        ({}, {"tensor_parallel_size": 2}, {"dtype": "float32"}),
        ({}, {}, {"kv_cache_dtype": "fp8", "async_scheduling": False}),
    ],
    ids=str,
)
def test_through_a_folder(first, second, settings, plain, tmp_path):
    want = plain(**{k: settings[k] for k in ("dtype", "kv_cache_dtype") if k in settings})
    one = LLM(**SIZE, **first, **settings, kv_transfer_config=folder(tmp_path, "kv_producer"))
    assert bits(generate(one)) == want
    one.llm_engine.shutdown()
    two = LLM(**SIZE, **second, **settings, kv_transfer_config=folder(tmp_path, "kv_consumer"))
    outputs = generate(two)
    assert bits(outputs) == want
    assert min(cached(outputs)) >= 64
    assert two.llm_engine.stats().num_failed_loads == 0
    two.reset_prefix_cache()
    # Some files are damaged in each way, and are computed again.
    files = sorted(p for p in (tmp_path / "kv").rglob("*") if p.is_file())
    for i, file in enumerate(files):
        data = file.read_bytes()
        if i % 4 == 1:
            file.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
        elif i % 4 == 2:
            file.write_bytes(data[: len(data) // 2])
        elif i % 4 == 3:
            file.unlink()
    assert bits(generate(two)) == want
    stats = two.llm_engine.stats()
    assert stats.num_used_blocks == 0
    two.llm_engine.shutdown()


def multi(*connectors):
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


def test_several_at_once(plain, tmp_path):
    tiers = multi(offloading(cpu_bytes_to_use=2**18), folder(tmp_path))
    one = LLM(**SIZE, dtype="bfloat16", kv_transfer_config=multi(p2p(), folder(tmp_path)))
    two = LLM(**SIZE, dtype="bfloat16", kv_transfer_config=tiers)
    want = plain(dtype="bfloat16")
    assert bits(generate(one)) == want
    one.llm_engine.shutdown()
    for _ in range(2):  # memory has room for a few blocks only, the folder for all
        outputs = generate(two)
        assert bits(outputs) == want
        assert min(cached(outputs)) >= 64
        two.reset_prefix_cache()
    (failed,) = [go_on(two, PROMPTS[0], {"do_remote_prefill": True}).outputs[0]]
    assert "does not accept them" in str(failed.stop_reason)
    assert two.llm_engine.stats().num_used_blocks == 0
    scheduler = two.llm_engine.client.core.scheduler._connector
    assert not scheduler._loading
    assert not scheduler._halves[0]._memory._pins
    two.llm_engine.shutdown()
    three = LLM(**SIZE, dtype="bfloat16", kv_transfer_config=multi(p2p(), offloading()))
    four = LLM(**SIZE, dtype="bfloat16", kv_transfer_config=multi(p2p(), offloading()))
    handed = [output.kv_transfer_params for output in generate(three, params=PREFILL)]
    outputs = [go_on(four, prompt, params) for prompt, params in zip(PROMPTS, handed, strict=True)]
    assert bits(outputs) == want
    assert min(cached(outputs)) >= 64
    for llm in (three, four):
        llm.llm_engine.shutdown()


def test_a_folder_that_cannot_be_written_to(plain, tmp_path, monkeypatch, caplog):
    llm = LLM(**SIZE, kv_transfer_config=folder(tmp_path))
    (tmp_path / "kv").chmod(0o500)
    monkeypatch.setattr("octavo.kv_connector.shared_folder.os.open", full)
    assert bits(generate(llm)) == plain()
    llm.reset_prefix_cache()
    assert bits(generate(llm)) == plain()
    llm.llm_engine.shutdown()
    assert caplog.text.count("KV blocks cannot be written (No space") == 1


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_private_prompts_several_answers_and_sleep(plain, tmp_path):
    config = offloading(file_path=str(tmp_path / "kv"), file_bytes_to_use=2**26)
    llm = LLM(**SIZE, enable_sleep_mode=True, kv_transfer_config=config)

    def ask(salt):
        llm.reset_prefix_cache()
        params = msgspec.structs.replace(PARAMS, cache_salt=salt)
        (output,) = found = generate(llm, PROMPTS[:1], params)
        assert bits(found) == plain()[:1]
        return output.num_cached_tokens

    assert ask("mine") == 0
    assert ask("yours") == 0
    assert ask(None) == 0
    assert ask(None) >= 64
    many = msgspec.structs.replace(PARAMS, n=3)
    llm.reset_prefix_cache()
    loaded = generate(llm, PROMPTS[:1], many)[0].outputs
    assert loaded[0].token_ids == plain()[0][0]
    with pytest.raises(SleepError, match="level=2 may bring other weights"):
        llm.sleep(2)
    llm.sleep(1)
    llm.wake_up()
    assert ask(None) >= 64
    llm.llm_engine.shutdown()
    llm = LLM(**SIZE, enable_prefix_caching=False)
    computed = generate(llm, PROMPTS[:1], many)[0].outputs
    assert [it.token_ids for it in loaded] == [it.token_ids for it in computed]
    llm.llm_engine.shutdown()


def test_a_window_that_has_left_most_of_the_prompt(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 100}
    sizes |= {"sliding_window": 40, "max_position_embeddings": 256, "head_dim": 16}
    make_hf("MistralForCausalLM", **sizes).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "skip_tokenizer_init": True, **SIZE}
    prompt = {"prompt_token_ids": [5 + i * i % 90 for i in range(150)]}
    llm = LLM(**settings)
    want = bits(generate(llm, [prompt]))
    llm.llm_engine.shutdown()
    llm = LLM(**settings, kv_transfer_config=offloading())
    for known in (0, 144):
        llm.reset_prefix_cache()
        outputs = generate(llm, [prompt])
        assert bits(outputs) == want
        assert cached(outputs) == [known]
    llm.llm_engine.shutdown()


def test_draft_models_have_not_computed_what_was_loaded():
    draft = {"model": BUILTIN_DRAFT_MODEL, "num_speculative_tokens": 3}
    llm = LLM(**SIZE, speculative_config=draft, kv_transfer_config=offloading())
    generate(llm, PROMPTS[:1])
    llm.reset_prefix_cache()
    llm.collective_rpc(lambda worker: worker.runner.state.proposer._filled.fill(16))
    (output,) = generate(llm, PROMPTS[:1], SamplingParams(max_tokens=1))
    (filled,) = llm.collective_rpc(lambda worker: worker.runner.state.proposer._filled)
    assert output.num_cached_tokens >= 64
    assert (filled == 0).sum() >= output.num_cached_tokens // 16
    llm.llm_engine.shutdown()


def test_a_damaged_file_changes_no_answer(plain, tmp_path):
    config = offloading(file_path=str(tmp_path / "kv"), file_bytes_to_use=2**24)
    llm = LLM(**SIZE, kv_transfer_config=config)
    generate(llm)
    llm.llm_engine.shutdown()
    (file,) = (tmp_path / "kv").iterdir()
    data = bytearray(file.read_bytes())
    for at in range(100_000, len(data), 50_001):
        data[at] ^= 4
    file.write_bytes(data)
    llm = LLM(**SIZE, kv_transfer_config=config)
    assert bits(generate(llm)) == plain()
    assert llm.llm_engine.stats().num_failed_loads
    llm.llm_engine.shutdown()


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        ({}, {}, "bfloat16"),
        ({}, {"tensor_parallel_size": 2}, "float32"),
    ],
    ids=str,
)
def test_prefill_here_and_decode_there(first, second, dtype, plain):
    one = LLM(**SIZE, **first, dtype=dtype, kv_transfer_config=p2p(kv_role="kv_producer"))
    two = LLM(**SIZE, **second, dtype=dtype, kv_transfer_config=p2p(kv_role="kv_consumer"))
    handed = [output.kv_transfer_params for output in generate(one, params=PREFILL)]
    assert all(params["do_remote_prefill"] for params in handed)
    outputs = [go_on(two, prompt, params) for prompt, params in zip(PROMPTS, handed, strict=True)]
    assert bits(outputs) == plain(dtype=dtype)
    assert min(cached(outputs)) >= 64
    assert two.llm_engine.stats().num_failed_loads == 0
    scheduler = one.llm_engine.client.core.scheduler._connector

    def is_released():  # once the message of the other one has arrived
        one.llm_engine.client.core.step()
        return not scheduler._kept

    wait_until(is_released)
    assert not scheduler._memory._pins
    one.llm_engine.shutdown()
    outputs = [go_on(two, prompt, params) for prompt, params in zip(PROMPTS, handed, strict=True)]
    assert bits(outputs) == plain(dtype=dtype)
    two.llm_engine.shutdown()


def go_on(llm, prompt, transfer_params):
    params = msgspec.structs.replace(PARAMS, extra_args={"kv_transfer_params": transfer_params})
    return generate(llm, [prompt], params)[0]


def test_over_tcp_and_without_a_peer(plain, monkeypatch):
    from octavo.kv_connector import peer

    monkeypatch.setattr(peer, "_open", lambda peer: None)
    one = LLM(**SIZE, kv_transfer_config=p2p(extra={"release_timeout": 0.2}))
    two = LLM(**SIZE, kv_transfer_config=p2p())
    (output,) = generate(one, PROMPTS[:1], PREFILL)
    handed = output.kv_transfer_params
    answer = go_on(two, PROMPTS[0], handed)
    assert bits([answer]) == plain()[:1]
    assert answer.num_cached_tokens >= 64
    # Another prompt with its parameters: no block of the first one is used for it.
    assert bits([go_on(two, PROMPTS[1], handed)]) == plain()[1:2]
    for wrong in (handed | {"remote_port": 1}, handed | {"signature": ""}, {"do_remote": True}):
        answer = go_on(two, PROMPTS[0], wrong).outputs[0]
        assert answer.finish_reason == "error"
        assert "kv_transfer_params" in str(answer.stop_reason)
    (output,) = generate(one, PROMPTS[2:], PREFILL)
    time.sleep(0.3)
    generate(one, ["x"], SamplingParams(max_tokens=1))
    assert one.llm_engine.stats().num_expired_transfers >= 1
    one.llm_engine.shutdown()
    two.llm_engine.shutdown()
    three = LLM(**SIZE, kv_transfer_config=p2p(extra={"load_timeout": 0.1}))
    assert bits([go_on(three, PROMPTS[2], output.kv_transfer_params)]) == plain()[2:]
    assert three.llm_engine.stats().num_failed_loads >= 1
    three.llm_engine.shutdown()


def test_what_it_takes(tmp_path):
    def refused(**settings):
        with pytest.raises(ConfigError) as caught:
            LLM(**SIZE, **settings)
        return str(caught.value)

    assert "enable_prefix_caching" in refused(
        kv_transfer_config=offloading(), enable_prefix_caching=False
    )
    assert "is not one of Offloading" in refused(kv_transfer_config={"kv_connector": "Other"})
    assert "cpu_bytes_to_use=5 has no room" in refused(
        kv_transfer_config=offloading(cpu_bytes_to_use=5)
    )
    assert "go together" in refused(kv_transfer_config=offloading(file_path="/tmp/x"))
    assert "eviction_policy='mru'" in refused(kv_transfer_config=offloading(eviction_policy="mru"))
    assert "unknown field `size`" in refused(kv_transfer_config=offloading(size=1))
    path = Path("/proc/nowhere")
    assert "cannot be used" in refused(kv_transfer_config=folder(path))
    assert "max_bytes=5 has no room" in refused(kv_transfer_config=folder(tmp_path, max_bytes=5))
    assert "connectors is empty" in refused(kv_transfer_config=multi())
    assert "has a MultiConnector" in refused(kv_transfer_config=multi(multi(offloading())))
    assert "cpu_bytes_to_use=5 has no room" in refused(
        kv_transfer_config=multi(offloading(cpu_bytes_to_use=5))
    )
    assert "kv_role" in refused(kv_transfer_config=multi(offloading() | {"kv_role": "x"}))
    assert "missing required field `shared_storage_path`" in refused(
        kv_transfer_config={"kv_connector": "SharedStorageConnector"}
    )
    assert "has no Mine" in refused(
        kv_transfer_config={"kv_connector": "Mine", "kv_connector_module_path": "json"}
    )
    assert "attention_backend=cpu" in refused(
        kv_transfer_config=offloading(), attention_backend="reference"
    )
