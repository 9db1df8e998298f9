"""Layers one by one, on the native operations and on plain torch."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from octavo.attention.base import AttentionMetadata, AttentionParams
from octavo.attention.reference import ReferenceAttention
from octavo.kernels.base import Ops
from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.layer import LiveSublayer, ParallelLayer, SequentialLayer
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP, get_activation
from octavo.layers.norm import LayerNorm, NoNorm, RMSNorm
from octavo.layers.step import StepContext
from octavo.models.positions import alibi_slopes_bloom, alibi_slopes_mpt
from octavo.system.tensor import round_to
from tests.torch_ops import native_ops, reference_ops

STEP = StepContext(torch.arange(5), [], [], None)  # type: ignore[arg-type]


@pytest.fixture(params=[native_ops, reference_ops], ids=["native", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    torch.manual_seed(0)
    return request.param()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_linear_stacks_its_parts(ops: Ops) -> None:
    x, parts, bias = torch.randn(5, 12), [torch.randn(n, 12) for n in (8, 4, 3)], torch.randn(15)
    close(Linear(ops, ops.pack_weight(parts), bias)(x), F.linear(x, torch.cat(parts), bias))
    close(Linear(ops, ops.pack_weight(parts[0]))(x), x @ parts[0].T)


def test_linear_in_another_type_and_with_a_gate(ops: Ops) -> None:
    x, weight = torch.randn(5, 12).bfloat16(), torch.randn(8, 12).bfloat16()
    bias = torch.randn(8).bfloat16()
    linear = Linear(ops, ops.pack_weight(weight), bias)
    wide = linear(x, "float32")
    assert wide.dtype == torch.float32
    close(wide, F.linear(x.float(), weight.float(), bias.float()))
    assert torch.equal(wide.bfloat16(), linear(x))
    assert torch.equal(linear.act_and_mul(x, "gelu"), ops.act_and_mul(linear(x), "gelu"))


def test_layers_without_norms_add_up(ops: Ops) -> None:
    """x + f(x), then that much again; or both parts of one x."""
    x = torch.randn(5, 16)
    none = NoNorm(ops)
    parts = [
        LiveSublayer(lambda x, _, factor=factor: factor * x, none, none, has_norm=False)
        for factor in (2, 3)
    ]
    layer = SequentialLayer(ops, parts, 0.5)
    for stream in (layer(x, None, STEP), layer(x / 2, x / 2, STEP)):
        close(stream[0] + stream[1], 2 * x + 0.5 * 3 * 2 * x)
    parallel = ParallelLayer(ops, parts)
    for stream in (parallel(x, None, STEP), parallel(x / 2, x / 2, STEP)):
        close(stream[0] + stream[1], x + 2 * x + 3 * x)


def test_head(ops: Ops) -> None:
    hidden, weight, project = torch.randn(5, 12), torch.randn(20, 8), torch.randn(8, 12)
    lm_head, down = (Linear(ops, ops.pack_weight(w)) for w in (weight, project))
    head = Head(ops, lm_head, project=down, scale=0.5, soft_cap=3.0)
    logits = 3 * torch.tanh(0.5 * (hidden @ project.T @ weight.T) / 3)
    close(head(hidden), logits)
    close(head(hidden, torch.tensor([4, 1])), logits[[4, 1]])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(ops: Ops, offset: float) -> None:
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    norm = RMSNorm(ops, weight, 1e-5, offset)

    def expected(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=1e-5) * (weight[: x.shape[-1]] + offset)

    close(norm(x), expected(x))
    y, total = norm.add(x, residual)
    assert torch.equal(total, x + residual)
    close(y, expected(total))
    heads = torch.randn(5, 6, 16)
    wanted = heads.clone()
    wanted[:, 1:3] = expected(heads[:, 1:3])
    norm.heads_(heads[:, 1:3])  # a part of a larger tensor, in place
    close(heads, wanted)
    halves = torch.randn(5, 6, 8)
    wanted = halves.clone()
    wanted[:, 1:3] = expected(halves[:, 1:3].flatten(1)).view(5, 2, 8)
    norm.heads_(halves[:, 1:3])  # two heads as one
    close(halves, wanted)


@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm(ops: Ops, with_bias: bool) -> None:
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    bias = torch.randn(16) if with_bias else None
    norm = LayerNorm(ops, weight, bias, 1e-5)
    close(norm(x), F.layer_norm(x, (16,), weight, bias, 1e-5))
    y, total = norm.add(x, residual)
    assert torch.equal(total, x + residual)
    close(y, F.layer_norm(total, (16,), weight, bias, 1e-5))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu", F.relu),
    ],
)
@pytest.mark.parametrize("gated", [True, False])
def test_mlp(ops: Ops, name: str, function: Any, gated: bool) -> None:
    if (name, gated) == ("relu", True):
        with pytest.raises(KeyError):
            get_activation(ops, name, gated)
        return
    x, up, down = torch.randn(5, 8), torch.randn(24, 8), torch.randn(8, 12 if gated else 24)
    mlp = MLP(
        Linear(ops, ops.pack_weight(up)),
        get_activation(ops, name, gated),
        Linear(ops, ops.pack_weight(down)),
    )
    inner = x @ up.T
    inner = function(inner[:, :12]) * inner[:, 12:] if gated else function(inner)
    torch.testing.assert_close(mlp(x, STEP), inner @ down.T, atol=1e-4, rtol=1e-4)


def test_embedding(ops: Ops) -> None:
    weight, table, project = torch.randn(20, 8), torch.randn(30, 16), torch.randn(16, 8)
    ids, positions = torch.tensor([3, 3, 19]), torch.tensor([0, 29, 7])
    norm = LayerNorm(ops, torch.randn(16), None, 1e-5)
    embedding = Embedding(
        ops,
        weight,
        project=Linear(ops, ops.pack_weight(project)),
        positions=table,
        norm=norm,
    )
    close(embedding(ids, positions), norm(weight[ids] @ project.T + table[positions]))
    scaled = Embedding(ops, weight.bfloat16(), scale=round_to(48**0.5, "bfloat16"))(ids, positions)
    assert torch.equal(scaled, weight.bfloat16()[ids] * torch.tensor(48**0.5).bfloat16())


def test_attention_clips_and_scales(ops: Ops) -> None:
    """One request without positions: softmax(scale q k) v of clipped projections."""
    heads, kv_heads, head, tokens = 4, 2, 8, 5
    qkv = torch.randn((heads + 2 * kv_heads) * head, 16)
    out = torch.randn(16, heads * head)
    attention = Attention(
        ops=ops,
        cache=0,
        qkv_proj=Linear(ops, ops.pack_weight(qkv)),
        o_proj=Linear(ops, ops.pack_weight(out)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        value_size=head,
        params=AttentionParams(scale=0.3),
        clip=1.0,
    )
    x = torch.randn(tokens, 16)
    backend = ReferenceAttention()
    metadata = AttentionMetadata(
        num_reqs=1,
        num_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.arange(16, 16 + tokens),
    )
    cache = torch.zeros(backend.kv_cache_shape(2, 16, kv_heads, head))
    result = attention(x, StepContext(torch.arange(tokens), [cache], [metadata], backend))
    projected = (x @ qkv.T).clamp(-1, 1).view(tokens, -1, head).transpose(0, 1)
    query, key, value = projected.split([heads, kv_heads, kv_heads])
    expected = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(2, 0),
        value.repeat_interleave(2, 0),
        is_causal=True,
        scale=0.3,
    )
    wanted = expected.transpose(0, 1).reshape(tokens, -1) @ out.T
    torch.testing.assert_close(result, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 71])
def test_alibi_slopes_equal_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    close(torch.tensor(alibi_slopes_bloom(heads)), bloom)
    mpt = -build_mpt_alibi_tensor(heads, 2, 16)[:, 0, 0]
    close(torch.tensor(alibi_slopes_mpt(heads, 16)), mpt)
