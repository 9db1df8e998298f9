"""Parts of models: ranks together compute the bits of a single one."""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ConfigError, ModelError
from octavo.kernels.native import NativeOps
from octavo.layers.expert_exchange import ExpertExchange
from octavo.layers.shared import SharedBuffers
from octavo.models.decoder import DecoderModel
from octavo.models.loader import load_model
from octavo.models.spec import divide_layers
from octavo.models.weight_cache import weights_key
from octavo.quantization.int4 import SMALL
from octavo.system.distributed import GroupMemory, Rank
from octavo.worker.expert_group import ExpertGroup, ExpertWave
from tests.gguf_files import convert
from tests.models.cases import CASES, MIXTURES
from tests.models.configs.recurrent import QWEN3_5
from tests.models.configs.sizes import VOCAB
from tests.models.configs.with_towers import TEXT_PARTS
from tests.models.harness import Runner, load, make_hf, save_config, spec_of

TOKENS = 64


def script() -> list[dict[int, list[int]]]:
    """Return prompts in chunks, then tokens one by one, with two requests out of step."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (2, 40), generator=generator).tolist()
    return [
        {0: ids[0][:17]},
        {0: ids[0][17:20], 1: ids[1][:30]},
        *({0: [ids[0][20 + i]], 1: [ids[1][30 + i]]} for i in range(4)),
    ]


class SlowOps(NativeOps):
    def sum_parts(self, *args, **kwargs):
        time.sleep(0.002)
        return super().sum_parts(*args, **kwargs)


def run(model, join) -> list[Tensor]:
    runner, results = Runner(model, 2, TOKENS), []
    for scheduled in script():
        results += [logits.clone() for logits in runner.step(scheduled).values()]
        join()
    return results


def run_ranks(
    folder: Path,
    size: int,
    dtype: str,
    quantization: str | None,
    *,
    reduces: bool = False,
    splits_rows: bool = False,
    splits_experts: bool = False,
    slow: int | None = None,
) -> list[Tensor]:
    """Return rank 0's logits; the ranks are threads, and the sums of one of them may be slow."""
    models, nbytes = [], []
    spec = spec_of(folder, quantization=quantization)
    for index in range(size):
        rank = Rank(index, size, 0, 1, reduces, splits_rows, splits_experts)
        buffers = SharedBuffers(
            rank, dict.fromkeys(("tokens", "samples", "prompt_logprobs"), TOKENS), dtype
        )
        model = load_model(
            spec.split(rank),
            open_checkpoint(folder),
            dtype=dtype,
            ops=SlowOps() if index == slow else NativeOps(),
            shared=buffers,
        )
        models.append((model, buffers))
        nbytes.append(buffers.nbytes)
    assert len(set(nbytes)) == 1
    descriptor = GroupMemory.create(nbytes[0])
    try:
        with ThreadPoolExecutor(size) as threads:
            futures = []
            for model, buffers in models:
                memory = GroupMemory(descriptor, nbytes[0], buffers.rank, timeout=100)
                buffers.attach(memory, 0)
                futures.append(threads.submit(run, model, memory.barrier))
            results = [future.result() for future in futures]
            return results[0]
    finally:
        os.close(descriptor)


def check(
    case: str, tmp_path: Path, size: int, dtype: str, form: str | None, **more: int
) -> list[Tensor]:
    architecture, config = (CASES | TEXT_PARTS)[case]
    make_hf(architecture, **config | more).save_pretrained(tmp_path)
    whole = load(tmp_path, dtype, quantization=form)
    expected = run(whole, lambda: None)
    got = run_ranks(tmp_path, size, dtype, form)
    assert len(got) == len(expected) > 8
    assert all(map(torch.equal, got, expected))
    assert torch.cat(expected).isfinite().all()
    return expected


# Layers of every structure, with sums over ranks.
SUMS = ("llama", "gpt2", "bloom", "falcon-7b", "falcon-40b", "opt", "olmo2", "gemma2", "gemma3n")
SUMS += (
    "gemma4",
    "cohere",
    "phi",
    "stablelm-parallel",
    "glm4",
    "bitnet",
    "qwen3.5",
    "lfm2",
    "mamba2",
)
SUMS += ("falcon-h1", "nemotron-h", "olmo-hybrid")


