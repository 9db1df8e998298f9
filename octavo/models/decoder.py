"""The decoder: one for all architectures, its differences are switches of the `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.kernels.base import Ops, PackedWeight, QuantizedWeight
from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP, get_activation
from octavo.layers.norm import LayerNorm, Norm, RMSNorm
from octavo.layers.rotary import build_cos_sin_cache
from octavo.layers.step import StepContext
from octavo.models.spec import ModelSpec


class PreNormLayer:
    """A layer whose blocks read the normed residual stream; Gemma also norms what they return."""

    __slots__ = ("attn", "input_norm", "mlp", "mlp_norm", "post_attn_norm", "post_mlp_norm")

    def __init__(
        self,
        input_norm: Norm,
        attn: Attention,
        post_attn_norm: Norm | None,
        mlp_norm: Norm,
        mlp: MLP,
        post_mlp_norm: Norm | None,
    ) -> None:
        self.input_norm = input_norm
        self.attn = attn
        self.post_attn_norm = post_attn_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.post_mlp_norm = post_mlp_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """(x, residual), whose sum is the residual stream, to the same behind the layer."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attn(x, step)
        if self.post_attn_norm is not None:
            x = self.post_attn_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(x)
        return x, residual


class PostNormLayer:
    """A layer that norms the sum of each block's input and result (OPT-350m)."""

    __slots__ = ("attn", "attn_norm", "mlp", "mlp_norm")

    def __init__(self, attn: Attention, attn_norm: Norm, mlp: MLP, mlp_norm: Norm) -> None:
        self.attn = attn
        self.attn_norm = attn_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """As `PreNormLayer`; there is never a residual apart from x."""
        assert residual is None
        x, _ = self.attn_norm.add(self.attn(x, step), x)
        x, _ = self.mlp_norm.add(self.mlp(x), x)
        return x, None


class DecoderModel:
    """A decoder-only language model, ready to run.

    Call it under `torch.inference_mode`.

    Args:
        spec: the model.
        weights: every weight of `octavo.models.weights.model_weights(spec)` by name, packed where
            it is linear.
        ops: table of operations that packed them.
        device: where the weights are.
        max_model_len: rows of the rotary tables.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor | PackedWeight | QuantizedWeight],
        ops: Ops,
        *,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.device = device
        build = _Builder(spec, weights, ops, device, max_model_len)
        self.embed = build.embedding()
        self.layers = [build.layer(i) for i in range(spec.num_layers)]
        self.norm = build.norm("norm") if spec.final_norm else None
        self.project_out = build.linear("project_out") if "project_out.weight" in weights else None
        self.lm_head = build.linear("lm_head").weight
        self._linear = ops.linear
        self._add = ops.add
        self._gather = ops.embedding
        self._soft_cap_ = ops.soft_cap_

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return self.embed.weight.dtype

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """See `Model`; hidden states come from behind the final norm."""
        x = self.embed(input_ids, step.positions)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, step)
            if index in step.kept_layers:
                step.kept[index] = x if residual is None else self._add(x, residual)
        if self.norm is None:
            return x if residual is None else self._add(x, residual)
        if residual is None:
            return self.norm(x)
        return self.norm.add(x, residual)[0]

    def head(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """See `Model`."""
        if rows is not None:
            hidden = self._gather(hidden, rows)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits = self._linear(hidden, self.lm_head, out_dtype=torch.float32)
        if self.spec.final_logit_softcap is not None:
            self._soft_cap_(logits, self.spec.final_logit_softcap)
        return logits


class _Builder:
    """Makes layers of named weights."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor | PackedWeight | QuantizedWeight],
        ops: Ops,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = ops
        self.activation = get_activation(ops, spec.activation, spec.gated_mlp)
        self.rotary = [build_cos_sin_cache(r, max_model_len).to(device) for r in spec.ropes]
        self.alibi_slopes = None
        if spec.alibi_slopes:
            self.alibi_slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=device)

    def tensor(self, name: str) -> Tensor:
        weight = self.weights[name]
        assert isinstance(weight, Tensor)
        return weight

    def bias(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self.weights else None

    def linear(self, name: str) -> Linear:
        weight = self.weights[f"{name}.weight"]
        assert not isinstance(weight, Tensor)
        return Linear(self.ops, weight, self.bias(f"{name}.bias"))

    def rms_norm(self, name: str) -> RMSNorm:
        return RMSNorm(
            self.ops,
            self.tensor(f"{name}.weight"),
            self.spec.norm_eps,
            self.spec.norm_weight_offset,
        )

    def norm(self, name: str) -> Norm:
        if self.spec.norm == "rms":
            return self.rms_norm(name)
        return LayerNorm(
            self.ops,
            self.tensor(f"{name}.weight"),
            self.bias(f"{name}.bias"),
            self.spec.norm_eps,
        )

    def embedding(self) -> Embedding:
        spec = self.spec
        weight = self.weights.get("embed_tokens.weight", self.weights["lm_head.weight"])
        assert not isinstance(weight, QuantizedWeight)
        return Embedding(
            self.ops,
            weight,
            scale=spec.embed_scale,
            project=self.linear("project_in") if "project_in.weight" in self.weights else None,
            positions=self.bias("embed_positions.weight"),
            norm=self.norm("embed_norm") if spec.embed_norm else None,
        )

    def layer(self, index: int) -> PreNormLayer | PostNormLayer:
        spec, at = self.spec, f"layers.{index}."
        up = "gate_up_proj" if spec.gated_mlp else "up_proj"
        mlp = MLP(self.linear(at + up), self.activation, self.linear(at + "down_proj"))
        attn = Attention(
            self.ops,
            index,
            self.linear(at + "qkv_proj"),
            self.linear(at + "o_proj"),
            num_heads=spec.num_attention_heads,
            num_kv_heads=spec.num_key_value_heads,
            head_size=spec.head_size,
            scale=spec.layer_scales[index],
            sliding_window=spec.layer_windows[index],
            logits_soft_cap=spec.attn_logit_softcap,
            alibi_slopes=self.alibi_slopes,
            cos_sin_cache=self.rotary[spec.layer_ropes[index]] if self.rotary else None,
            q_norm=self.rms_norm(at + "q_norm") if spec.qk_norm else None,
            k_norm=self.rms_norm(at + "k_norm") if spec.qk_norm else None,
            clip=spec.qkv_clip,
        )
        if spec.norm_placement == "post":
            return PostNormLayer(
                attn, self.norm(at + "input_norm"), mlp, self.norm(at + "mlp_norm")
            )
        sandwich = spec.norm_placement == "sandwich"
        return PreNormLayer(
            self.norm(at + "input_norm"),
            attn,
            self.norm(at + "post_attn_norm") if sandwich else None,
            self.norm(at + "mlp_norm"),
            mlp,
            self.norm(at + "post_mlp_norm") if sandwich else None,
        )
