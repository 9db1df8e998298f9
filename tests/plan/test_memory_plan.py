import math
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.attention.base import KV_CACHE_DTYPES
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.errors import ConfigError
from octavo.layers.step_table import StepSize
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.plan.memory import MemoryBudget, MemoryItem, Scratch
from octavo.plan.memory_plan import (
    MemoryPlan,
    make_memory_plan,
    resolve_dtype,
    resolve_kv_cache_dtype,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
)
from octavo.plan.setup import WorkerSetup
from octavo.platforms import cpu
from octavo.sampling.sizes import state_nbytes
from octavo.structured_output.base import MAX_FORCED
from octavo.system.tensor import itemsize
from octavo.worker.input_batch import InputBatch
from tests.attention.backends import make_backend
from tests.triton import needs_triton

SPEC = read_spec(open_checkpoint(resolve_model(BUILTIN_MODEL)))


SCRATCH = Scratch(activations=7_000_000, logits=5_000_000, kernels=300_000)


def plan(scratch=SCRATCH, request_memory=None, warm_spare=False, **kwargs):
    config = EngineConfig.from_kwargs(**kwargs)
    setup = WorkerSetup(
        config=config,
        spec=SPEC,
        model_path=Path("nowhere"),
        dtype=resolve_dtype(config, SPEC),
        max_model_len=resolve_max_model_len(config, SPEC),
        max_num_batched_tokens=2048,
    )
    return make_memory_plan(
        config,
        SPEC,
        cpu.memory_budget(setup, (scratch,)),
        max_num_batched_tokens=2048,
        request_memory=request_memory,
        warm_spare=warm_spare,
    )


def test_parts_add_up_and_stay_below_the_limit():
    result, kv_cache = plan()
    assert result.total <= result.limit
    assert result.kv_cache == kv_cache.num_blocks * result.block_nbytes
    per_token = 2 * len(SPEC.layers) * SPEC.caches[0].num_kv_heads * SPEC.caches[0].head_size * 2
    assert result.block_nbytes == 16 * per_token
    for word in ("weights", "KV cache", "logits", f"{result.num_blocks:,} blocks"):
        assert word in result.report()


@pytest.mark.parametrize(("layout", "spares"), [({}, 1), ({"tensor_parallel_size": 2}, 3)])
def test_a_spare_counts_with_its_workers(layout, spares):
    assert plan(request_memory=2**20, **layout)[0].nbytes("warm spare") == 0
    result, _ = plan(request_memory=2**20, warm_spare=True, **layout)
    assert result.nbytes("warm spare") == spares * 96 * 2**20


def test_processes_for_grammars_count_beside_the_engines_own():
    alone, _ = gpu_plan(max_num_seqs=4096)
    config = EngineConfig.from_kwargs(max_num_seqs=4096)
    result, _ = make_memory_plan(
        config,
        SPEC,
        GPU,
        max_num_batched_tokens=2048,
        items=[MemoryItem("grammars", 200 * 2**20, "serving", " at most")],
    )
    assert result.steady < alone.steady
    assert result.total - result.steady == 200 * 2**20
    assert result.total <= result.limit
    assert "grammars          200.0 MiB at most" in result.report()


