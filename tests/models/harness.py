"""Runner of a model without the engine: KV caches, block tables, prefill and decode steps."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
import transformers.models.llama.modeling_llama  # early: see `few_objects_to_search`
from safetensors.torch import save_file
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionMetadata
from octavo.attention.cpu import CPUAttention
from octavo.checkpoints.base import LoadFormat
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import ForHost, as_torch, from_torch
from octavo.layers.neighbors import NeighborArray
from octavo.layers.step import Handed, StepContext
from octavo.layers.token_types import TOKEN_TYPES
from octavo.models.base import Model
from octavo.models.cache import AttentionCache, CacheSpec, LatentCache
from octavo.models.loader import load_model
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.models.state_cache import StateCache, StateMetadata
from octavo.system.tensor import HostTensor, from_numpy, full
from tests.attention.backends import make_backend
from tests.models.rwkv7 import RWKV7Config, RWKV7ForCausalLM


class Runner:
    """Model with KV caches for `num_reqs` requests of at most `max_len` tokens."""

    def __init__(
        self,
        model: Model,
        num_reqs: int,
        max_len: int,
        backend: str = "cpu",
        block_size: int = 16,
    ) -> None:
        self.model = model
        self.backend = (
            CPUAttention()
            if backend == "cpu"
            else cast(AttentionBackend, ForHost(make_backend(backend)))
        )
        per_req = -(-max_len // block_size)
        # Slots that were never written must never be read.
        self.kv_caches = [
            from_torch(torch.full((num_reqs, cache.nbytes // 4), torch.nan))
            if isinstance(cache, StateCache)
            else full(
                self._shape(cache, num_reqs * per_req + 1, block_size), torch.nan, model.dtype
            )
            for cache in model.spec.caches
        ]
        self.caches = [
            cache.view(memory.view("uint8"), block_size, "", self.backend)
            if isinstance(cache, StateCache)
            else memory
            for cache, memory in zip(model.spec.caches, self.kv_caches, strict=True)
        ]
        blocks = torch.randperm(
            num_reqs * per_req, generator=torch.Generator().manual_seed(0), dtype=torch.int32
        )
        self.block_table = (blocks + 1).view(num_reqs, per_req)
        self.block_size = block_size
        self.num_computed = [0] * num_reqs
        self.kept_layers: tuple[int, ...] = ()
        self.kept: dict[int, HostTensor] = {}
        self.received: Handed | None = None
        self.handed: Handed | None = None
        """Input and output of a stage."""

    def _shape(self, cache: CacheSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        if isinstance(cache, LatentCache):
            return self.backend.latent_cache_shape(num_blocks, block_size, cache.size)
        assert isinstance(cache, AttentionCache)
        heads = cache.num_kv_heads, cache.head_size
        return self.backend.kv_cache_shape(num_blocks, block_size, *heads)

    def step(self, scheduled: dict[int, list[int]]) -> dict[int, Tensor]:
        """Compute tokens for some requests; return their logits [tokens, vocab_size]."""
        hidden, starts = self.hidden(scheduled)
        if self.handed is not None:
            return {}
        logits = as_torch(self.model.head(hidden))
        return {req: logits[starts[i] : starts[i + 1]] for i, req in enumerate(scheduled)}

    def hidden(
        self, scheduled: dict[int, list[int]], types: list[int] | None = None
    ) -> tuple[HostTensor, list[int]]:
        """Compute tokens for some requests.

        Args:
            scheduled: tokens by request.
            types: type of each token.

        Returns:
            Hidden states [tokens, hidden_size], and the first token of each request and the end.
        """
        ids, positions, slots, starts, lens = [], [], [], [0], []
        sources, targets = [], []
        for req, tokens in scheduled.items():
            begin = self.num_computed[req]
            at = torch.arange(begin, begin + len(tokens))
            ids += tokens
            positions.append(at)
            blocks = self.block_table[req][at // self.block_size].long()
            slots.append(blocks * self.block_size + at % self.block_size)
            starts.append(len(ids))
            sources.append(req if begin else -1)
            targets += [-1] * (len(tokens) - 1) + [req]
            lens.append(begin + len(tokens))
            self.num_computed[req] += len(tokens)
        metadata = AttentionMetadata(
            num_reqs=len(scheduled),
            num_tokens=len(ids),
            max_query_len=max(len(t) for t in scheduled.values()),
            max_seq_len=max(lens),
            query_start_loc=from_torch(torch.tensor(starts, dtype=torch.int32)),
            seq_lens=from_torch(torch.tensor(lens, dtype=torch.int32)),
            block_table=from_torch(self.block_table[list(scheduled)].contiguous()),
            slot_mapping=from_torch(torch.cat(slots)),
        )
        states = StateMetadata(
            metadata.query_start_loc,
            from_torch(torch.tensor(sources, dtype=torch.int32)),
            from_torch(torch.tensor(targets, dtype=torch.int32)),
            from_torch(torch.full((len(ids),), -1, dtype=torch.int32)),
        )
        step = StepContext(
            from_torch(torch.cat(positions)),
            self.caches,
            [states if isinstance(c, StateCache) else metadata for c in self.model.spec.caches],
            self.backend,
            self.kept_layers,
            self.kept,
            received=self.received,
            arrays=self._arrays(types, [len(tokens) for tokens in scheduled.values()]),
        )
        hidden = self.model.forward(from_torch(torch.tensor(ids)), step)
        self.handed = step.handed
        return hidden, starts

    def _arrays(self, types: list[int] | None, counts: list[int]) -> dict[str, HostTensor]:
        """Return the arrays that the blocks declare, except those of states."""
        arrays = {} if types is None else {TOKEN_TYPES.name: from_torch(torch.tensor(types))}
        for array in self.model.spec.step_arrays:
            if isinstance(array, NeighborArray):
                out, rows = np.empty(sum(counts), np.int64), np.arange(len(counts))
                array.fill(out, rows, 0 * rows, np.array(counts))
                arrays[array.name] = from_numpy(out)
        return arrays


@dataclass
class Generated:
    """Greedy continuations."""

    tokens: list[list[int]]
    logits: list[Tensor]
    """Logits [num_tokens, vocab_size] from which each request's tokens were chosen."""


