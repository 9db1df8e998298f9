"""KV connectors of models with encoders: failures and deaths leave nothing wrong in stores."""

import re
from functools import partial

import msgspec
import pytest

from octavo import SamplingParams
from octavo.messages import TensorData
from octavo.worker.encoder_runner import EncoderRunner
from tests.models.test_encoder_decoders import make_llm as make_translator
from tests.models.test_encoder_decoders import make_model
from tests.pictures import make_llm, params, picture, save_model
from tests.revival import assert_revived

PROMPTS = [
    {"prompt": f"a text {i}, <image>", "multi_modal_data": {"image": picture(48, 30, i)}}
    for i in range(2)
]

EMPTY = TensorData("float32", (0,), b"")


@pytest.fixture(autouse=True)
def own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a model, and the answers of an engine without a connector."""
    folder = tmp_path_factory.mktemp("model")
    save_model("smolvlm", folder)
    with make_llm(folder) as llm:
        return folder, answers(llm)


def answers(llm, prompts=PROMPTS, sampling=params):
    outputs = llm.generate(prompts, sampling(20), use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def connector(name, folder):
    """Return the settings of a connector with its store in a folder."""
    extra = {"cpu_bytes_to_use": 2**24}
    if name == "file":
        extra |= {"file_path": str(folder / "kv"), "file_bytes_to_use": 2**24}
    offloading = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    extra = {"shared_storage_path": str(folder / "kv"), "write_buffer_bytes": 2**24}
    shared = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    several = {"connectors": [offloading, shared]}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": several}
    return {"memory": offloading, "file": offloading, "folder": shared, "both": both}[name]


@pytest.mark.parametrize("name", ["memory", "file", "folder", "both"])
def test_stores_forget_blocks_of_failed_items(model, name, tmp_path, monkeypatch):
    """The item may work again; its blocks are then computed, also by an engine that follows."""
    folder, expected = model

    def fail(self, items):
        raise ValueError("a bad item")

    settings = {"distributed_executor_backend": "uni"}
    settings["kv_transfer_config"] = connector(name, tmp_path)
    with make_llm(folder, **settings) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(EncoderRunner, "run", fail)
            engine = llm.llm_engine
            for index in range(2):
                engine.add_request(str(index), PROMPTS[0], params(20))
            found = []
            while engine.has_unfinished_requests():
                found += engine.step()
            assert len(found) == 2
            for output in found:
                assert re.search("encoder of its item .* a bad item", output.outputs[0].stop_reason)
        assert answers(llm, PROMPTS[1:]) == expected[1:]
        if name in ("memory", "both"):
            assert llm.reset_prefix_cache()
            assert answers(llm) == expected
            assert llm.stats().external_prefix_cache_hits > 0
    if name != "memory":
        with make_llm(folder, **settings) as llm:
            assert answers(llm) == expected
            assert llm.stats().external_prefix_cache_hits > 0


def test_stages_report_failed_items(model, monkeypatch):
    """The last stage, which has no encoder, reports the message of the first one."""
    folder, expected = model
    settings = {"pipeline_parallel_size": 2, "num_threads": 1, "max_num_batched_tokens": 32}
    with make_llm(folder, **settings) as llm:
        engine = llm.llm_engine
        read = engine.input_processor._read_media

        def damage(*args):
            ids, items = read(*args)
            return ids, [msgspec.structs.replace(item, data={"other": EMPTY}) for item in items]

        with monkeypatch.context() as patch:
            patch.setattr(engine.input_processor, "_read_media", damage)
            engine.add_request("bad", PROMPTS[0], params(20))
        engine.add_request("good", PROMPTS[1], params(20))
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0] for output in engine.step()}
        assert re.search("encoder of its item 1 .*: KeyError", found["bad"].stop_reason)
        assert (found["good"].token_ids, found["good"].logprobs) == expected[1]


@pytest.fixture(scope="module", params=["pictures", "bart"])
def kind(request, tmp_path_factory, model):
    """Return functions that make an engine of a model, and parameters; and a prompt."""
    if request.param == "pictures":
        return partial(make_llm, model[0]), params, PROMPTS[0]
    folder = tmp_path_factory.mktemp("bart")
    make_model(folder, "bart")
    prompt = {"encoder_prompt": {"prompt_token_ids": [5, 6, 7] * 9}, "decoder_prompt": [3] * 20}

    def sampling(max_tokens, **fields):
        return SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True, logprobs=1, **fields)

    return partial(make_translator, folder), sampling, prompt


def test_a_death_with_a_store(kind, tmp_path):
    """The engine that follows reads the file of the dead one."""
    make, sampling, prompt = kind
    with make(isolate=True) as llm:
        (expected,) = answers(llm, [prompt], sampling)
    with make(isolate=True, kv_transfer_config=connector("file", tmp_path)) as llm:
        assert_revived(llm, prompt, sampling(40))
        llm.reset_mm_cache()
        assert llm.reset_prefix_cache()
        assert answers(llm, [prompt], sampling) == [expected]
        assert llm.stats().external_prefix_cache_hits > 0


def test_a_death_after_prefill_elsewhere(kind):
    """The engine that follows fetches the blocks again, or computes them."""
    make, sampling, prompt = kind
    extra = {"cpu_bytes_to_use": 2**24}
    transfer = {"kv_connector": "P2PConnector", "kv_connector_extra_config": extra}
    asked = sampling(1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    with (
        make(kv_transfer_config=transfer) as one,
        make(kv_transfer_config=transfer, isolate=True) as two,
    ):

        def hand_over():
            (output,) = one.generate(prompt, asked, use_tqdm=False)
            return sampling(40, extra_args={"kv_transfer_params": output.kv_transfer_params})

        (expected,) = answers(one, [prompt], sampling)
        assert_revived(two, prompt, sampling(40), hand_over)
        assert answers(two, [prompt], sampling) == [expected]