@pytest.mark.parametrize("case", [*CASES, "muse-glimmer"])
def test_ranks_have_the_bits_of_one(case: str, tmp_path: Path) -> None:
    """With all rows of norms on each rank, or with sequence parallelism, exact or not."""
    dtype = "bfloat16"
    expected = check(case, tmp_path, 2, dtype, None)
    if case == "muse-glimmer":
        return
    got = run_ranks(tmp_path, 2, dtype, None, splits_rows=True)
    assert all(map(torch.equal, got, expected))
    if case not in SUMS:
        return
    sums = run_ranks(tmp_path, 2, dtype, None, reduces=True)
    got = run_ranks(tmp_path, 2, dtype, None, reduces=True, splits_rows=True)
    assert all(map(torch.equal, got, sums))


@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_experts_are_divided(case: str, form: str | None, tmp_path: Path) -> None:
    """Expert parallelism: the same bits, also where the ranks have different numbers of experts."""
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    expected = run(load(tmp_path, "bfloat16", quantization=form), lambda: None)
    for size, splits_rows in ((2, False), (4, True)):
        got = run_ranks(
            tmp_path, size, "bfloat16", form, splits_rows=splits_rows, splits_experts=True
        )
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("case", MIXTURES)
def test_engines_divide_the_experts(case: str, tmp_path: Path) -> None:
    """Engines with requests of their own: each has the bits of one process, in every order."""
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    expected = run(load(tmp_path, "bfloat16"), lambda: None)
    spec, memory, left = spec_of(tmp_path), tmp_path / "memory", [0, 1]
    memory.touch()

    def compute(index: int) -> list[Tensor]:
        rank = Rank(index, 2)
        exchange = ExpertExchange(rank, TOKENS, "bfloat16")
        model = load_model(
            spec.split_experts(rank),
            open_checkpoint(tmp_path),
            dtype="bfloat16",
            ops=NativeOps(),
            exchange=exchange,
        )
        assert isinstance(model, DecoderModel)
        group, results = ExpertGroup(str(memory), exchange), []
        wave = ExpertWave([str(memory)], rank)
        runner = Runner(model, 2, TOKENS)
        for scheduled in script()[index:]:  # different numbers of steps
            step = partial(runner.step, scheduled)
            results += [logits.clone() for logits in group.run(step).values()]
        left.remove(index)
        while left:
            if wave.wanted:
                group.serve(model.serve_experts)
        return results

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(compute, range(2))
    assert all(map(torch.equal, first, expected))
    assert len(second) < len(first)


@pytest.mark.parametrize(
    "case",
    [
        *("llama", "gemma3n", "gemma4", "olmo-hybrid", "mamba", "rwkv7", "qwen2-moe"),
        "deepseek-v3",
        "kimi-linear",
    ],
)
def test_sums_of_ranks(case: str, tmp_path: Path) -> None:
    """Ranks that sum their results wait for each other before a buffer is filled again."""
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    sums = run_ranks(tmp_path, 2, "float32", None, reduces=True)
    torch.testing.assert_close(sums, run(load(tmp_path), lambda: None), atol=1e-3, rtol=1e-3)


def test_successive_blocks_of_one_kind(tmp_path: Path) -> None:
    """A rank does not fill a buffer that a slower one still reads."""
    architecture, config = CASES["nemotron-h"]
    kinds = ["full_attention"] * 3 + ["mlp"] * 3 + ["linear_attention"] * 3
    make_hf(architecture, **config | {"layers_block_type": kinds}).save_pretrained(tmp_path)
    sums = run_ranks(tmp_path, 2, "float32", None, reduces=True)
    torch.testing.assert_close(sums, run(load(tmp_path), lambda: None), atol=1e-3, rtol=1e-3)
    for rank in range(2):
        slow = run_ranks(tmp_path, 2, "float32", None, reduces=True, slow=rank)
        assert all(map(torch.equal, slow, sums))