def generate(
    model: Model,
    prompts: list[list[int]],
    num_tokens: int,
    backend: str = "cpu",
    chunk: int | None = None,
    block_size: int = 16,
) -> Generated:
    """Decode all prompts greedily in one batch; prompts in chunks of `chunk` tokens."""
    longest = max(len(p) for p in prompts) + num_tokens
    runner = Runner(model, len(prompts), longest, backend, block_size)
    known = [list(p) for p in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while any(len(rows) < num_tokens for rows in logits):
        scheduled = {}
        for req, tokens in enumerate(known):
            if len(logits[req]) < num_tokens:
                begin = runner.num_computed[req]
                scheduled[req] = tokens[begin : begin + chunk if chunk else None]
        for req, rows in runner.step(scheduled).items():
            if runner.num_computed[req] == len(known[req]):
                logits[req].append(rows[-1])
                known[req].append(int(rows[-1].argmax()))
    return Generated(
        [tokens[len(p) :] for tokens, p in zip(known, prompts, strict=True)],
        [torch.stack(rows) for rows in logits],
    )


def make_hf(architecture: str, seed: int = 0, factor: float = 1.0, **config: Any) -> Any:
    """Return a tiny transformers model with random weights that generate varied greedy tokens.

    Args:
        architecture: a name in config.json's `architectures`.
        seed: of the weights.
        factor: factor of the weights of linear layers. It is not 1 where a model would enlarge the
            errors of float32, so that those of transformers alone exceed the bounds of the tests.
        config: fields of config.json.
    """
    hf_config = _config_class(architecture)(**config)
    # The eager attention of transformers adds Falcon's ALiBi twice.
    hf_config._attn_implementation = "sdpa" if config.get("alibi") else "eager"
    # Its grouped products need sizes that 4 divides.
    hf_config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = _model_class(architecture)(hf_config).eval()
    linear_std = 0.45 if architecture.startswith(("OPT", "GPT2", "Bloom")) else 0.25
    linear_std *= factor
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name or "ln_" in name
            token = "embed_tokens" in name or name.endswith(
                ("wte.weight", "embeddings.weight", "embed_in.weight")
            )
            if token and getattr(hf_config, "tie_word_embeddings", False):
                std = 0.04  # with larger weights each token would repeat the one before
            elif name.endswith("bias"):
                std = 0.1  # with larger weights some tokens would win everywhere
            else:
                std = 0.2 if norm else linear_std
            mean = parameter.mean().round() if norm and name.endswith("weight") else 0.0
            parameter.normal_(std=std).add_(mean)  # 1, or 0 where the model itself adds 1
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)
            elif name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
            elif name.endswith(("input_min", "output_min")):  # Gemma 4's tower
                buffer.uniform_(-3, -1)
            elif name.endswith(("input_max", "output_max")):
                buffer.uniform_(1, 3)
            elif name.endswith("std_bias"):
                buffer.normal_()
            elif name.endswith("std_scale"):
                buffer.uniform_(0.5, 2)
    model.tie_weights()
    return model


def _model_class(architecture: str) -> Any:
    if architecture in STAND_INS:
        base: Any = getattr(transformers, f"{STAND_INS[architecture]}ForCausalLM")
        own = {"save_pretrained": _save_renamed} if architecture in _RENAMED else {}
        return type(architecture, (base,), own)
    return OWN[architecture][1] if architecture in OWN else getattr(transformers, architecture)


