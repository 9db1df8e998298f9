"""Captured steps: the bits of eager ones, for every family and any sizes of steps."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import _native
from octavo.attention.cpu import CPUAttention
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.kernels.memory import Arena
from octavo.kernels.native import NativeOps
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.layers.step_table import StepSize
from octavo.messages import (
    CoreSamplingParams,
    NewRequestData,
    PromptEmbeds,
    ScheduledRequest,
)
from octavo.models.base import Model
from octavo.models.loader import load_model
from octavo.models.registry import read_spec
from octavo.plan.setup import WorkerSetup
from octavo.structured_output.base import MAX_FORCED
from octavo.system.tensor import HostTensor, from_numpy, full, zeros
from octavo.worker.graphs import CapturedSteps, EagerSteps
from octavo.worker.input_batch import InputBatch, StepBuffers
from octavo.worker.scratch import measure_scratch
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import save_config

BLOCK_SIZE, BLOCKS, MAX_LEN, MAX_REQS, MAX_TOKENS = 8, 12, 96, 3, 64
KEPT = (0, 1)

OPS = NativeOps()


def make_steps(
    folder: Path, dtype: str, progress: _native.StepProgress | None = None
) -> tuple[EagerSteps, InputBatch]:
    spec = read_spec(open_checkpoint(folder))
    model = load_model(
        spec,
        open_checkpoint(folder, "dummy"),
        dtype=dtype,
        max_model_len=MAX_LEN,
        ops=OPS,
    )
    groups = make_kv_cache_groups(spec.caches)
    kv = KVCacheConfig(MAX_REQS * BLOCKS * len(groups) + 1, BLOCK_SIZE, groups, num_states=MAX_REQS)
    backend = CPUAttention()
    memory = [
        full((count, nbytes), 255, "uint8")  # of floats: NaN
        for count, nbytes in kv.tensor_sizes(dtype)
    ]
    caches = [
        cache.view(memory[slot], BLOCK_SIZE, dtype, backend)
        for slot, cache in zip(kv.layer_to_tensor, spec.caches, strict=True)
    ]
    batch = InputBatch(MAX_REQS, MAX_LEN, kv, spec.step_arrays)
    drafts = 0 if any(group.has_states for group in groups) else MAX_FORCED
    return EagerSteps(
        model,
        OPS,
        backend,
        caches,
        [group.cache for group in groups],
        kv.layer_to_group,
        StepBuffers(batch.layout(StepSize(MAX_TOKENS, MAX_REQS, MAX_REQS * (1 + drafts)))),
        KEPT,
        progress=progress,
    ), batch


def capture(eager: EagerSteps, dtype: str, prompt_embeds: bool) -> CapturedSteps:
    settings = {"max_num_seqs": MAX_REQS, "block_size": BLOCK_SIZE}
    setup = WorkerSetup(
        config=EngineConfig.from_kwargs(enable_prompt_embeds=prompt_embeds, **settings),
        spec=eager.model.spec,
        model_path=Path("nowhere"),
        dtype=dtype,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_TOKENS,
        kept_layers=KEPT,
    )
    scratch = measure_scratch(setup, CPUAttention())
    activations, logits = Arena(scratch.activations), Arena(scratch.logits)
    steps = CapturedSteps(
        eager, OPS, activations=activations, logits=logits, prompt_embeds=setup.has_embeds
    )
    assert (activations.peak, logits.peak) == (scratch.activations, scratch.logits)
    return steps


def embeds_of(model: Model, tokens: list[int], dtype: str) -> PromptEmbeds:
    rows = model.embed_input_ids(from_numpy(np.array(tokens)))
    return PromptEmbeds(rows.numpy().tobytes(), dtype, rows.shape[1])


STEPS: list[dict[str, int]] = [
    {"a": 40},
    {"a": 1, "b": 7, "c": 33},
    {"c": 1, "a": 1},
    {"b": 13, "c": 1, "a": 1},
    {"b": 1, "a": 1, "c": 1},
]


# Blocks of every kind, once in float32.
IN_FLOAT32 = ("llama", "gemma3n", "gemma4", "falcon-40b", "gpt2", "bloom", "opt-350m", "bitnet")
IN_FLOAT32 += ("qwen3.5", "lfm2", "mamba2-groups", "falcon-h1")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "bfloat16") for case in CASES), *((case, "float32") for case in IN_FLOAT32)],
)
def test_captured_equals_eager(case: str, dtype: str, tmp_path: Path) -> None:
    """The inputs are ids, and rows of the embedding's table in place of most of them."""
    spec = save_config(tmp_path, *CASES[case])
    results = []
    # Embeddings of their own in each layer need the ids.
    counts = (0, 30) if spec.embed.layer_inputs is None else (0,)
    for captured, with_embeds in product((False, True), counts):
        steps, batch = make_steps(tmp_path, dtype)
        runner = capture(steps, dtype, with_embeds > 0) if captured else steps
        groups = len(batch.block_tables)
        rng = np.random.default_rng(0)
        for i, req_id in enumerate("abc"):
            first = 1 + i * BLOCKS * groups
            blocks = [
                list(range(first + g * BLOCKS, first + (g + 1) * BLOCKS)) for g in range(groups)
            ]
            tokens = rng.integers(3, VOCAB, MAX_LEN).tolist()
            new = NewRequestData(tokens, MAX_LEN, CoreSamplingParams(), 0, state_slots=[i])
            if with_embeds and req_id != "a":
                new.prompt_embeds = embeds_of(steps.model, tokens[:with_embeds], dtype)
                new.token_ids = [0] * with_embeds + tokens[with_embeds:]
            row = batch.add(req_id, new)
            batch.append_blocks(row, blocks)
        seen = []
        for scheduled in STEPS:
            for req_id, count in scheduled.items():
                row = batch.row_of[req_id]
                end = int(batch.num_computed_tokens[row]) + count
                batch.num_tokens[row] = end if req_id != "a" or len(seen) % 8 == 0 else MAX_LEN
            requests = [ScheduledRequest(req_id, n) for req_id, n in scheduled.items()]
            buffers = runner.buffers(sum(scheduled.values()), len(scheduled))
            inputs = batch.gather(requests, {}, buffers)
            assert len(inputs.sampling) in (len(scheduled), len(scheduled) - 1)
            result = runner.run(inputs, None)
            assert result.tokens is None
            assert result.logits.shape == (len(inputs.sampling), VOCAB)
            assert list(result.kept) == list(KEPT)
            kept = list(result.kept.values())
            rows, width = result.hidden.shape
            several = spec.streams
            streams = 1 if several is None else 1 + len(several.make)
            assert {hidden.shape for hidden in kept} == {(rows, streams * width)}
            seen += [OPS.to_host(t).copy() for t in (result.hidden, result.logits, *kept)]
            batch.num_computed_tokens[inputs.rows] += inputs.counts
        results.append(seen)
    for eager, *others in zip(*results, strict=True):
        assert np.isfinite(eager).all()
        for other in others:
            assert (eager == other).all()


