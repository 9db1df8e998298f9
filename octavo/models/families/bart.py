"""BART, and the encoder-decoders of texts that differ from it in norms and positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from octavo.checkpoints.config_json import MOST_LAYERS, ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.cross_attention import CrossAttentionSpec
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec, Sinusoids
from octavo.models.blocks.encoder_input import TextInputSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec, Sublayer
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import Activation
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.families import base
from octavo.models.spec import ModelSpec

_ACTIVATIONS: dict[str, Activation] = base.PLAIN | {"silu": "silu", "swish": "silu"}
_EPS = 1e-5
"""Term of all norms."""


@dataclass(frozen=True, kw_only=True)
class BartLike:
    """Differences of an encoder-decoder from BART (Lewis et al., arXiv:1910.13461)."""

    pre_norm: bool = False
    """True if norms precede the blocks, and another one follows the last layer; False: norms follow
    the sums of the blocks' inputs and outputs."""
    embed_norm: bool = True
    """True if there is a norm of the embedding."""
    positions: Literal["learned", "computed", "computed_after_pad"] = "learned"
    """Vectors of positions: "computed_after_pad" numbers them from pad_token_id + 1 on."""
    logits_bias: bool = True
    """True if the logits have a bias."""
    key_bias: bool = True
    """True if the projections to keys have a bias."""

    def read(self, config: ConfigJson) -> ModelSpec:
        """Return the model."""
        config.refuse("is_encoder_decoder", True, "only encoder-decoders are supported")
        length = config.integer("max_position_embeddings")
        shared = config.flag("share_encoder_decoder_embeddings", True)
        vocab_size = config.integer("vocab_size")
        own_size = config.optional_integer("decoder_vocab_size", least=1) or vocab_size
        if shared and own_size != vocab_size:
            raise config.error("decoder_vocab_size", "a shared embedding has vocab_size tokens")
        table = "model.shared" if shared else "model.{}.embed_tokens"
        layers, encoder_layers = (self.layers(config, stack) for stack in ("decoder", "encoder"))
        embed = self._embed(config, "decoder", table.format("decoder"), own_size, length)
        head = HeadSpec(
            self.final_norm(config, "decoder"),
            replace(
                base.read_lm_head(config, embed, tied=True, bias=self.logits_bias),
                whole_bias="final_logits_bias" if self.logits_bias else None,
            ),
        )
        learned = self.positions == "learned"
        spec = base.model_spec(
            config,
            embed=embed,
            layers=layers,
            head=head,
            max_model_len=length,
            layer_names="model.decoder.layers.{}.",
            bare_prefix="model.",
            ignored=(
                r"(model\.)?(en|de)coder\.(embed_tokens\.weight|version)",
                *([] if learned else [r"(model\.)?(en|de)coder\.embed_positions\.weights?"]),
                r"(model\.)?classification_head\..*",
                *([] if shared else [r"model\.shared\.weight"]),
            ),
        )
        encoder = EncoderSpec(
            modality="text",
            inputs=TextInputSpec(
                self._embed(config, "encoder", table.format("encoder"), vocab_size, length),
                shares_table=shared,
            ),
            layers=tuple(encoder_layers),
            layer_names="model.encoder.layers.{}.",
            hidden_size=spec.hidden_size,
            norm=self.final_norm(config, "encoder"),
            output=None,
            max_num_tokens=length,
        )
        return replace(spec, encoders=(encoder,))

    def _embed(
        self, config: ConfigJson, stack: str, module: str, vocab_size: int, length: int
    ) -> EmbedSpec:
        hidden = config.integer("d_model")
        norm = LayerNormSpec(f"model.{stack}.layernorm_embedding", hidden, _EPS)
        positions: PositionsSpec | Sinusoids = Sinusoids(length, hidden)
        if self.positions == "learned":
            positions = PositionsSpec(f"model.{stack}.embed_positions", length, skipped=2)
        elif self.positions == "computed_after_pad":
            first = config.integer("pad_token_id", least=0, most=length) + 1
            positions = Sinusoids(length, hidden, first, ends=True)
        return EmbedSpec(
            module,
            vocab_size,
            hidden,
            hidden,
            scale=math.sqrt(hidden) if config.flag("scale_embedding", False) else None,
            positions=positions,
            norm=norm if self.embed_norm else None,
        )

    def final_norm(self, config: ConfigJson, stack: str) -> LayerNormSpec | None:
        """Return the norm after the last layer of the encoder or the decoder."""
        if not self.pre_norm:
            return None
        return LayerNormSpec(f"model.{stack}.layer_norm", config.integer("d_model"), _EPS)

    def layers(self, config: ConfigJson, stack: str) -> list[LayerSpec]:
        """Return the layers of the encoder or the decoder."""
        causal, hidden = stack == "decoder", config.integer("d_model")
        number = base.read_num_heads(config, f"{stack}_attention_heads")
        heads = base.Heads.of(config, hidden, number)

        def norm(module: str) -> LayerNormSpec:
            return LayerNormSpec(f"{module}_layer_norm", hidden, _EPS)

        def linear(*modules: str) -> LinearSpec:
            keys = () if self.key_bias else tuple(m for m in modules if m.endswith("k_proj"))
            rows = tuple((module, hidden) for module in modules)
            return LinearSpec(rows, hidden, bias=True, unbiased=keys)

        attention = AttentionSpec(
            linear(*(f"self_attn.{part}_proj" for part in "qkv")),
            linear("self_attn.out_proj"),
            heads.num_heads,
            heads.num_heads,
            heads.head_size,
            heads.scale,
            None,
            causal=causal,
        )
        cross = CrossAttentionSpec(
            linear("encoder_attn.q_proj"),
            linear("encoder_attn.k_proj", "encoder_attn.v_proj"),
            linear("encoder_attn.out_proj"),
            heads.num_heads,
            heads.num_heads,
            heads.head_size,
            heads.scale,
        )
        mlp = base.plain_mlp(
            "fc1",
            "fc2",
            hidden,
            config.integer(f"{stack}_ffn_dim"),
            base.read_activation(config, "activation_function", _ACTIVATIONS),
            bias=True,
        )
        layer = LayerSpec(
            (
                Sublayer("mixer", attention, norm("self_attn")),
                *([Sublayer("cross_attention", cross, norm("encoder_attn"))] if causal else []),
                Sublayer("feed_forward", mlp, norm("final")),
            ),
            "sequential" if self.pre_norm else "post",
        )
        return [layer] * config.integer(f"{stack}_layers", most=MOST_LAYERS)


ARCHITECTURES = {
    "BartForConditionalGeneration": BartLike().read,
    "MBartForConditionalGeneration": BartLike(pre_norm=True).read,
    "MarianMTModel": BartLike(embed_norm=False, positions="computed").read,
    "PegasusForConditionalGeneration": BartLike(
        pre_norm=True, embed_norm=False, positions="computed"
    ).read,
    "M2M100ForConditionalGeneration": BartLike(
        pre_norm=True, embed_norm=False, positions="computed_after_pad", logits_bias=False
    ).read,
}
