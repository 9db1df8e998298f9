"""Models with recurrent states in several processes, with connectors, and with states of NaN."""

import contextlib
import time

import msgspec
import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.kv_connector.copy_file import CopyFile, read_records
from octavo.layers.shared import Columns
from tests.models.cases import CASES
from tests.models.harness import make_hf
from tests.ranks import use_ranks

SETTINGS = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 8}
SETTINGS |= {"num_threads": 1, "dtype": "bfloat16"}
NAN_TOKEN = 7
PARAMS = SamplingParams(
    max_tokens=12,
    temperature=0.8,
    seed=3,
    ignore_eos=True,
    logprobs=2,
    logit_bias={NAN_TOKEN: -100.0},
)
PREFILL = msgspec.structs.replace(
    PARAMS, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
)
PROMPTS = [[10 + (7 * i + j * (1 + i)) % 80 for j in range(33 + 20 * i)] for i in range(3)]
ONE_MIXER = ["linear_attention", "mlp", "mlp", "full_attention", "full_attention"]
LAYERS = {
    "qwen3.5": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "falcon-h1": {},
    "nemotron-h": {"layers_block_type": [*ONE_MIXER, "linear_attention"]},
    "mamba2": {},
    "lfm2": {"tie_word_embeddings": False},
}
"""Fields of the models. The first stage of the first one has no attention; layers of the others
have two caches, or none."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a model; a token's embedding is NaN."""
    folders = {}

    def make(case):
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("model")
            architecture, config = CASES[case]
            made = make_hf(architecture, **config | LAYERS[case])
            with torch.no_grad():
                made.get_input_embeddings().weight[NAN_TOKEN] = torch.nan
            made.save_pretrained(folders[case])
        return str(folders[case])

    return make


@pytest.fixture(scope="module")
def plain(model):
    """Return a model's answers without a prefix cache and connectors."""
    known = {}

    def make(case):
        if case not in known:
            with LLM(model(case), enable_prefix_caching=False, **SETTINGS) as llm:
                known[case] = bits(generate(llm))
        return known[case]

    return make


def generate(llm, prompts=PROMPTS, params=PARAMS):
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(prompts, params, use_tqdm=False)


def bits(outputs):
    completions = [output.outputs[0] for output in outputs]
    return [
        (c.token_ids, [{t: p.logprob for t, p in at.items()} for at in c.logprobs])
        for c in completions
    ]


def connector(name, folder=None, **extra):
    extra = {"cpu_bytes_to_use": 2**22} | extra
    if folder is not None:
        extra |= {"file_path": str(folder), "file_bytes_to_use": 2**22}
    return {"kv_connector": f"{name}Connector", "kv_connector_extra_config": extra}


def check_loaded(outputs, expected):
    assert bits(outputs) == expected
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 1) // 16 * 16 for prompt in PROMPTS
    ]


@pytest.mark.parametrize("case", ["nemotron-h", "falcon-h1", "mamba2"])
def test_stages_of_layers_with_any_number_of_caches(case, model, plain, monkeypatch):
    use_ranks(monkeypatch, 1, 2)
    with LLM(model(case), **SETTINGS) as llm:
        assert bits(generate(llm)) == plain(case)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("qwen3.5", {"pipeline_parallel_size": 2}),
        ("falcon-h1", {"tensor_parallel_size": 2}),
    ],
    ids=str,
)
def test_each_rank_saves_and_loads_its_part(case, ranks, model, plain, tmp_path):
    settings = {"kv_transfer_config": connector("Offloading", tmp_path), **SETTINGS, **ranks}
    with LLM(model(case), **settings) as llm:
        assert bits(generate(llm)) == plain(case)
        llm.reset_prefix_cache()
        check_loaded(generate(llm), plain(case))
    with LLM(model(case), **settings) as llm:
        check_loaded(generate(llm), plain(case))
        assert llm.stats().num_failed_loads == 0


@pytest.mark.parametrize(
    ("case", "ranks"),
    [("nemotron-h", {"pipeline_parallel_size": 2}), ("qwen3.5", {"tensor_parallel_size": 2})],
    ids=str,
)
def test_each_rank_hands_its_part_over(case, ranks, model, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"kv_transfer_config": connector("P2P"), **SETTINGS}
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(LLM(model(case), **settings, **ranks)) for _ in range(2))
        handed = [output.kv_transfer_params for output in generate(one, params=PREFILL)]
        params = [
            msgspec.structs.replace(PARAMS, extra_args={"kv_transfer_params": found})
            for found in handed
        ]
        check_loaded(generate(two, params=params), plain(case))
        assert two.stats().num_failed_loads == 0


def folder_connector(path):
    extra = {"shared_storage_path": str(path), "write_buffer_bytes": 2**22}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("case", ["qwen3.5", "falcon-h1", "lfm2", "mamba2"])
@pytest.mark.parametrize("name", ["file", "folder"])
def test_states_of_other_divisions_are_not_found(case, name, model, plain, tmp_path, monkeypatch):
    """Two ranks, two stages and one process store in the same place."""
    transfer = folder_connector(tmp_path) if name == "folder" else connector("Offloading", tmp_path)
    for ranks in ((2, 1), (1, 2), (1, 1)):
        use_ranks(monkeypatch, *ranks)
        with LLM(model(case), kv_transfer_config=transfer, **SETTINGS) as llm:
            outputs = generate(llm)
            assert bits(outputs) == plain(case)
            assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
            assert llm.stats().num_failed_loads == 0
    with LLM(model(case), kv_transfer_config=transfer, **SETTINGS) as llm:
        check_loaded(generate(llm), plain(case))


