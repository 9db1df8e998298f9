"""The index of families, and families of other packages, with custom blocks and models."""

import importlib
import json
import pkgutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.models import families
from octavo.models.cache import AttentionCache
from octavo.models.family_index import INDEX
from octavo.models.hub import resolve_model
from tests.models.configs.sizes import SIZES, VOCAB
from tests.models.harness import generate, load, make_hf, make_prompts, spec_of
from tests.models.test_spec import tensors_of

TOY = '''
from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.layers.linear import Linear
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.decoder import DecoderModel
from octavo.models.families import llama


class NoMixer:
    """Lets no token see another."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x, step):
        return self.linear(x)


@dataclass(frozen=True)
class NoMixerSpec(BlockSpec):
    linear: LinearSpec

    def weights(self, names):
        return self.linear.weights(names.of("linear"))

    def build(self, parts, caches):
        return NoMixer(self.linear.build(parts.of("linear")))


def read(config):
    """Llama, whose layer 1 has no attention but the output projection."""
    spec = llama.read(config)
    first, second, *others = spec.layers
    mixer = NoMixerSpec(LinearSpec((("self_attn.o_proj", spec.hidden_size),), spec.hidden_size))
    second = second.with_blocks([mixer, second.blocks[1]])
    return replace(spec, layers=(first, second, *others))


class Contrary:
    """Holds for likely what Llama holds for unlikely."""

    def __init__(self, spec, parts):
        self.spec = spec
        self.llama = DecoderModel(spec, parts)
        self.dtype, self.scale_ = self.llama.dtype, parts.ops.scale_

    def forward(self, input_ids, step):
        return self.llama.forward(input_ids, step)

    def head(self, hidden, rows=None):
        logits = self.llama.head(hidden, rows)
        self.scale_(logits, -1.0)
        return logits


def read_contrary(config):
    return replace(llama.read(config), model_class="toy_family:Contrary")
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that offers architectures."""
    site = tmp_path / "site"
    info = site / "toy_family-1.dist-info"
    info.mkdir(parents=True)
    (site / "toy_family.py").write_text(TOY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1\n")
    entry_points = """
        [octavo.models]
        ToyForCausalLM = toy_family:read
        ContraryForCausalLM = toy_family:read_contrary
        BrokenForCausalLM = toy_family:gone
        LlamaForCausalLM = toy_family:gone
        """
    (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
    monkeypatch.syspath_prepend(str(site))


def save(folder: Path, architecture: str) -> Any:
    """Save a tiny Llama under another name."""
    hf_model = make_hf("LlamaForCausalLM", **SIZES)
    hf_model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return hf_model


def remove(folder: Path, module: str) -> None:
    """Remove a module from a checkpoint."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if module not in name}
    assert len(kept) < len(state)
    save_file(kept, folder / "model.safetensors")


def test_the_index_lists_the_architectures_of_each_file() -> None:
    found = {}
    for file in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{file.name}")
        if hasattr(module, "ARCHITECTURES"):
            found[file.name] = set(module.ARCHITECTURES)
        layers = getattr(module, "MTP_LAYERS", {})
        assert layers.keys() <= found.get(file.name, set()), "registry.py would not find them"
    assert {file: set(names) for file, names in INDEX.items()} == found
    assert sum(map(len, found.values())) == len(set().union(*found.values()))


@pytest.mark.usefixtures("installed")
def test_a_block_of_a_package(tmp_path: Path) -> None:
    """It is loaded, planned for, recorded and computed as Octavo's blocks are."""
    folder = tmp_path / "model"
    hf_model = save(folder, "ToyForCausalLM")
    for name in ("q_proj", "k_proj", "v_proj"):
        remove(folder, f"layers.1.self_attn.{name}")
    model = load(folder)
    assert model.spec.caches == (AttentionCache(2, 12),) * 2  # of three layers
    seen: dict[int, int] = {}
    tensors_of(model, seen)
    assert sum(seen.values()) == model.spec.weight_nbytes("float32")
    prompts = make_prompts(VOCAB, (9, 30))
    expected = generate(model, prompts, 8)

    class OnlyOut(torch.nn.Module):
        def __init__(self, attention: Any) -> None:
            super().__init__()
            self.o_proj = attention.o_proj

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return self.o_proj(hidden_states), None

    layer = hf_model.model.layers[1]
    layer.self_attn = OnlyOut(layer.self_attn)
    with torch.inference_mode():
        logits = hf_model(torch.tensor([prompts[1]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(expected.logits[1][0], logits, atol=1e-3, rtol=1e-4)
    assert answer(folder, prompts) == answer(folder, prompts, enforce_eager=True) == expected.tokens


@pytest.mark.usefixtures("installed")
def test_a_model_of_a_package(tmp_path: Path) -> None:
    """The worker knows a model only by its protocol."""
    folder = tmp_path / "model"
    save(folder, "LlamaForCausalLM")
    prompts = make_prompts(VOCAB, (9, 30))
    plain = generate(load(folder), prompts, 1)
    save(folder, "ContraryForCausalLM")
    contrary = generate(load(folder), prompts, 8)
    assert torch.equal(contrary.logits[0][0], -plain.logits[0][0])
    assert answer(folder, prompts) == contrary.tokens


def answer(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", num_threads=1, **settings
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.usefixtures("installed")
def test_built_in_families_come_first_and_broken_ones_are_named(tmp_path: Path) -> None:
    save(tmp_path / "model", "LlamaForCausalLM")
    spec_of(tmp_path / "model")
    save(tmp_path / "model", "BrokenForCausalLM")
    with pytest.raises(ModelError, match=r"toy_family:gone of octavo\.models, for BrokenFor.*gone"):
        spec_of(tmp_path / "model")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("BigBirdForMaskedLM", "encoder, which makes vectors"),
        ("FunnelModel", "encoder, which makes vectors"),
        ("nomic-bert-moe", "lack the bias of the experts"),
        ("XLNetForSequenceClassification", "classifier"),
        ("NllbMoeForConditionalGeneration", "encoder-decoder of a family"),
        ("WhisperForAudioClassification", "classifier"),
        ("Florence2ForConditionalGeneration", "images"),
        ("DbrxForCausalLM", "mixture of experts"),
        ("DeepseekV32ForCausalLM", "chooses tokens with an indexer"),
        ("GlmMoeDsaForCausalLM", "chooses tokens with an indexer"),
        ("Glm5NextForConditionalGeneration", "chooses tokens with an indexer"),
        ("Qwen4ExpForCausalLM", "chooses tokens with an indexer"),
        ("MiniMaxM3SparseForConditionalGeneration", "chooses tokens with an indexer"),
        ("DeepseekV4ForCausalLM", "compressed keys and values, and hyper-connections"),
        ("DeepseekV41ForCausalLM", "compressed keys and values, and hyper-connections"),
        ("BailingMoeV2ForCausalLM", "mixture of experts"),
        ("KimiK3ForConditionalGeneration", "mixture of experts"),
        ("LongcatFlashForCausalLM", "mixture of experts"),
        ("MellumForCausalLM", "mixture of experts"),
        ("Qwen3OmniMoeForConditionalGeneration", "images"),
        ("Step3p5ForCausalLM", "mixture of experts"),
        ("Step3p7ForConditionalGeneration", "mixture of experts"),
        ("Step5ForCausalLM", "mixture of experts"),
        ("BailingHybridForCausalLM", "recurrent layers"),
        ("DiffusionGemmaForBlockDiffusion", "diffusion"),
        ("ChatGLMModel", "use the checkpoint that names GlmForCausalLM"),
        ("DeepseekOcr2ForConditionalGeneration", "images"),
        ("MoonshineStreamingForConditionalGeneration", "sound"),
        ("LEDForConditionalGeneration", "encoder-decoder of a family"),
        ("T5Gemma2ForConditionalGeneration", "encoder-decoder"),
        ("EmbeddingGemma2Model", "encoder"),
        ("MiMoForCausalLM", "no model family of this name"),
        ("Lfm3ForCausalLM", "recurrent layers"),
        ("Qwen4ForCausalLM", "of this name, the nearest is Qwen"),
        ("CTRLLMHeadModel", "no model family of this name"),
    ],
)
def test_the_refusal_of_an_architecture_says_what_kind_it_is(architecture, kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ModelError) as error:
        spec_of(tmp_path)
    assert kind in str(error.value)
    assert architecture in str(error.value)
    assert len(str(error.value)) < len(str(tmp_path)) + 250


def test_fields_can_be_overridden(tmp_path):
    theirs = json.loads((resolve_model("octavo/stories") / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    config = {**theirs, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Only the given fields of an object are replaced.
    assert spec_of(tmp_path, hf_overrides={"rope_scaling": {"factor": 2.0}}) != spec_of(tmp_path)
    assert spec_of(tmp_path, hf_overrides={"rope_scaling": {"factor": 4.0}}) == spec_of(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json with hf_overrides.*hidden_act='x'"):
        spec_of(tmp_path, hf_overrides={"hidden_act": "x"})
