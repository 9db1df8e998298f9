"""Assembly of an engine core from a config: choices, and the order of steps."""

import gc
import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_ENCODER, BUILTIN_MODEL, EngineConfig
from octavo.engine import assemble
from octavo.engine.assemble import make_engine_core, set_up_worker
from octavo.errors import ConfigError
from octavo.models.forms import assign
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.plan.memory import MemoryBudget, MemoryItem, Scratch
from octavo.platforms.cpu import CPUPlatform
from octavo.system.distributed import ALONE
from tests.fakes import FakeExecutor
from tests.models.cases import CASES
from tests.models.harness import save_config
from tests.params import core_params, core_request

PATH = resolve_model(BUILTIN_MODEL)
SPEC = read_spec(open_checkpoint(PATH))
BUDGET = MemoryBudget(
    source="a test",
    available=2**31,
    most_kv_cache=2**30,
    items=(
        MemoryItem("runtime", 2**20),
        MemoryItem("weights", 2**20),
        MemoryItem("activations", 2**20, "step"),
    ),
)


class Platform(CPUPlatform):
    """Platform that estimates its memory, or measures it, without looking at the machine."""

    def __init__(self, order, *, estimates=True):
        self._order, self._estimates = order, estimates

    def estimate_memory(self, setup):
        if not self._estimates:
            return None
        self._order.append(("estimate", setup))
        return replace(BUDGET, scratches=(Scratch(1000, 2000, 3000),))


def make(order=None, *, estimates=True, request_memory=None, **settings):
    order = [] if order is None else order

    class Executor(FakeExecutor):
        def __init__(self, setup, platform):
            super().__init__()
            order.append(("load", setup))

        def measure_memory(self):
            order.append(("measure", None))
            return BUDGET

        def initialize_kv_cache(self, kv_cache):
            order.append(("allocate", kv_cache))
            super().initialize_kv_cache(kv_cache)

    settings = {"max_num_seqs": 4, "num_gpu_blocks_override": 20, "max_model_len": 64} | settings
    return make_engine_core(
        EngineConfig.from_kwargs(**settings),
        SPEC,
        PATH,
        default_batched_tokens=32,
        request_memory=request_memory,
        platform=Platform(order, estimates=estimates),
        make_executor=Executor,
    )


def test_the_caller_s_token_budget_holds_where_the_config_sets_none():
    for settings, budget in (({}, 32), ({"max_num_batched_tokens": 48}, 48)):
        core, plan = make(**settings)
        core.add_request(core_request("0", list(range(60)), core_params(max_tokens=2)))
        core.step()
        assert core.executor.steps[0].total_num_scheduled_tokens == budget
        assert core.scheduler.max_num_batched_tokens == budget
        assert core.scheduler.max_model_len == plan.max_model_len == 64