def test_every_part_is_what_is_taken():
    """A plan that is too small fails later, and one that is too large wastes memory."""
    rows, length = 3, 100
    result, kv_cache = plan(max_num_seqs=rows, max_model_len=length, dtype="float32")
    vocab = SPEC.vocab_size
    assert result.nbytes("runtime") == cpu.RUNTIME_NBYTES
    assert result.nbytes("weights") == SPEC.weight_nbytes("float32", length)
    assert result.nbytes("activations") == 7_000_000 + 300_000
    assert result.nbytes("logits") == 2 * 5_000_000  # of a step, and of its prompt tokens
    # The sampler's workspace: 96 bytes for each of a group of rows.
    samples = rows * (1 + MAX_FORCED)
    assert result.nbytes("sampling") == 96 * samples * vocab
    assert result.nbytes("loading") == SPEC.loading_nbytes("float32")
    # A row in the worker: its tokens, its blocks, its state; and the inputs of a step.
    batch = InputBatch(rows, length, kv_cache)
    arrays = [batch.token_ids, batch.block_tables]
    assert result.nbytes("rows") == (
        sum(array.nbytes for array in arrays)
        + batch.layout(StepSize(2048, rows, samples)).nbytes
        + state_nbytes(rows, vocab)
    )
    assert result.num_blocks == rows * -(-length // 16) + 1
    assert result.steady == sum(
        (
            result.nbytes("runtime"),
            result.nbytes("weights"),
            result.nbytes("activations"),
            result.nbytes("logits"),
            result.nbytes("rows"),
            result.num_blocks * result.block_nbytes,
        )
    )
    # Loading is over when steps begin.
    assert result.total == result.steady + result.nbytes("sampling")


def test_several_engines_have_a_share_each(monkeypatch):
    """Available memory, the cache's default size, and parts that exist once are divided."""
    monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**36, 2**35))
    how = {"request_memory": 2**30, "max_num_seqs": 4096}
    one, _ = plan(**how)
    four, _ = plan(**how, data_parallel_size=4)
    assert four.limit == one.limit // 4
    for part in ("server", "requests"):
        assert four.nbytes(part) == one.nbytes(part) // 4 > 0
    assert four.kv_cache == pytest.approx(one.kv_cache / 4, rel=0.01)
    assert four.nbytes("weights") == one.nbytes("weights")
    explicit, _ = plan(data_parallel_size=4, kv_cache_memory_bytes="64M")
    assert explicit.kv_cache == pytest.approx(64 * 2**20, rel=0.01)


def test_what_does_not_fit_a_share_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**36, 300 * 2**20))
    plan(max_num_seqs=1)
    with pytest.raises(ConfigError, match=r"of what is free, among 4 engines\)"):
        plan(max_num_seqs=1, data_parallel_size=4)


def test_a_limit_that_is_given_is_heeded():
    config = EngineConfig.from_kwargs(data_parallel_size=2, max_num_seqs=4)
    setup = WorkerSetup(
        config=config,
        spec=SPEC,
        model_path=Path("nowhere"),
        dtype="bfloat16",
        max_model_len=SPEC.max_model_len,
        max_num_batched_tokens=2048,
    )
    budget = replace(cpu.memory_budget(setup, (SCRATCH,)), available=0)
    result, _ = make_memory_plan(config, SPEC, budget, max_num_batched_tokens=2048, limit=2**30)
    assert result.limit == 2**30


def test_loading_counts_where_it_takes_more_than_steps():
    result, _ = plan(Scratch(1000, 1000, 0), max_num_seqs=1)
    between = result.nbytes("loading") - result.nbytes("activations") - result.nbytes("logits")
    assert between > 0
    assert result.total == result.steady + between


@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 90}])
def test_the_last_byte_counts(settings, monkeypatch):
    """A plan fits memory of exactly its size, and not a byte less."""
    settings = settings | {"max_num_seqs": 1, "max_model_len": 1024, "gpu_memory_utilization": 1.0}
    needed = plan(**settings)[0]
    assert needed.blocks_per_request == 64

    def with_memory(nbytes):
        monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**40, nbytes))
        return plan(**settings)[0]

    assert with_memory(needed.total) == replace(needed, limit=needed.total)
    with pytest.raises(ConfigError, match=r"does not fit|needs 64, and one is kept free"):
        with_memory(needed.total - 1)


def test_one_block_too_few_is_refused():
    settings = {"max_model_len": 1024, "max_num_seqs": 5}
    assert plan(num_gpu_blocks_override=65, **settings)[0].max_concurrency == 1
    with pytest.raises(ConfigError, match="max_model_len=1008"):
        plan(num_gpu_blocks_override=64, **settings)
    size = plan(**settings)[0].block_nbytes
    assert plan(kv_cache_memory_bytes=65 * size, **settings)[0].num_blocks == 65
    with pytest.raises(ConfigError, match="max_model_len=1008"):
        plan(kv_cache_memory_bytes=65 * size - 1, **settings)


