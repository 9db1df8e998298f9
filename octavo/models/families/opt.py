"""OPT: learned positions; OPT-350m has norms after the residual and a narrow embedding."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.families import base
from octavo.models.families.gpt import GPTLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read OPT."""
    config.refuse("layer_norm_elementwise_affine", True, "norms without weights are not supported")
    hidden = config.integer("hidden_size")
    size = config.integer("word_embed_proj_dim", default=hidden)
    pre = config.flag("do_layer_norm_before", True)
    final_norm = pre and not config.flag("_remove_final_layer_norm", False)
    bias = config.flag("enable_bias", True)
    positions = config.integer("max_position_embeddings")

    def project(module: str, outputs: int, inputs: int) -> LinearSpec | None:
        return None if outputs == inputs else LinearSpec(((module, outputs),), inputs)

    variant = GPTLike(
        heads=base.Heads.of(config, hidden, base.read_num_heads(config)),
        num_layers=base.read_num_layers(config),
        inner_size=config.integer("ffn_dim"),
        activation=base.read_activation(config, "activation_function", base.PLAIN, "relu"),
        eps=1e-5,
        max_position=positions,
        embed=EmbedSpec(
            "model.decoder.embed_tokens",
            config.integer("vocab_size"),
            size,
            hidden,
            project=project("model.decoder.project_in", hidden, size),
            positions=PositionsSpec("model.decoder.embed_positions", positions, skipped=2),
        ),
        layer_names="model.decoder.layers.{}.",
        bare_prefix="model.",
        o_module="self_attn.out_proj",
        mlp_modules=("fc1", "fc2"),
        norm_modules=("self_attn_layer_norm", "final_layer_norm"),
        final_norm="model.decoder.final_layer_norm" if final_norm else None,
        attention_bias=bias,
        mlp_bias=bias,
        arrangement="sequential" if pre else "post",
        head_project=project("model.decoder.project_out", size, hidden),
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"OPTForCausalLM": read}