@pytest.mark.parametrize("estimates", [True, False])
def test_a_program_of_ones_own_gets_two_lines(estimates, caplog):
    caplog.set_level(logging.INFO, "octavo.engine.assemble")
    _, plan = make([], estimates=estimates, max_model_len=-1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == plan.report().splitlines()[0]
    assert lines[1].startswith("model loaded in ")
    assert len(lines) == 2


@pytest.mark.parametrize("estimates", [True, False])
def test_memory_is_planned_before_loading_if_it_can_be_known(estimates, monkeypatch, caplog):
    order = []
    caplog.set_level(logging.INFO, "octavo.engine.assemble")
    monkeypatch.setattr(assemble, "resident_memory", lambda pid: 123 * 2**20)
    core, plan = make(order, estimates=estimates, request_memory=2**20, max_model_len=-1)
    longest = 19 * 16
    lines = "\n".join(record.getMessage() for record in caplog.records)
    assert plan.report() in lines
    assert "model loaded in " in lines
    assert order[-1][1].num_blocks == plan.num_blocks == 20
    assert core.scheduler.max_model_len == plan.max_model_len == longest
    first = order[0][1]
    assert first.max_num_batched_tokens == core.scheduler.max_num_batched_tokens == 32
    assert first.max_model_len == SPEC.max_model_len
    if estimates:
        assert [what for what, _ in order] == ["estimate", "load", "allocate"]
        scratches = (Scratch(1000, 2000, 3000),)
        assert order[1][1] == replace(first, max_model_len=longest, scratches=scratches)
        assert plan.compare(123 * 2**20) in lines
        assert plan.nbytes("requests") == 2**20
    else:
        assert [what for what, _ in order] == ["load", "measure", "allocate"]
        assert "resident memory" not in lines
        assert plan.nbytes("requests") == 0


def test_debug_logs_tell_why_requests_wait(caplog):
    caplog.set_level(logging.DEBUG, "octavo.scheduler.listener")
    core, _ = make(max_num_seqs=1)
    for i in range(3):
        core.add_request(core_request(str(i), [1, 2, 3], core_params(max_tokens=5)))
    while core.has_work():
        core.step()
    name = "octavo.scheduler.listener"
    lines = [record.getMessage() for record in caplog.records if record.name == name]
    assert lines == [f"request {i} waits: max_num_seqs requests run" for i in (1, 2)]


@pytest.mark.parametrize("case", ["gemma4", "gemma3n"])
def test_prompt_embeds_lack_the_ids_that_some_models_need(case, tmp_path):
    spec = save_config(tmp_path, *CASES[case])
    config = EngineConfig.from_kwargs(model=str(tmp_path), enable_prompt_embeds=True)
    with pytest.raises(ConfigError, match=f"enable_prompt_embeds .* {spec.architecture}"):
        set_up_worker(config, spec, tmp_path, CPUPlatform(), 64)


TRANSFER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
TRANSFER |= {"kv_connector_extra_config": {"cpu_bytes_to_use": 2**20}}


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        ("llama", {}, "divides experts, and LlamaForCausalLM has none"),
        ("mixtral", {"data_parallel_size": 6}, "the 5 experts of a layer .* these are 6; lower"),
        (
            "mixtral",
            {"data_parallel_size": 3, "tensor_parallel_size": 2},
            "the 5 experts of a layer .* these are 6; lower",
        ),
        ("mixtral", {"enable_sleep_mode": True}, "not supported with enable_sleep_mode"),
        (
            "mixtral",
            {"kv_transfer_config": TRANSFER},
            "not supported with kv_transfer_config",
        ),
    ],
)
def test_engines_that_cannot_divide_experts(case, settings, message, tmp_path):
    spec = save_config(tmp_path, *CASES[case])
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True} | settings
    config = EngineConfig.from_kwargs(model=str(tmp_path), **settings)
    with pytest.raises(ConfigError, match=message):
        _ = set_up_worker(config, spec, tmp_path, CPUPlatform(), 64).part


@pytest.mark.parametrize(
    ("case", "settings", "redundant", "message"),
    [
        ("llama", {"tensor_parallel_size": 2}, 0, "balances the loads of experts, and Llama"),
        (
            "mixtral",
            {"tensor_parallel_size": 2},
            0,
            "the 5 experts .* 2 proc.* to 1, or leave",
        ),
        ("mixtral", {"tensor_parallel_size": 2}, 2, "num_redundant_experts=2.* to 1 or 3, or"),
        ("mixtral", {"data_parallel_size": 2}, 4, "num_redundant_experts=4.* to 3 or 5, or"),
        ("mixtral", {"data_parallel_size": 2}, 7, "num_redundant_experts=7.* to 5, or"),
        ("mixtral", {"data_parallel_size": 2}, 3, None),
        ("mixtral", {"tensor_parallel_size": 5}, 20, None),
    ],
)
def test_experts_that_cannot_be_divided_evenly(case, settings, redundant, message, tmp_path):
    spec = save_config(tmp_path, *CASES[case])
    settings |= {"enable_expert_parallel": True, "enable_eplb": True}
    settings |= {"eplb_config": {"num_redundant_experts": redundant}}
    expected = nullcontext() if message is None else pytest.raises(ConfigError, match=message)
    with expected:
        config = EngineConfig.from_kwargs(model=str(tmp_path), **settings)
        set_up_worker(config, spec, tmp_path, CPUPlatform(), 64)