def test_the_kv_cache_is_no_larger_than_all_requests_can_use():
    result, _ = plan(max_num_seqs=2, max_model_len=64)
    assert result.num_blocks == 2 * 4 + 1
    assert result.max_concurrency == 2


def test_float32_doubles_the_cache_block():
    assert plan(dtype="float32")[0].block_nbytes == 2 * plan(dtype="bfloat16")[0].block_nbytes


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize(
    "backend", ["cpu", "reference", pytest.param("triton", marks=needs_triton)]
)
def test_a_block_of_bytes_is_as_large_as_planned(name, backend):
    result, kv_cache = plan(kv_cache_dtype=name, kv_cache_memory_bytes="8M")
    dtype = KV_CACHE_DTYPES[name]
    if (backend, name) == ("triton", "int8"):
        pytest.skip("refused by Triton attention")
    shape = make_backend(backend, 64).kv_cache_shape(
        3, 16, SPEC.caches[0].num_kv_heads, SPEC.caches[0].head_size, dtype
    )
    assert 3 * result.block_nbytes == len(kv_cache.tensor_sizes("float32")) * math.prod(
        shape
    ) * itemsize(dtype)
    assert result.num_blocks > 1.85 * plan(kv_cache_memory_bytes="8M")[0].num_blocks


def test_given_bytes_and_blocks_are_kept():
    result, _ = plan(kv_cache_memory_bytes="8M")
    assert 8 * 2**20 - result.block_nbytes < result.kv_cache <= 8 * 2**20
    assert plan(num_gpu_blocks_override=200)[0].num_blocks == 200


def test_too_little_memory_is_refused_with_what_fits(monkeypatch):
    with pytest.raises(ConfigError, match="max_model_len=1584"):
        plan(num_gpu_blocks_override=100, max_model_len=2048)
    assert plan(num_gpu_blocks_override=100, max_model_len=-1)[0].max_model_len == 1584
    with pytest.raises(ConfigError, match="does not fit"):
        plan(kv_cache_memory_bytes="900T")
    monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**30, 2**27))
    with pytest.raises(ConfigError, match="without the KV cache"):
        plan()


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ConfigError, match=str(SPEC.max_model_len)):
        plan(max_model_len=SPEC.max_model_len + 1)


def test_budget_is_raised_to_what_other_settings_need():
    spec = replace(SPEC, max_model_len=5000)
    layer = spec.layers[0]
    attention, mlp = layer.blocks
    whole = layer.with_blocks([replace(attention, causal=False), mlp])
    encoder = replace(spec, layers=(whole,))

    def budget(spec=spec, **kwargs):
        return resolve_max_num_batched_tokens(EngineConfig.from_kwargs(**kwargs), 2048, spec)

    assert budget() == 2048
    assert budget(max_num_seqs=4000) == 4000
    assert budget(enable_chunked_prefill=False) == 5000
    assert budget(max_num_batched_tokens=300) == 300
    assert budget(encoder) == 5000
    assert budget(encoder, max_model_len=3000) == 3000


GPU = MemoryBudget(
    source="the GPU",
    available=2000 * 2**20,
    most_kv_cache=2000 * 2**20,
    items=(
        MemoryItem("runtime", 300 * 2**20),
        MemoryItem("weights", 100 * 2**20),
        MemoryItem("activations", 50 * 2**20, "step"),
    ),
)


def gpu_plan(**kwargs):
    return make_memory_plan(
        EngineConfig.from_kwargs(**kwargs), SPEC, GPU, max_num_batched_tokens=2048
    )


def test_on_a_gpu_the_cache_takes_what_was_measured_to_be_left():
    result, kv_cache = gpu_plan(gpu_memory_utilization=0.5, max_num_seqs=4096)
    left = (1000 - 300 - 100 - 50) * 2**20
    assert result.num_blocks == kv_cache.num_blocks == left // result.block_nbytes
    assert result.total <= result.limit == 1000 * 2**20
    assert f"{result.num_blocks:,} blocks" in result.report()


