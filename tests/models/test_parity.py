"""Greedy tokens and logprobs of every family, equal to those of transformers in float32."""

import copy
import json
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch

from octavo.checkpoints.registry import open_checkpoint
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import as_torch, from_torch, torch_dtype
from octavo.models.loader import load_model
from tests.models.cases import CASES, ENLARGING
from tests.models.configs.dense import MPT
from tests.models.configs.recurrent import FALCON_H1, HYBRID
from tests.models.configs.sizes import SIZES, VOCAB
from tests.models.configs.with_towers import TEXT_PARTS
from tests.models.harness import (
    Runner,
    assert_same_as_hf,
    generate,
    load,
    make_hf,
    make_prompts,
    save_and_load,
    spec_of,
)

LENGTHS = (1, 3, 17, 31, 16, 40, 5, 52)
NUM_TOKENS = 64


@pytest.mark.parametrize("case", [*CASES, *TEXT_PARTS])
def test_parity(case: str, tmp_path: Path) -> None:
    architecture, config = (CASES | TEXT_PARTS)[case]
    factor = 0.6 if case in ENLARGING else 1.0
    hf_model = make_hf(architecture, factor=factor, **config)
    model = save_and_load(hf_model, tmp_path)
    prompts = make_prompts(VOCAB, LENGTHS)
    with torch.inference_mode():  # users make prompt_embeds so
        embeds = hf_model.get_input_embeddings()(torch.tensor(prompts[-1]))
    # transformers takes prompt embeddings of Granite before the factor, of Falcon-H1 after it. So
    # does Octavo; and MiniCPM, compared with Granite, takes them after it.
    if case in ("minicpm", "falcon-h1", "falcon-h1-norm"):
        embeds = embeds * hf_model.config.embedding_multiplier
    found = model.embed_input_ids(from_torch(torch.tensor(prompts[-1])))
    if case == "muse-glimmer":  # its norm is rounded otherwise
        torch.testing.assert_close(as_torch(found), embeds)
    else:
        assert torch.equal(as_torch(found), embeds)
    generated = generate(model, prompts, NUM_TOKENS)
    assert_same_as_hf(hf_model, prompts, generated)
    # Greedy tokens that always repeat would prove little.
    assert len({token for tokens in generated.tokens for token in tokens}) > 10
    # The plain torch backend is slow, so it computes fewer tokens, and the prompts in chunks.
    reference = generate(model, prompts, 5, "reference", chunk=23)
    assert_same_as_hf(hf_model, prompts, reference)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma4", "opt-350m", "granite", "falcon-40b"])