def test_blocks_need_the_native_kernels():
    types = {"model.layers.0.mlp.down_proj": "q4_0", "model.layers.1.mlp.down_proj": "q8_0"}
    described = ConfigJson({"quantization_config": {"quant_method": "gguf", "types": types}}, "")
    spec = assign(SPEC, None, described)
    config = EngineConfig.from_kwargs(attention_backend="triton")
    with pytest.raises(ConfigError, match="weights of the form gguf-q4_0, gguf-q8_0, which only"):
        set_up_worker(config, spec, PATH, CPUPlatform(), 64)
    set_up_worker(EngineConfig(), spec, PATH, CPUPlatform(), 64)


@pytest.mark.parametrize("collecting", [True, False])
def test_assembly_leaves_garbage_collection_as_it_was(collecting):
    try:
        if not collecting:
            gc.disable()
        make()
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_what_fails_once_the_workers_are_there_ends_them(monkeypatch):
    order = []

    def fail(executor, kv_cache):
        raise MemoryError("no room")

    monkeypatch.setattr(FakeExecutor, "initialize_kv_cache", fail)
    monkeypatch.setattr(FakeExecutor, "shutdown", lambda executor: order.append("shutdown"))
    with pytest.raises(MemoryError, match="no room"):
        make()
    assert order == ["shutdown"]


def test_grammar_backends_that_are_not_installed_are_left_out(monkeypatch):
    installed = {"llguidance"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    assert assemble.grammar_backends() == ["llguidance"]
    installed.clear()
    assert assemble.grammar_backends() == ["llguidance", "xgrammar"]


def setup_of(config, spec):
    """Return the part of a worker's setup from which the users of memory follow."""
    return SimpleNamespace(config=config, spec=spec, encoder_cache_nbytes=0, rank=ALONE)


@pytest.mark.parametrize(("ranks", "processes"), [(1, 1), (2, 3)])
def test_each_process_of_an_engine_imports_the_plug_ins(ranks, processes, monkeypatch):
    """With several ranks these are the engine's process and one worker process for each rank."""
    monkeypatch.setattr(assemble, "import_plugins", lambda names: 5 * 2**20)
    config = EngineConfig.from_kwargs(model=BUILTIN_MODEL, tensor_parallel_size=ranks)
    nbytes = {it.name: it.nbytes for it in assemble._memory_items(setup_of(config, SPEC))}
    assert nbytes["plug-ins"] == processes * 5 * 2**20


def test_kept_media_are_planned_in_both_processes():
    encoder = object()
    for encoders, is_encoder_decoder, gb, expected in (
        ((encoder,), False, 0.5, 2**30),
        ((encoder,), False, 0.0, None),
        ((encoder,), True, 0.5, None),
        ((), False, 0.5, None),
    ):
        spec = SimpleNamespace(
            encoders=encoders,
            is_encoder_decoder=is_encoder_decoder,
            generates=False,
            vocab_size=10,
        )
        config = EngineConfig.from_kwargs(model=BUILTIN_MODEL, mm_processor_cache_gb=gb)
        items = assemble._memory_items(setup_of(config, spec))
        assert {it.name: it.nbytes for it in items}.get("kept media") == expected


def test_tokenizers_and_grammars_are_planned_where_they_are_loaded():
    def planned(spec, **settings):
        config = EngineConfig.from_kwargs(model=BUILTIN_MODEL, **settings)
        return {it.name: it.nbytes for it in assemble._memory_items(setup_of(config, spec))}

    found = planned(SPEC)
    assert found["tokenizer"] == 384 * SPEC.vocab_size
    assert found["grammars"] > 0
    assert not {"tokenizer", "grammars"} & planned(SPEC, skip_tokenizer_init=True).keys()
    encoder = read_spec(open_checkpoint(resolve_model(BUILTIN_ENCODER)))
    assert "tokenizer" in planned(encoder)
    assert "grammars" not in planned(encoder)