def test_on_a_gpu_no_more_than_all_requests_can_use():
    assert gpu_plan(max_num_seqs=2, max_model_len=64)[0].num_blocks == 2 * 4 + 1


@pytest.mark.parametrize(
    ("utilization", "settings", "message"),
    [
        (0.2, {}, "needs 450 MiB without the KV cache, but only 400 MiB may be used.*of the GPU"),
        (0.5, {"kv_cache_memory_bytes": "600M"}, "does not fit: the model leaves 550 MiB"),
        (0.2253, {}, "Set max_model_len="),
    ],
)
def test_on_a_gpu_too_little_memory_names_the_fix(utilization, settings, message):
    with pytest.raises(ConfigError, match=message):
        gpu_plan(gpu_memory_utilization=utilization, **settings)


MIB = 2**20
PLAN = MemoryPlan(
    limit=3000 * MIB,
    items=(
        MemoryItem("runtime", 200 * MIB),
        MemoryItem("weights", 1500 * MIB),
        MemoryItem("activations", 40 * MIB + MIB // 2, "step"),
        MemoryItem("logits", 30 * MIB, "step"),
        MemoryItem("loading", 100 * MIB, "loading", ", freed before the first step"),
        MemoryItem("rows", 2 * MIB),
        MemoryItem("KV cache", 600 * MIB, note=" = 1,201 blocks"),
    ),
    num_blocks=1201,
    block_size=16,
    block_nbytes=MIB // 2,
    max_model_len=8000,
    blocks_per_request=500,
)


def test_the_whole_report():
    lines = [
        "memory plan: 2,402 MiB of 3,000 MiB",
        "  runtime           200.0 MiB",
        "  weights         1,500.0 MiB",
        "  activations        40.5 MiB",
        "  logits             30.0 MiB",
        "  (loading          100.0 MiB, freed before the first step)",
        "  rows                2.0 MiB",
        "  KV cache          600.0 MiB = 1,201 blocks",
    ]
    assert PLAN.report() == "\n".join(lines)
    server = MemoryItem("server", 256 * MIB, "serving", " for its own process")
    served = replace(PLAN, items=(*PLAN.items, MemoryItem("requests", 64 * MIB, "serving"), server))
    lines[0] = "memory plan: 2,722 MiB of 3,000 MiB"
    lines += [
        "  requests           64.0 MiB",
        "  server            256.0 MiB for its own process",
    ]
    assert served.report() == "\n".join(lines)
    assert served.steady == PLAN.steady


def test_the_plan_beside_what_is_resident():
    assert PLAN.compare(1000 * MIB) == (
        "resident memory: 1,000 MiB; planned 2,372 MiB (runtime 200, weights 1,500, "
        "activations 40, logits 30, rows 2, KV cache 600); buffers and KV cache "
        "become resident as they are used"
    )


def test_a_servers_plan_has_its_own_process_and_the_requests(monkeypatch):
    settings = {"max_num_seqs": 2, "max_model_len": 64}

    def made(**kwargs):
        return plan(**settings, **kwargs)[0]

    # Not the free memory: other programs allocate and free meanwhile.
    monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**40, 2**34))
    alone, served = made(), made(request_memory=50 * MIB)
    assert served.items[: len(alone.items)] == alone.items
    assert (served.nbytes("server"), served.nbytes("requests")) == (256 * MIB, 50 * MIB)
    assert served.total == alone.total + 306 * MIB
    assert alone.nbytes("runtime") == cpu.RUNTIME_NBYTES
    # With just as much as that, all of it fits; without the server more would.
    monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**40, served.total))
    settings["gpu_memory_utilization"] = 1.0
    assert made(request_memory=50 * MIB) == replace(served, limit=served.total)
    with pytest.raises(ConfigError):
        made(request_memory=50 * MIB + served.kv_cache)