@pytest.mark.parametrize("case", ["qwen3.5", "mamba2"])
@pytest.mark.parametrize("divisions", [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), (1, 2))])
def test_states_handed_over_to_another_division_are_computed(
    case, divisions, model, plain, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"kv_transfer_config": connector("P2P"), **SETTINGS}
    with contextlib.ExitStack() as stack:
        engines = []
        for ranks in divisions:
            use_ranks(monkeypatch, *ranks)
            engines.append(stack.enter_context(LLM(model(case), **settings)))
        one, two = engines
        handed = [output.kv_transfer_params for output in generate(one, params=PREFILL)]
        params = [
            msgspec.structs.replace(PARAMS, extra_args={"kv_transfer_params": found})
            for found in handed
        ]
        outputs = generate(two, params=params)
        assert bits(outputs) == plain(case)
        assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
        assert two.stats().num_failed_loads == 0
        assert "divides recurrent states among its processes in another way" in caplog.text


def states(llm):
    """Return the known snapshots: float32 [snapshots, numbers]."""
    manager = llm.llm_engine.client.core.scheduler.kv_cache_manager
    slots = [snapshot.slot for snapshot in manager.states.known.values()]
    count = manager.config.num_paged_tensors
    (tensors,) = llm.collective_rpc(lambda worker: worker.runner.state.kv_tensors)
    return np.concatenate([t.numpy().view(np.float32)[slots] for t in tensors[count:]], axis=1)


@pytest.mark.parametrize("case", ["qwen3.5", "falcon-h1"])
def test_a_state_of_nan_fails_its_request_only(case, model, plain, tmp_path):
    transfer = connector("Offloading", tmp_path)
    settings = {"kv_transfer_config": transfer, "max_num_batched_tokens": 16, **SETTINGS}
    bad = [[*prompt[:20], NAN_TOKEN, *prompt[20:], *prompt] for prompt in PROMPTS[:2]]
    with LLM(model(case), **settings) as llm:
        for _ in range(2):  # the second time in slots and blocks that were full of NaN
            outputs = generate(llm, [bad[0], *PROMPTS, bad[1]])
            assert bits(outputs[1:-1]) == plain(case)
            for output in (outputs[0], outputs[-1]):
                assert output.outputs[0].finish_reason == "error"
                assert "not finite" in str(output.outputs[0].stop_reason)
            known = states(llm)
            assert len(known) >= len(PROMPTS)
            assert np.isfinite(known).all()
        llm.llm_engine.client.core.check_integrity()
        llm.reset_prefix_cache()
        check_loaded(generate(llm), plain(case))
        layout = llm.llm_engine.client.core.scheduler._connector.layout
    (path,) = tmp_path.iterdir()
    file, copy = CopyFile(path, layout, 2**22 // layout.slot_nbytes), bytearray(layout.copy_nbytes)
    kinds = set()
    for _, slot, kind, _ in read_records(path, layout):
        if kind >= len(layout.groups):
            kinds.add(kind)
            file.read(slot, memoryview(copy))
            size = layout.pieces[kind - len(layout.groups)][-1]
            size = size.offset + size.nbytes
            assert np.isfinite(np.frombuffer(copy, np.float32, size // 4)).all()
    file.close()
    assert len(kinds) == layout.num_pieces


def test_the_least_memory(model):
    settings = SETTINGS | {"max_num_seqs": 1}
    with pytest.raises(ConfigError, match="no room for the recurrent state") as caught:
        LLM(model("mamba2"), kv_cache_memory_bytes=1000, **settings)
    least = str(caught.value).partition("at least ")[2].partition(" ")[0].replace(",", "")
    with LLM(model("mamba2"), kv_cache_memory_bytes=int(least), **settings) as llm:
        assert len(bits(generate(llm))) == len(PROMPTS)
    with pytest.raises(ConfigError, match="no room for the recurrent state"):
        LLM(model("mamba2"), kv_cache_memory_bytes=int(least) - 1, **settings)


def test_a_stage_of_one_block(model, monkeypatch):
    """Its next step does not fill the buffer that a slower rank still reads."""
    use_ranks(monkeypatch, 2, 2, "4,2", "reduce")
    settings = SETTINGS | {"enforce_eager": True, "dtype": "float32"}
    join = Columns.join

    def join_slowly(self):
        join(self)
        if self.buffers.rank.index == 1:
            time.sleep(0.003)

    monkeypatch.setitem(CASES, "one-block", CASES["nemotron-h"])
    kinds = ["full_attention", "mlp", "mlp", "full_attention", "linear_attention", "mlp"]
    monkeypatch.setitem(LAYERS, "one-block", {"layers_block_type": kinds})
    found = []
    for function in (join, join_slowly):
        monkeypatch.setattr(Columns, "join", function)
        with LLM(model("one-block"), **settings) as llm:
            found.append(bits(generate(llm)))
    assert found[0] == found[1]