def test_hidden_states_behind_layers(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    hf_model = make_hf(architecture, **config)
    (prompt,) = make_prompts(VOCAB, (30,))
    with torch.inference_mode():
        expected = hf_model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    runner = Runner(save_and_load(hf_model, tmp_path), 1, 30)
    runner.kept_layers = (0, 1)
    runner.step({0: prompt})
    assert set(runner.kept) == {0, 1}
    for layer, hidden in runner.kept.items():
        torch.testing.assert_close(as_torch(hidden), expected[layer + 1][0], atol=1e-3, rtol=1e-4)


HYBRIDS = ("lfm2", "qwen3.5", "kimi-linear", "mamba-odd", "mamba2-odd", "rwkv7")
LATENTS = ("minicpm3-yarn", "deepseek-v3", "deepseek-v3-queries")
# The types take turns: the tests of the kernels have all of them.
IN_CHUNKS = ("llama", "gemma2", "gemma3n", "gemma4", "bloom", "olmo2", "cohere2", "falcon-40b")
IN_CHUNKS += ("mimo-v2", "laguna", "llama4-chunks", *HYBRIDS, *LATENTS)


@pytest.mark.parametrize(
    ("case", "dtype"), [*zip(IN_CHUNKS, cycle(("float32", "bfloat16")), strict=False)]
)
def test_chunked_prefill_changes_no_bit(case: str, dtype: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    model = save_and_load(make_hf(architecture, **config), tmp_path, dtype)
    prompts = make_prompts(VOCAB, LENGTHS)
    whole = generate(model, prompts, 12)
    for chunk in (1, 7, 16):
        chunked = generate(model, prompts, 12, chunk=chunk)
        assert chunked.tokens == whole.tokens
        for a, b in zip(chunked.logits, whole.logits, strict=True):
            assert torch.equal(a, b)
    alone = generate(model, prompts[3:4], 12, block_size=8)
    assert torch.equal(alone.logits[0], whole.logits[3])


@pytest.mark.parametrize(
    "case",
    [
        "qwen2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "opt",
        "olmo2",
        "granite",
        "cohere",
        "qwen3.5",
        "deepseek-v3",
    ],
)
def test_low_precision_is_near_float32(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    hf_model = make_hf(architecture, **config)
    hf_model.save_pretrained(tmp_path)
    prompts = make_prompts(VOCAB, (9, 30))
    ids = torch.tensor(prompts[0])
    exact = generate(load(tmp_path), prompts, 1).logits
    for dtype in ("bfloat16", "float16"):
        model = load(tmp_path, dtype)
        assert model.dtype == dtype
        embed = copy.deepcopy(hf_model).to(torch_dtype(dtype)).get_input_embeddings()
        assert torch.equal(as_torch(model.embed_input_ids(from_torch(ids))), embed(ids))
        for a, b in zip(generate(model, prompts, 1).logits, exact, strict=True):
            assert a.dtype == torch.float32
            assert torch.nn.functional.cosine_similarity(a, b, dim=-1).min() > 0.98


def test_mpt_with_what_transformers_leaves_out(tmp_path: Path) -> None:
    """It reads expansion_ratio and alibi_bias_max, but computes with 4 and 8."""
    fields = {"expansion_ratio": 2, "attn_config": {"alibi_bias_max": 5}}
    hf_model = make_hf("MptForCausalLM", **MPT | fields)
    decoder, inner = hf_model.transformer, 2 * MPT["d_model"]
    for block in decoder.blocks:
        for linear, name in ((block.ffn.up_proj, "out"), (block.ffn.down_proj, "in")):
            weight = linear.weight.data
            linear.weight.data = weight[:inner] if name == "out" else weight[:, :inner].contiguous()
    decoder.build_mpt_alibi_tensor = partial(decoder.build_mpt_alibi_tensor, alibi_bias_max=5)
    prompts = make_prompts(VOCAB, LENGTHS)
    generated = generate(save_and_load(hf_model, tmp_path), prompts, NUM_TOKENS)
    assert_same_as_hf(hf_model, prompts, generated)


def test_late_gate_of_falcon_h1(tmp_path: Path) -> None:
    """The gate follows the norm."""
    config = SIZES | HYBRID | FALCON_H1 | {"mamba_rms_norm": True, "mamba_proj_bias": True}
    hf_model = make_hf("FalconH1ForCausalLM", **config)
    model = save_and_load(hf_model, tmp_path)
    prompts = make_prompts(VOCAB, (1, 20))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 20))


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
def test_real_llama(name: str, shared_data: Path) -> None:
    folder = shared_data / "models" / name
    expected = json.loads((folder / "expected_greedy.json").read_text())
    model = load(folder)
    prompt, tokens = expected["prompt_ids"], expected["greedy_ids"]
    assert generate(model, [prompt, prompt[:3]], len(tokens)).tokens[0] == tokens


def test_real_gpt2(shared_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared_data / "models" / "capp-gpt2"
    hf_model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    prompts = make_prompts(53, LENGTHS)
    assert_same_as_hf(hf_model.eval(), prompts, generate(load(folder), prompts, NUM_TOKENS))


def test_dummy_weights_run(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    spec = spec_of(folder)
    models = [
        load_model(
            spec,
            open_checkpoint(Path("nowhere"), "dummy", seed),
            dtype="float32",
            ops=NativeOps(),
        )
        for seed in (1, 1, 2)
    ]
    prompts = make_prompts(spec.vocab_size, (4, 9))
    first, again, other = [generate(model, prompts, 3) for model in models]
    assert torch.equal(first.logits[0], again.logits[0])
    assert not torch.equal(first.logits[0], other.logits[0])