def test_without_a_size_the_cache_takes_four_gibibytes_at_most(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**41, 2**40))
    result, _ = plan(max_num_seqs=4096)
    assert 4 * 2**30 - result.block_nbytes < result.kv_cache <= 4 * 2**30
    assert result.limit == int(2**40 * EngineConfig().cache.gpu_memory_utilization)


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5, 6, 7, 8, 9, 10, 31, 64, 100, 101, 127])
def test_the_longest_that_fits_is_found(num_blocks):
    longest = plan(num_gpu_blocks_override=num_blocks, max_model_len=-1)[0]
    assert longest.max_model_len == (num_blocks - 1) * 16
    assert longest.blocks_per_request == num_blocks - 1
    assert longest.max_concurrency == 1
    for length in (2048, 2047, 2045, 2041, 2033, 2018):
        with pytest.raises(ConfigError, match=f"Set max_model_len={(num_blocks - 1) * 16} "):
            plan(num_gpu_blocks_override=num_blocks, max_model_len=length)


def test_refusals_in_full(monkeypatch):
    def refusal(**settings):
        with pytest.raises(ConfigError) as caught:
            plan(**settings)
        return str(caught.value)

    size = plan()[0].block_nbytes
    assert refusal(num_gpu_blocks_override=1) == (
        f"The KV cache has 1 blocks of {size} bytes: too few for any request. Raise "
        "kv_cache_memory_bytes or num_gpu_blocks_override."
    )
    assert refusal(num_gpu_blocks_override=100, max_model_len=2048) == (
        "The KV cache has 100 blocks, but a single request of max_model_len=2048 needs 128, and "
        "one is kept free. Set max_model_len=1584 (the largest that fits) or less, or increase the "
        f"cache to {129 * size / MIB:,.1f} MiB."
    )
    needed = plan(max_num_seqs=1, max_model_len=16)[0]
    monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**40, 100 * MIB))
    before = needed.total - needed.kv_cache
    assert refusal(max_num_seqs=1, max_model_len=16, gpu_memory_utilization=0.5) == (
        f"{BUILTIN_MODEL} needs {before / MIB:,.0f} MiB without the KV cache, but only 50 MiB may "
        "be used (50% of what is free). Use a smaller model or dtype, or lower "
        "max_num_batched_tokens, max_num_seqs or request_memory_bytes."
    )
    monkeypatch.setattr(cpu, "cpu_memory", lambda node: (2**40, before + 10 * MIB))
    settings = {"max_num_seqs": 1, "max_model_len": 16, "gpu_memory_utilization": 1.0}
    assert refusal(kv_cache_memory_bytes=20 * MIB, **settings) == (
        f"A KV cache of {20 * MIB // size * size / MIB:,.0f} MiB does not fit: the model leaves "
        "10 MiB. Lower kv_cache_memory_bytes or num_gpu_blocks_override."
    )


@pytest.mark.parametrize(
    ("asked", "dtype", "found"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("fp8", "bfloat16", "fp8_e4m3"),
        ("fp8_e5m2", "float32", "fp8_e5m2"),
        ("int8", "float32", "int8"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", None),
        ("float16", "float32", None),
    ],
)
def test_the_type_of_the_cache(asked, dtype, found):
    config = EngineConfig.from_kwargs(kv_cache_dtype=asked)
    if found is None:
        with pytest.raises(ConfigError, match=f"kv_cache_dtype={asked} is not .* in {dtype}"):
            resolve_kv_cache_dtype(config, dtype)
    else:
        assert resolve_kv_cache_dtype(config, dtype) == found


def test_types_and_lengths_of_the_model():
    def config(**settings):
        return EngineConfig.from_kwargs(**settings)

    assert resolve_dtype(config(), replace(SPEC, dtype="float16")) == "float16"
    assert resolve_dtype(config(dtype="float32"), replace(SPEC, dtype="float64")) == "float32"
    with pytest.raises(ConfigError, match="is in float64"):
        resolve_dtype(config(), replace(SPEC, dtype="float64"))
    most = SPEC.max_model_len
    for asked, found in ((None, most), (-1, most), (most, most), (most - 1, most - 1), (1, 1)):
        assert resolve_max_model_len(config(max_model_len=asked), SPEC) == found
    with pytest.raises(ConfigError, match=f"max_model_len={most + 1} is more than the {most} pos"):
        resolve_max_model_len(config(max_model_len=most + 1), SPEC)