@pytest.mark.parametrize("captured", [False, True])
def test_layers_are_told_once_their_keys_and_values_are_there(
    captured: bool, tmp_path: Path
) -> None:
    save_config(tmp_path, *CASES["llama"])
    progress = _native.StepProgress()
    steps, batch = make_steps(tmp_path, "float32", progress)
    runner = capture(steps, "float32", False) if captured else steps
    batch.append_blocks(
        batch.add("a", NewRequestData([5] * MAX_LEN, MAX_LEN, CoreSamplingParams(), 0)),
        [list(range(1, BLOCKS + 1))],
    )
    layers = len(steps.caches)

    def written(cache: HostTensor) -> Any:
        return cache.numpy()[1 : MAX_TOKENS // BLOCK_SIZE + 1]

    def follow() -> list[Any]:
        seen = []
        for layer, cache in enumerate(steps.caches):
            progress.wait(layer + 1)
            seen.append(written(cache).copy())
        return seen

    inputs = batch.gather([ScheduledRequest("a", MAX_TOKENS)], {}, runner.buffers(MAX_TOKENS, 1))
    with ThreadPoolExecutor(1) as pool:
        progress.reset()  # recording reports nothing
        beside = pool.submit(follow)
        assert not beside.done()
        runner.run(inputs, None)
        for seen, cache in zip(beside.result(60), steps.caches, strict=True):
            assert np.isfinite(seen).all()
            assert (seen == written(cache)).all()
        progress.wait(layers)


def test_a_plan_computes_nothing_while_it_records() -> None:
    ops, plan = NativeOps(), _native.Plan()
    x, arena = full((4, 32), 1, "float32"), Arena(4096)
    with ops.record(plan, arena):
        y = ops.add(x, x)
        z = ops.relu(y)
    assert len(plan) == 2
    assert z.numpy().tolist() == [[0] * 32] * 4
    plan.run(3, 0, 0)
    assert z.numpy().tolist() == [[2] * 32] * 3 + [[0] * 32]
    assert ops.add(x, x).numpy().sum() == 256, "calls are carried out again"


@pytest.mark.parametrize("index", [0, 1, 2])
def test_calls_have_a_share_of_the_rows(index: int) -> None:
    ops, plan = NativeOps(), _native.Plan()
    x, y = full((8, 32), 1, "float32"), zeros(8, 32, dtype="float32")
    with ops.record(plan, Arena(4096)):
        _native.share_rows(index, 3)
        ops.add(x[index::3], x[index::3], y[index::3])
        _native.share_rows(0, 1)
        z = ops.relu(x)
    for rows in (8, 7, 3, 2, 1, 0):
        y.numpy()[...] = z.numpy()[...] = 0
        plan.run(rows, 0, 0)
        assert (y[:rows][index::3].numpy() == 2).all()
        assert y.numpy().sum() == 64 * len(range(index, rows, 3))
        assert z.numpy().sum() == 32 * rows
    _native.share_rows(1, 2)  # no recording: no effect
    assert ops.add(x, x).numpy().sum() == 512


def test_calls_have_the_rows_of_the_dimension_that_they_are_bound_to() -> None:
    ops, plan = NativeOps(), _native.Plan()
    x, arena = full((4, 32), 1, "float32"), Arena(4096)
    with ops.record(plan, arena):
        tokens = ops.relu(x)
    plan.bind("samples")
    with ops.record(plan, arena):
        samples = ops.relu(x)
    for sizes in ((3, 4, 1), (4, 4, 0)):
        tokens.numpy()[...] = samples.numpy()[...] = 0
        plan.run(*sizes)
        assert tokens.numpy()[:, 0].tolist() == [1.0] * sizes[0] + [0.0] * (4 - sizes[0])
        assert samples.numpy()[:, 0].tolist() == [1.0] * sizes[2] + [0.0] * (4 - sizes[2])
    with pytest.raises(ValueError, match="no dimension of a step: pages"):
        plan.bind("pages")


def test_recording_ends_with_an_error() -> None:
    ops, plan = NativeOps(), _native.Plan()
    with pytest.raises(ZeroDivisionError), ops.record(plan, Arena(64)):
        raise ZeroDivisionError
    one = full((1, 1), 1, "float32")
    assert ops.add(one, one).numpy().item() == 2
    assert len(plan) == 0
