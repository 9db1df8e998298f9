"""Nemotron-H: each layer is a state space, attention without positions, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import MOST_LAYERS, ConfigJson
from octavo.kernels.routing import ExpertActivation
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.families.base import PLAIN, Heads, plain_mlp, read_activation
from octavo.models.families.experts import ExpertNames, read_grouped_experts
from octavo.models.families.mamba2 import mixers_spec
from octavo.models.families.state_parts import MIXERS, Mamba2Fields
from octavo.models.spec import ModelSpec

_FIELDS = Mamba2Fields(
    num_heads="mamba_num_heads",
    head_size="mamba_head_dim",
    num_groups="n_groups",
    state_size="ssm_state_size",
    taps="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    out_bias="use_bias",
    activation="mamba_hidden_act",
)
_NAMES = ExpertNames(
    router="mixer.gate",
    experts="mixer.experts.{}.",
    up=("up_proj",),
    choice_bias="mixer.gate.e_score_correction_bias",
)
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _read_kinds(config: ConfigJson) -> list[str]:
    name = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    kinds = config.get(name)
    if kinds is None:
        name = "hybrid_override_pattern"
        letters = config.get(name)
        kinds = [_LETTERS.get(x) for x in letters] if isinstance(letters, str) else None
    known = MIXERS | {"mlp": "mlp", "moe": "moe"}
    if not isinstance(kinds, list) or not 0 < len(kinds) <= MOST_LAYERS:
        raise config.error(name, "it must name the type of each layer")
    if not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise config.error(name, f"supported: {', '.join(known)}")
    return [known[kind] for kind in kinds]


def read(config: ConfigJson) -> ModelSpec:
    """Read Nemotron-H."""
    heads, eps = Heads.read(config), config.number("layer_norm_epsilon", default=1e-5)
    kinds = _read_kinds(config)
    blocks: dict[str, BlockSpec] = {
        "mamba": _FIELDS.read(
            config,
            "mixer",
            inner_size=None,
            eps=eps,
            dt_range=(config.number("time_step_min", default=0.001), float("inf")),
        ),
        "attention": AttentionSpec(
            heads.qkv_proj("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", bias=False),
            heads.o_proj("mixer.o_proj", bias=False),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            None,
        ),
        "mlp": plain_mlp(
            "mixer.up_proj",
            "mixer.down_proj",
            heads.hidden_size,
            config.integer("intermediate_size"),
            read_activation(config, "mlp_hidden_act", PLAIN, "relu2"),
            bias=config.flag("mlp_bias", False),
        ),
    }
    if "moe" in kinds:
        blocks["moe"] = _read_experts(config)
    mixers = [blocks[kind] for kind in kinds]
    spec = mixers_spec(config, mixers, prefix="model.", eps=eps, tied=False)
    return replace(
        spec,
        prefixes=(*spec.prefixes, ("model.", "backbone.")),
        ignored=(*spec.ignored, r"(.*\.)?mtp\..*"),
    )


def _read_experts(config: ConfigJson) -> ExpertsSpec:
    """Return experts without gates, and a block that all tokens use."""
    config.refuse("mlp_bias", False, "experts have no biases")
    config.refuse("mlp_hidden_act", "relu2", "experts need relu2")
    hidden, latent = config.integer("hidden_size"), config.optional_integer("moe_latent_size", 1)
    block = read_grouped_experts(
        config.replaced("hidden_size", latent or hidden),
        _NAMES,
        ExpertActivation("relu2", gated=False),
    )
    if latent is not None:
        down = LinearSpec((("mixer.fc1_latent_proj", latent),), hidden)
        up = LinearSpec((("mixer.fc2_latent_proj", hidden),), latent)
        router = replace(block.router, proj=replace(block.router.proj, inputs=hidden))
        block = replace(block, router=router, latent=(down, up))
    inner = config.integer("moe_shared_expert_intermediate_size")
    prefix = "mixer.shared_experts."
    shared = plain_mlp(f"{prefix}up_proj", f"{prefix}down_proj", hidden, inner, "relu2", bias=False)
    return replace(block, shared=shared)


ARCHITECTURES = {"NemotronHForCausalLM": read}