OWN = {"RWKV7ForCausalLM": (RWKV7Config, RWKV7ForCausalLM)}
"""Config and model of architectures that transformers does not have."""
STAND_INS = {"InternLM2ForCausalLM": "Llama", "InternLM3ForCausalLM": "Llama"}
STAND_INS |= {"MiniCPMForCausalLM": "Granite", "ExaoneForCausalLM": "Llama"}
"""Models of transformers that compute what architectures without a class there do."""

_RENAMED = {
    "InternLM2ForCausalLM": {
        "embed_tokens": "tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "self_attn.q_proj": "attention.wqkv",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    },
    "ExaoneForCausalLM": {
        "model.embed_tokens": "transformer.wte",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    },
}
"""Parts of names in the stand-in -> those in the architecture."""


def _save_renamed(model: Any, folder: Path) -> None:
    """Save a Llama under the names of another architecture."""
    architecture, state = type(model).__name__, dict(model.state_dict())
    if architecture == "InternLM2ForCausalLM":
        _fuse_by_group(model.config, state)
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    renamed = {}
    for name, tensor in state.items():
        for old, new in _RENAMED[architecture].items():
            name = name.replace(old, new)
        renamed[name] = tensor.contiguous()
    model.config.architectures = [architecture]
    model.config.save_pretrained(folder)
    save_file(renamed, folder / "model.safetensors")


def _fuse_by_group(config: Any, state: dict[str, Tensor]) -> None:
    """Replace q_proj, k_proj and v_proj by one projection, group by group, named q_proj."""
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        rest = parts[0].shape[1:]
        shape = (config.num_key_value_heads, -1, config.head_dim, *rest)
        state[name] = torch.cat([x.view(shape) for x in parts], 1).view(-1, *rest)


_KINDS = "CausalLM|ConditionalGeneration|MaskedLM|SequenceClassification|TokenClassification"
_ENDS = f"(For({_KINDS})|(MT)?Model)$"


def _config_class(architecture: str) -> Any:
    if architecture in OWN:
        return OWN[architecture][0]
    names = {"GPT2LMHeadModel": "GPT2", "Gemma3ForCausalLM": "Gemma3Text"}
    names |= STAND_INS
    names |= {
        f"{name}ForCausalLM": f"{name}Text"
        for name in ("Gemma3n", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe", "Llama4")
    }
    name = names.get(architecture, re.sub(_ENDS, "", architecture))
    return getattr(transformers, f"{name}Config")


def save_config(
    folder: Path, architecture: str, config: dict[str, Any], **settings: Any
) -> ModelSpec:
    """Save a config.json as transformers writes it, and read it."""
    hf_config = _config_class(architecture)(**config)
    hf_config.architectures = [architecture]
    hf_config.save_pretrained(folder)
    return spec_of(folder, **settings)


def spec_of(folder: Path, **settings: Any) -> ModelSpec:
    """Read a folder's model, of texts alone; `settings` are those of `ModelConfig`."""
    settings.setdefault("language_model_only", True)
    return read_spec(open_checkpoint(folder), ModelConfig(**settings))


def save_and_load(hf_model: Any, folder: Path, dtype: str = "float32", **options: Any) -> Model:
    """Save a transformers model and load it as Octavo's."""
    hf_model.save_pretrained(folder)
    return load(folder, dtype, **options)


def load(
    folder: Path,
    dtype: str = "float32",
    load_format: LoadFormat = "auto",
    quantization: str | None = None,
    **options: Any,
) -> Model:
    """Load a folder."""
    checkpoint = open_checkpoint(folder, load_format)
    options = {"ops": NativeOps()} | options
    spec = spec_of(folder, quantization=quantization)
    return load_model(spec, checkpoint, dtype=dtype, **options)


def make_prompts(vocab_size: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def assert_same_as_hf(
    hf_model: Any, prompts: list[list[int]], generated: Generated, atol: float = 1e-4
) -> None:
    """Check that greedy tokens and logprobs equal those of transformers.

    transformers computes each prompt with the generated tokens after it in one pass. If its
    greatest logit is always the next of these tokens, it would have generated the same.
    """
    for prompt, tokens, logits in zip(prompts, generated.tokens, generated.logits, strict=True):
        with torch.inference_mode():
            out = hf_model(torch.tensor([prompt + tokens[:-1]]), use_cache=False)
        expected = out.logits[0, len(prompt) - 1 :].float()
        torch.testing.assert_close(
            torch.log_softmax(logits, -1), torch.log_softmax(expected, -1), atol=atol, rtol=0
        )
        assert expected.argmax(-1).tolist() == tokens