@pytest.mark.parametrize("size", [2, 3])
def test_a_norm_before_the_gate(size: int, tmp_path: Path) -> None:
    architecture, config = CASES["falcon-h1-norm"]
    config = config | {"mamba_norm_before_gate": True}
    make_hf(architecture, **config).save_pretrained(tmp_path)
    whole = run(load(tmp_path), lambda: None)
    assert all(map(torch.equal, run_ranks(tmp_path, size, "float32", None), whole))
    sums = run_ranks(tmp_path, size, "float32", None, reduces=True)
    torch.testing.assert_close(sums, whole, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("size", [2, 3])
def test_heads_in_the_order_of_a_gguf_file(size: int, tmp_path: Path) -> None:
    """The inputs of a rank's heads are not together; a block has inputs of two heads."""
    config = QWEN3_5 | {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    config |= {"linear_value_head_dim": 16}
    file = tmp_path / "m.gguf"
    convert(make_hf("Qwen3_5ForCausalLM", **config), "qwen35", file, {"ssm_out": "q8_0"})
    got = run_ranks(file, size, "bfloat16", None)
    assert all(map(torch.equal, got, run(load(file, "bfloat16"), lambda: None)))
    with pytest.raises(ConfigError, match="tensor_parallel_mode=reduce is not supported with GGUF"):
        spec_of(file).split(Rank(0, size, reduces=True))


@pytest.mark.parametrize("case", ["llama", "gemma2", "bloom", "qwen3-next", "minicpm3"])
@pytest.mark.parametrize("form", [None, "int8", "int4", "fp8"])
def test_types_and_forms(case: str, form: str | None, tmp_path: Path) -> None:
    check(case, tmp_path, 2, "float32", form)


@pytest.mark.parametrize("case", ["llama", "gemma2", "bloom", "olmo2"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 2), (10, 2, 3), (8, 2, 7), (7, 1, 7)]
)
def test_uneven_heads(case: str, heads: int, kv_heads: int, size: int, tmp_path: Path) -> None:
    more = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    if case == "bloom":
        more = {"n_head": heads, "hidden_size": 8 * heads}
    check(case, tmp_path, size, "bfloat16", None, **more)


@pytest.mark.parametrize("size", [3, 6])
def test_more_ranks(size: int, tmp_path: Path) -> None:
    check("bloom", tmp_path, size, "bfloat16", None)


def test_keys_of_one_head_are_several_ranks(tmp_path: Path) -> None:
    check("llama", tmp_path, 4, "bfloat16", None)


@pytest.mark.parametrize("heads", [(9, 3), (12, 1), (12, 4), (14, 2), (6, 6)])
def test_heads_of_all_ranks_are_all_heads(heads: tuple[int, int], tmp_path: Path) -> None:
    """Each query head occurs once, with its head of keys and values; rank 0 has most."""
    architecture, config = CASES["llama"]
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    sizes["hidden_size"] = 4 * heads[0]
    make_hf(architecture, **config | sizes).save_pretrained(tmp_path)
    mixer, group = spec_of(tmp_path).layers[0].blocks[0], heads[0] // heads[1]
    for size in range(2, heads[0] + 1):
        parts = [mixer.split(Rank(index, size)) for index in range(size)]
        had = [range(it.first_head, it.first_head + it.num_heads) for it in parts]
        assert [head for some in had for head in some] == list(range(heads[0]))
        for part, some in zip(parts, had, strict=True):
            (_, (first, end), _) = part.qkv_proj.parts
            first, end = (at // mixer.head_size - heads[0] for at in (first, end))
            assert [head // group for head in (some[0], some[-1])] == [first, end - 1]
            assert part.num_heads % part.num_kv_heads == 0
            assert part.num_heads <= parts[0].num_heads
            assert part.num_kv_heads <= parts[0].num_kv_heads


@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom", "mpt"])
def test_parts_are_all_of_the_whole(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    parts = [spec.split(Rank(index, 2)) for index in range(2)]
    whole = {weight.name: weight for weight in spec.weights()}
    for weights in zip(*(part.weights() for part in parts), strict=True):
        name = weights[0].name
        rows = sum(weight.shape[0] for weight in weights)
        if weights[0].whole is not None:
            assert rows == whole[name].shape[0] == weights[0].whole_rows


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size=5 is more than the 4 attention"):
        spec_of(tmp_path).split(Rank(0, 5))


def test_more_ranks_than_heads_of_rwkv7(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=5 is more than the 4 heads of"):
        save_config(tmp_path, *CASES["rwkv7"]).split(Rank(0, 5))


def test_ranks_without_any_outputs_are_refused(tmp_path: Path) -> None:
    architecture, config = CASES["llama"]
    make_hf(architecture, **config | {"intermediate_size": 3}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"too large for the 6 outputs of mlp\.gate_proj"):
        spec_of(tmp_path).split(Rank(3, 4))


def test_parts_of_int4_weights_are_written_as_the_whole(tmp_path: Path) -> None:
    """They are small enough for int8 by themselves."""
    sizes = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}
    check("llama", tmp_path, 2, "bfloat16", "int4", **sizes)
    names = {w.name: w for w in spec_of(tmp_path).split(Rank(0, 2)).weights()}
    part = names["layers.0.o_proj.weight"]
    assert part.shape[0] * part.shape[1] < SMALL <= part.whole_rows * part.shape[1]


def test_ranks_keep_their_packed_weights_apart(tmp_path: Path) -> None:
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    spec, checkpoint = spec_of(tmp_path), open_checkpoint(tmp_path)
    ranks = [Rank(0, 1), Rank(0, 2), Rank(1, 2)]
    keys = [weights_key(spec.split(r), checkpoint, "float32") for r in ranks]
    assert len(set(keys)) == 3


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    other = replace(spec_of(tmp_path), model_class="somewhere:Model")
    with pytest.raises(ConfigError, match="not supported with LlamaForCausalLM"):
        other.split(Rank(0, 2))


@pytest.mark.parametrize("case", ["llama", "llama-mqa-tied-bias", "gpt2", "opt-350m"])
def test_stages_have_every_weight_once_but_for_a_tied_table(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    stages = [spec.stage(*layers) for layers in divide_layers(spec, 3, None)]
    names = [s.name for stage in stages for w in stage.weights() for s in w.sources]
    whole = {s.name for w in spec.weights() for s in w.sources}
    assert set(names) == whole
    assert len(names) - len(whole) == spec.tied
    for stage in stages:
        load_model(stage, open_checkpoint(tmp_path), dtype="float32", ops=NativeOps())


@pytest.mark.parametrize(
    ("case", "num_stages"),
    [
        *[("llama", 3), ("opt-350m", 2), ("gemma4", 3), ("gemma3n", 2), ("mamba", 2), ("rwkv7", 3)],
        *[("deepseek-v2", 2), ("mimo-v2", 2), ("laguna", 2), ("llama4-chunks", 2)],
        ("gpt-oss", 2),
    ],
)
def test_stages_have_the_bits_of_one(case: str, num_stages: int, tmp_path: Path) -> None:
    """Also with several residual streams, inputs of layers, and layers that read others' caches."""
    architecture, config = CASES[case]
    if case == "gemma4":  # two more layers, for a stage between others
        config = config | {"num_hidden_layers": 8, "layer_types": config["layer_types"][:2] * 4}
    make_hf(architecture, **config).save_pretrained(tmp_path)
    expected = run(load(tmp_path), lambda: None)
    spec, checkpoint = spec_of(tmp_path), open_checkpoint(tmp_path)
    stages = [
        Runner(
            load_model(spec.stage(*layers), checkpoint, dtype="float32", ops=NativeOps()), 2, TOKENS
        )
        for layers in divide_layers(spec, num_stages, None)
    ]
    assert len(stages) == num_stages
    found: list[Tensor] = []
    for scheduled in script():
        handed = None
        for stage in stages:
            stage.received = handed
            logits, handed = stage.step(scheduled), stage.handed
        found += [x.clone() for x in logits.values()]
    assert all(map(torch.equal, found, expected))


def test_layers_that_read_others_stay_with_them(tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES["gemma4"])  # layers 3 to 5 read those of 1 and 2
    assert [layer.cache_layer for layer in spec.layers] == [None, None, None, 1, 2, 1]
    assert divide_layers(spec, 2, None) == divide_layers(spec, 2, "1,5") == [(0, 1), (1, 6)]
    with pytest.raises(ConfigError, match=r"'3,3' divides layers that .* must have at least 5"):
        divide_layers(spec, 2, "3,3")
    with pytest.raises(ConfigError, match="=3 is more than 2, since some of the 6 layers read"):
        divide_layers(spec, 3, None)


def test_what_no_stage_has_is_still_found(tmp_path: Path) -> None:
    architecture, config = CASES["llama"]
    model = make_hf(architecture, **config)
    model.save_pretrained(tmp_path)
    more = {"model.layers.0.strange": torch.zeros(3)}
    save_file(model.state_dict() | more, tmp_path / "model.safetensors", {"format": "pt"})
    stage = spec_of(tmp_path).stage(1, 3)
    with pytest.raises(ModelError, match=r"1 tensors that .* does not have: .*strange"):
        load_model(stage, open_checkpoint(tmp_path), dtype="float32", ops=NativeOps())


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_layers_are_divided_by_the_weights_that_are_read(num_stages: int, tmp_path: Path) -> None:
    architecture, config = CASES["llama"]
    make_hf(architecture, **config | {"num_hidden_layers": 5}).save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    stages = divide_layers(spec, num_stages, None)
    assert stages[0][0] == 0
    assert stages[-1][1] == 5
    assert all(one[1] == next_[0] for one, next_ in pairwise(stages))
    assert all(end > begin for begin, end in stages)

    def most(bounds: tuple[int, ...]) -> int:
        ends = [0, *bounds, 5]
        sizes = []
        for begin, end in pairwise(ends):
            weights = spec.stage(begin, end).weights()
            sizes.append(sum(math.prod(w.shape) for w in weights if w.kind == "linear"))
        return max(sizes)

    best = min(map(most, combinations(range(1, 5), num_stages - 1)))
    assert most(tuple(begin for begin, _ in stages[1:])) == best


@pytest.mark.parametrize(
    ("num_stages", "asked", "said"),
    [
        (4, None, "pipeline_parallel_size=4 is more than the 3 layers"),
        (2, "1,1", "2 stages with 2 layers; set 2 numbers .* the sum 3"),
        (3, "2,1", "2 stages with 3 layers; set 3 numbers"),
    ],
)
def test_no_division(num_stages: int, asked: str | None, said: str, tmp_path: Path) -> None:
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        divide_layers(spec_of(tmp_path), num_stages, asked)
    other = replace(spec_of(tmp_path), model_class="somewhere:Model")
    with pytest.raises(ConfigError, match="not supported with LlamaForCausalLM"):
        other.stage(0, 1)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt2", "bloom", "falcon-7b", "opt", "olmo2"])
def test_sums_over_ranks(case: str, tmp_path: Path) -> None:
    """The model is the same, except the order in which its numbers are summed."""
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    dtype = "float32"
    whole = load(tmp_path, dtype)
    expected = run(whole, lambda: None)
    got = run_ranks(tmp_path, 2, dtype, None, reduces=True)
    assert not all(map(torch.equal, got, expected))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, got, run_ranks(tmp_path, 2, dtype, None, reduces=True)))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_sums_over_ranks(form: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32}
    architecture, config = CASES["llama"]
    make_hf(architecture, **config | sizes).save_pretrained(tmp_path)
    whole = load(tmp_path, "float32", quantization=form)
    expected = torch.cat(run(whole, lambda: None))
    got = torch.cat(run_ranks(tmp_path, 2, "float32", form, reduces=True))
    # Each part is rounded separately.
    assert torch.nn.functional.cosine_similarity(got, expected).min() > 0.97


def test_inputs_of_ranks_are_all_there_are(tmp_path: Path) -> None:
    architecture, config = CASES["gpt2"]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    parts = [spec.split(Rank(index, 2, reduces=True)) for index in range(2)]
    whole = {weight.name: weight for weight in spec.weights()}
    for name in ("layers.0.o_proj.weight", "layers.0.down_proj.weight"):
        weights = [next(w for w in part.weights() if w.name == name) for part in parts]
        assert sum(weight.shape[1] for weight in weights) == whole[name].shape[1]
        (one,), (two,) = (weight.sources for weight in weights)
        assert one.columns[1] == two.columns[0]
