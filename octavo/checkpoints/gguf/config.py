"""Conversion of a GGUF file's metadata to a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from octavo.checkpoints.config_json import MOST_LAYERS
from octavo.checkpoints.gguf.architectures import ARCHITECTURES, SCORES
from octavo.checkpoints.gguf.encoders import RANK, classifier_fields, encoder_fields
from octavo.checkpoints.gguf.tokenizer import NO_TOKEN
from octavo.checkpoints.refusals import reason_of_refusal
from octavo.errors import ModelError

_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
}
_BIASES = {
    "attention_bias": {"attn_q.bias", "attn_qkv.bias"},
    "attention_out_bias": {"attn_output.bias"},
    "mlp_bias": {"ffn_up.bias"},
    "use_bias": {"attn_q.bias", "attn_qkv.bias"},
    "bias": {"attn_qkv.bias"},
}
"""Fields that are true if a layer has one of these tensors."""
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Fields of YaRN's description, and their keys in rope.scaling."""
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Fields of generation_config.json, and their keys in general.sampling."""
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
}
"""Keys that may only have values without effect."""
_IGNORED: tuple[str, ...] = (
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.dimension_sections",  # of texts, all sections have the same positions
    "n_deepstack_layers",
)
_IGNORED += ("mm.", "vision.")
_IGNORED += ("dense_2_feat", "dense_3_feat")  # the shapes of the tensors have these sizes
"""Keys, or beginnings of keys, that do not change the text model's numbers."""
_POOLING = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
"""Ways of pooling of llama.cpp, as sentence-transformers names them."""
_MOST = 1e30
NOT_ROTATED = float(np.float32(1e30))
"""Factor of the wavelengths of pairs that Gemma 4 does not rotate."""
_NORMS_WRITTEN = ("deepseek2", "glm4moe", "dots1", "exaone-moe", "nemotron_h_moe")
"""Architectures whose files say if the weights of experts are divided by their sum. In other
architectures they always are, or never."""
_LARGE_GEMMAS: dict[tuple[str, Any], float] = {("gemma2", 46): 144.0, ("gemma3", 62): 168.0}
"""Scalars of queries of the 27B models, by architecture and layers; others use the head's size."""


class Description:
    """Metadata of a model, with errors that name the file.

    Args:
        file: the file.
        metadata: its metadata.
    """

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file, self.metadata = file, metadata
        self.kind = metadata.get("general.architecture")
        found = ARCHITECTURES.get(self.kind) if isinstance(self.kind, str) else None
        experts = metadata.get(f"{self.kind}.expert_count")
        if type(experts) is int and experts > 0:
            found = ARCHITECTURES.get(f"{self.kind} with experts", found)
        if found is None:
            reason = reason_of_refusal(self.kind) if isinstance(self.kind, str) else None
            raise self.error(
                f"general.architecture={str(self.kind)[:100]!r} is not supported"
                + (f": {reason}" if reason else "")
                + f"; supported: {', '.join(ARCHITECTURES)}"
            )
        self.architecture = found
        self._known: set[str] = set()
        """Keys of the architecture that were read."""

    def error(self, problem: str) -> ModelError:
        """Return an error that names the file."""
        return ModelError(f"{self.file}: {problem}.")

    def value(self, key: str) -> Any:
        """Return the value of a key of the architecture, or None."""
        self._known.add(key)
        return self.metadata.get(f"{self.kind}.{key}")

    def number(self, key: str) -> int | float | None:
        """Return the value of a key of the architecture, or None.

        Of numbers that may differ between layers it is the first.

        Raises:
            ModelError: the value is not a finite number, or differs between layers.
        """
        value = self.value(key)
        if isinstance(value, np.ndarray):  # one value for each layer
            if len(value) == 0 or (
                key not in self.architecture.varying and (value != value[0]).any()
            ):
                raise self.error(
                    f"{self.kind}.{key} differs between layers, which is not supported"
                )
            value = value[0].item()
        if value is None:
            return None
        if type(value) not in (int, float) or not abs(value) < _MOST:
            raise self.error(f"{self.kind}.{key}={str(value)[:100]!r} is not a finite number")
        # The file has float32 numbers: 1e-06 is the one that was meant.
        return float(str(np.float32(value))) if type(value) is float else value

    def sections(self) -> list[int]:
        """Return the numbers of pairs of a head for time, height and width (m-RoPE).

        Raises:
            ModelError: the file does not have them.
        """
        found = self.metadata.get(f"{self.kind}.rope.dimension_sections")
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or len(found) < 3:
            raise self.error(
                f"the metadata lacks {self.kind}.rope.dimension_sections, at least three numbers, "
                "which pictures need; convert the model again"
            )
        sections: list[int] = found[:3].tolist()
        return sections

    def _flag(self, key: str, default: bool) -> bool:
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{self.kind}.{key}={str(value)[:100]!r} is not true or false")
        return value

    def _flags(self, key: str) -> list[bool] | None:
        """Return the value of each layer, true or false; None: the file does not have the key.

        MiMo's files have 1 and 0 for them.
        """
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or not np.isin(value, (0, 1)).all():
            raise self.error(f"{self.kind}.{key} is not true or false for each layer")
        flags: list[bool] = value.astype(np.bool_).tolist()
        return flags

    def config(
        self,
        vocab_size: int,
        tied: bool,
        shapes: Mapping[str, tuple[int, ...]],
        rope_factors: Mapping[str, Sequence[float]],
    ) -> dict[str, Any]:
        """Return the config.

        Args:
            vocab_size: number of rows of the embedding.
            tied: True if the file has no LM head of its own.
            shapes: shapes of all tensors by their names, rows first.
            rope_factors: factors of wavelengths by the names of their tensors.

        Raises:
            ModelError: a key has an unsupported value, or is unknown.
        """
        fields = _FIELDS | dict(self.architecture.fields)
        config: dict[str, Any] = dict(self.architecture.defaults)
        config |= {
            name: value for name, key in fields.items() if (value := self.number(key)) is not None
        }
        if self.num_predicting:
            config["num_hidden_layers"] = config.get("num_hidden_layers", 0) - self.num_predicting
        heads = config.get("num_attention_heads")
        config.setdefault("num_key_value_heads", heads)
        if heads == 0:  # a model without attention
            del config["num_attention_heads"], config["num_key_value_heads"]
        if heads:
            config.setdefault("head_dim", max(1, config.get("hidden_size", 0) // heads))
        if "kv_lora_rank" in config:
            config |= self._latent_attention(config, shapes.keys())
            config.pop("head_dim", None)
        elif "attention.value_length" not in self.architecture.fields.values():
            self._check_value_size("", config.get("head_dim"))
        config |= {
            "architectures": [self.architecture.name],
            "vocab_size": vocab_size,
            "tie_word_embeddings": tied,
        }
        in_layers = {name.split(".", 2)[-1] for name in shapes if name.startswith("blk.")}
        config |= {name: bool(biases & in_layers) for name, biases in _BIASES.items()}
        config |= self._windows(config)
        config |= self._rope(config, rope_factors)
        if not self._flag("attention.causal", True):
            config["is_causal"] = False
        config |= encoder_fields(self, config, shapes, in_layers)
        config |= classifier_fields(self, shapes, causal="is_causal" not in config)
        if self.kind == "gemma4":
            config |= self._gemma4(config, shapes.keys(), rope_factors.get("rope_freqs", []))
        if self.kind == "gemma3n":
            config |= self._gemma3n(config, shapes.get("blk.0.laurel_l.weight", ()))
        if self.kind == "laguna":
            config |= self._laguna(config, shapes.get("blk.0.attn_gate.weight", ()))
        if self.kind == "mimo2":
            config |= self._mimo2(config, shapes.keys())
        if "expert_count" in self.architecture.fields.values():
            config |= self._routing(in_layers)
        config |= self._special(config, in_layers)
        if self.kind == "jamba":
            config |= self._jamba_experts(config, shapes.keys())
        for name in ("bos", "eos", "pad"):
            if (token := self._token(name)) is not None:
                config[f"{name}_token_id"] = token
        self._refuse_unknown()
        return config

    def modules(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Return the files of a sentence-transformers folder for a model of vectors.

        llama.cpp divides every vector by its length.

        Args:
            shapes: shapes of all tensors by their names, rows first.

        Returns:
            Texts of files by name; empty: the file names no way of pooling.

        Raises:
            ModelError: the way of pooling is not supported.
        """
        kind = self.pooling_type
        if kind in (0, RANK):
            return {}
        texts: dict[str, Any] = {"1_Pooling/config.json": {f"pooling_mode_{_POOLING[kind]}": True}}
        names = ["Transformer", "Pooling"]
        for i in (2, 3):
            shape = shapes.get(f"dense_{i}.weight", ())
            if len(shape) == 2:
                texts[f"{i}_Dense/config.json"] = {
                    "in_features": shape[1],
                    "out_features": shape[0],
                    "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity",
                }
                names.append("Dense")
        listed = [
            {"type": f"sentence_transformers.models.{name}", "path": f"{i}_{name}" if i else ""}
            for i, name in enumerate([*names, "Normalize"])
        ]
        return {name: json.dumps(text) for name, text in (texts | {"modules.json": listed}).items()}

    @property
    def pooling_type(self) -> int:
        """Way of pooling; 0: the file names none.

        Raises:
            ModelError: it is not supported.
        """
        kind = self.value("pooling_type")
        if kind is None:
            return 0
        if type(kind) is not int or kind not in (0, RANK, *_POOLING):
            raise self.error(
                f"{self.kind}.pooling_type={str(kind)[:100]} is not supported; use the model's "
                "Hugging Face folder"
            )
        return kind

    @property
    def num_predicting(self) -> int:
        """Number of layers after all others that predict several tokens at once.

        Raises:
            ModelError: it is not a whole number.
        """
        if not self.architecture.predicts:
            return 0
        count = self.value("nextn_predict_layers")
        if count is not None and (type(count) is not int or count < 0):
            raise self.error(f"{self.kind}.nextn_predict_layers={str(count)[:100]} is no number")
        return count or 0

    def _check_value_size(self, suffix: str, key_size: object) -> None:
        """Raise `ModelError` if heads of values have another size than those of keys."""
        size = self.number(f"attention.value_length{suffix}")
        if size not in (None, key_size):
            raise self.error(
                f"attention.value_length{suffix}={size} differs from key_length{suffix}="
                f"{key_size}, which is not supported"
            )

    def _refuse_unknown(self) -> None:
        """Raise `ModelError` for keys that nothing has read, since they may change the results."""
        for key, neutral in _WITHOUT_EFFECT.items():
            if key in self._known:
                continue
            value = self.value(key)
            if value is not None and (type(value) not in (bool, int) or value not in neutral):
                raise self.error(f"{self.kind}.{key}={str(value)[:100]} is not supported")
        prefix = f"{self.kind}."
        own = (key.removeprefix(prefix) for key in self.metadata if key.startswith(prefix))
        unknown = [k for k in own if k not in self._known and not k.startswith(_IGNORED)]
        if unknown:
            names = ", ".join(prefix + key[:100] for key in unknown[:6])
            raise self.error(
                f"the metadata has keys that are not supported for this architecture: {names}; "
                "use the model's Hugging Face folder"
            )

    def _windows(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of sliding windows; `config` has the other fields."""
        architecture = self.architecture
        window = self.number("attention.sliding_window")
        if not window:  # 0: none
            if architecture.windowed:
                self._known.add("attention.sliding_window_pattern")
            return dict(architecture.unwindowed)
        if not architecture.windowed:
            raise self.error(f"{self.kind}.attention.sliding_window is not supported")
        fields: dict[str, Any] = {"sliding_window": window}
        if architecture.windowed_name:
            fields["architectures"] = [architecture.windowed_name]
        if architecture.window_by_layer:
            pattern = self._flags("attention.sliding_window_pattern")
            if pattern is not None:
                kinds = {False: "full_attention", True: "sliding_attention"}
                own = pattern[: self._layer_count(config)]  # others predict several tokens
                fields["layer_types"] = [kinds[sliding] for sliding in own]
        return fields

    def _rope(
        self, config: Mapping[str, Any], factors: Mapping[str, Sequence[float]]
    ) -> dict[str, Any]:
        """Return the fields of rotary positions.

        Args:
            config: the other fields.
            factors: see `config`.
        """
        fields: dict[str, Any] = {}
        scaling = self._scaling(config, factors)
        if scaling:
            theta = config.get("rope_theta", 10000.0)
            fields["rope_parameters"] = scaling | {"rope_theta": theta}
        rotated, head_dim = self.number("rope.dimension_count"), config.get("head_dim")
        if head_dim:
            # Half an element more, so that the product with the head's size is never too small.
            part = 1.0 if rotated in (None, 0, head_dim) else (rotated + 0.5) / head_dim
            fields["partial_rotary_factor"] = part
        return fields

    def _scaling(
        self, config: Mapping[str, Any], factors: Mapping[str, Sequence[float]]
    ) -> dict[str, Any]:
        """Return the description of scaled positions; empty: they are not scaled."""
        kind = self.value("rope.scaling.type")
        kind = None if kind is None else str(kind)
        known = {name: self.number(f"rope.scaling.{key}") for name, key in _YARN.items()}
        if kind is None and known["factor"] not in (None, 0, 1):
            kind = "linear"  # as in llama.cpp
        if kind not in (None, "none", "linear", "yarn", "longrope"):
            raise self.error(
                f"rope.scaling.type={kind[:100]!r} is not supported; known: linear, yarn, longrope"
            )
        whole, longer = factors.get("rope_freqs"), factors.get("rope_factors_long")
        if (kind == "longrope") > (longer is not None) or (kind in ("linear", "yarn") and factors):
            raise self.error(f"rope.scaling.type={kind} does not match the tensors of factors")
        extrapolation = self.number("rope.scaling.yarn_ext_factor")  # below 0: not set
        neutral = 1 if kind == "yarn" else 0
        if extrapolation is not None and extrapolation >= 0 and extrapolation != neutral:
            raise self.error(f"rope.scaling.yarn_ext_factor={extrapolation} is not supported")
        attention = self.number("rope.scaling.attn_factor")
        if longer is None and attention not in (None, 1):
            raise self.error(f"rope.scaling.attn_factor={attention} is not supported")
        log_multiplier = self.number("rope.scaling.yarn_log_multiplier")
        if log_multiplier and (self.kind not in ("mistral3", "deepseek2") or kind != "yarn"):
            raise self.error(f"rope.scaling.yarn_log_multiplier={log_multiplier} is not supported")
        if kind == "linear":
            return {"rope_type": kind, "factor": known["factor"]}
        if kind == "yarn":
            fields = {name: value for name, value in known.items() if value is not None}
            if log_multiplier and self.kind == "deepseek2":  # times 0.1 in these files
                fields |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * log_multiplier)
            elif log_multiplier:
                fields |= {"mscale": 1.0, "mscale_all_dim": log_multiplier}
            return {"rope_type": kind} | fields
        if not factors:
            return {}
        original = known["original_max_position_embeddings"]
        return {
            "rope_type": "longrope",
            "short_factor": factors.get("rope_factors_short", whole),
            "long_factor": longer or whole,
            "attention_factor": 1.0 if attention is None else attention,
            "original_max_position_embeddings": original or config.get("max_position_embeddings"),
        }

    def _special(self, config: Mapping[str, Any], in_layers: Set[str]) -> dict[str, Any]:
        """Return the fields that only this architecture has.

        Args:
            config: the other fields.
            in_layers: names of the tensors of all layers, without the layers' prefixes.
        """
        match self.kind:
            case "gemma2" | "gemma3" | "gemma-embedding":
                default = config.get("head_dim", 256)
                layers = config.get("num_hidden_layers")
                scalar = _LARGE_GEMMAS.get((self.kind, layers), default)
                return {"query_pre_attn_scalar": scalar}
            case "qwen35" | "qwen35moe":
                return self._linear_attention(config)
            case "qwen3next":
                split = "ssm_in.weight" not in in_layers  # old files have the model's own tensor
                return self._linear_attention(config) | {"split_qkvz": split}
            case "glm4moe":
                return {"use_qk_norm": "attn_q_norm.weight" in in_layers}
            case "deepseek2" if "exp_probs_b.bias" in in_layers:
                # Files of 2025 have no groups. Of these models only DeepSeek's own have some.
                groups = (8, 4) if config.get("n_routed_experts") == 256 else (1, 1)
                return {
                    "architectures": ["DeepseekV3ForCausalLM"],
                    "n_group": config.get("n_group", groups[0]),
                    "topk_group": config.get("topk_group", groups[1]),
                }
            case "deepseek2" if config.get("n_group", 1) > 1:
                return {"topk_method": "group_limited_greedy"}
            case "ernie4_5-moe":
                self.number("expert_shared_feed_forward_length")  # it is not the shared size
            case "hunyuan-moe":
                self.number("expert_shared_feed_forward_length")
                self.number("feed_forward_length")
                if (count := self.number("expert_shared_count")) not in (None, 1):
                    raise self.error(f"expert_shared_count={count} is not supported")
            case "exaone-moe" | "afmoe" | "cohere2moe":
                self.number("expert_shared_feed_forward_length")  # the product of two others
                if "sliding_window" not in config:
                    raise self.error(f"the metadata lacks {self.kind}.attention.sliding_window")
            case "minimax-m2":
                self.number("feed_forward_length")  # the experts have the same
            case "llama4":
                return self._llama4(config)
            case "rwkv7":
                # The file says 0 heads.
                hidden, size = config.get("hidden_size", 0), config.get("head_dim")
                heads = max(1, hidden // size) if size else 1
                return {"num_attention_heads": heads, "num_key_value_heads": heads}
            case "lfm2" | "lfm2moe":
                heads, count = self._heads_by_layer(config)
                kinds = ["full_attention" if number else "conv" for number in heads]
                return {"num_key_value_heads": count, "layer_types": kinds}
            case "mamba":
                return self._mamba(in_layers)
            case "jamba":
                return self._jamba(config, in_layers)
            case "mamba2" | "granitehybrid" | "falcon-h1" | "nemotron_h" | "nemotron_h_moe":
                return self._state_spaces(config, in_layers)
            case "granite" | "granite_swa":
                if not self._flag("rope.scaling.finetuned", True):
                    raise self.error(f"{self.kind}.rope.scaling.finetuned=false is not supported")
                rotated = self._flags("attention.rope_pattern")
                if rotated is not None and self.kind == "granite_swa":
                    theta = config.get("rope_theta", 10000.0)
                    return {"layer_rope_theta": [theta if one else 0 for one in rotated]}
            case "minicpm":
                missing = {"embedding_multiplier", "residual_multiplier", "logits_scaling"}
                missing -= config.keys()
                if missing:
                    raise self.error(
                        f"the metadata lacks keys for {', '.join(sorted(missing))}; convert the "
                        "model again"
                    )
                size = config.get("head_dim", 1)
                if size <= 0:
                    raise self.error(f"attention.key_length={size} is not above 0")
                return {"attention_multiplier": size**-0.5}
            case "stablelm":
                self._flag("use_parallel_residual", True)  # the norm decides, as in llama.cpp
                return {
                    "use_qkv_bias": "attn_q.bias" in in_layers,
                    "qk_layernorm": "attn_q_norm.weight" in in_layers,
                    "use_parallel_residual": "ffn_norm.weight" not in in_layers,
                }
            case "apertus":
                constants = {"beta": np.float32(0.5), "eps": np.float32(-1e-6)}
                for name, expected in constants.items():
                    if not (np.asarray(self.metadata.get(f"xielu.{name}")) == expected).all():
                        raise self.error(f"xielu.{name} is not {expected}, which is not supported")
            case "gpt-oss":
                self.number("feed_forward_length")  # the experts have the same
                if "rope_parameters" in config:
                    return {"rope_parameters": config["rope_parameters"] | {"truncate": False}}
            case "muse-glimmer":
                kinds, theta = config.get("layer_types", []), config.get("rope_theta", 10000.0)
                # Layers without a window have no positions.
                return {"layer_rope_theta": [theta * (kind[0] == "s") for kind in kinds]}
            case "bitnet":
                # llama.cpp computes SiLU; the published model with grouped queries has ReLU^2.
                grouped = config.get("num_key_value_heads") != config.get("num_attention_heads")
                return {"hidden_act": "relu2" if grouped else "silu"}
            case "starcoder":
                if config.get("num_key_value_heads") != 1:
                    raise self.error("attention.head_count_kv is not 1, which is not supported")
            case "command-r":
                return {"use_qk_norm": "attn_q_norm.weight" in in_layers}
            case "gptneox":
                parallel = self._flag("use_parallel_residual", True)
                return {"use_parallel_residual": parallel}
            case "falcon":
                return {"num_ln_in_parallel_attn": 2 if "attn_norm_2.weight" in in_layers else 1}
            case "mistral3":
                temperature = self.number("attention.temperature_scale")
                if temperature:
                    rope = config.get("rope_parameters", {"rope_type": "default"})
                    rope = rope | {"llama_4_scaling_beta": temperature}
                    return {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": rope}
            case "mpt":
                bias_max = self.number("attention.max_alibi_bias")
                attention = {"alibi": bool(bias_max), "alibi_bias_max": bias_max}
                attention["clip_qkv"] = self.number("attention.clamp_kqv") or None
                hidden, inner = config.get("hidden_size", 0), config.get("intermediate_size", 0)
                if not hidden or inner % hidden:
                    raise self.error(
                        f"feed_forward_length={inner} is no multiple of embedding_length={hidden}"
                    )
                return {"attn_config": attention, "expansion_ratio": inner // hidden}
        return {}

    def _routing(self, in_layers: Set[str]) -> dict[str, Any]:
        """Return the fields of a router.

        Args:
            in_layers: names of the tensors of all layers, without the layers' prefixes.

        Raises:
            ModelError: the function of its logits is not the architecture's.
        """
        given, scores = self.number("expert_gating_func"), self.architecture.scores
        normed = self._flag("expert_weights_norm", False)
        if self.kind == "deepseek2":
            scores = "sigmoid" if "exp_probs_b.bias" in in_layers else "softmax"
        if self.kind == "cohere2moe" and given == SCORES["softmax"] and normed:
            return {"expert_selection_fn": "softmax"}
        if given not in (None, 0, SCORES[scores]):
            raise self.error(f"{self.kind}.expert_gating_func={given} is not {scores}")
        if self.kind in ("afmoe", "laguna") and not normed:
            raise self.error(f"{self.kind}.expert_weights_norm=false is not supported")
        if self.kind == "cohere2moe":
            return {"expert_selection_fn": "sigmoid", "norm_topk_prob": normed}
        written = normed or self.kind in _NORMS_WRITTEN
        return {"norm_topk_prob": normed} if written else {}

    def _llama4(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of Llama 4 that llama.cpp has as constants."""
        fields: dict[str, Any] = {"use_qk_norm": config.get("num_local_experts") != 128}
        if self.value("attention.sliding_window") == 0:  # no chunks, and positions in all layers
            rotated = [1] * self._layer_count(config)
            return fields | {"attention_chunk_size": None, "no_rope_layers": rotated}
        return fields | {"attention_chunk_size": 8192, "attn_temperature_tuning": True}

    def _latent_attention(self, config: Mapping[str, Any], tensors: Set[str]) -> dict[str, Any]:
        """Return the fields of latent attention.

        Files with key_length_mla describe the absorbed form, whose heads of keys are larger.

        Args:
            config: the other fields.
            tensors: names of all tensors.
        """
        key = self.number("attention.key_length_mla") or config.get("head_dim", 0)
        value = self.number("attention.value_length_mla")
        if value is None:
            value = self.number("attention.value_length")
        heads = config.get("num_attention_heads") or 1
        fields = {
            "num_key_value_heads": heads,
            "qk_nope_head_dim": key - config.get("qk_rope_head_dim", 0),
            "v_head_dim": value or config.get("hidden_size", 0) // heads,
            "split_kv_b": "blk.0.attn_k_b.weight" in tensors,
        }
        self.number("attention.value_length")
        return fields

    def _linear_attention(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of Qwen3.5's linear attention."""
        heads, inner = config.get("linear_num_value_heads"), self.number("ssm.inner_size")
        if not heads or not inner or inner % heads:
            raise self.error(f"ssm.inner_size={inner} is no multiple of ssm.time_step_rank={heads}")
        fields: dict[str, Any] = {"linear_value_head_dim": inner // heads}
        recurrent = self._flags("attention.recurrent_layers")
        if recurrent is not None:
            kinds = {False: "full_attention", True: "linear_attention"}
            own = recurrent[: len(recurrent) - self.num_predicting]
            fields["layer_types"] = [kinds[linear] for linear in own]
        return fields

    def _mamba(self, in_layers: Set[str]) -> dict[str, Any]:
        """Return the fields of Mamba and Falcon Mamba; `in_layers` as in `_special`."""
        self._known.add("feed_forward_length")
        normed = self._flag("ssm.dt_b_c_rms", False)
        return {
            "architectures": ["FalconMambaForCausalLM" if normed else "MambaForCausalLM"],
            "use_bias": "ssm_in.bias" in in_layers,
            "use_conv_bias": "ssm_conv1d.bias" in in_layers,
        }

    def _jamba(self, config: Mapping[str, Any], in_layers: Set[str]) -> dict[str, Any]:
        """Return the fields of Jamba, where each n-th layer has attention."""
        heads, count = self._heads_by_layer(config)
        period, first = self._every_nth("attention.head_count_kv", heads)
        inner, hidden = self.number("ssm.inner_size"), config.get("hidden_size")
        if not inner or not hidden:
            raise self.error("the metadata lacks ssm.inner_size or embedding_length")
        return {
            "num_key_value_heads": count,
            "attn_layer_period": period,
            "attn_layer_offset": first,
            "mamba_expand": _expansion(inner, hidden),
            "mamba_proj_bias": "ssm_in.bias" in in_layers,
            "mamba_conv_bias": "ssm_conv1d.bias" in in_layers,
        }

    def _jamba_experts(self, config: Mapping[str, Any], tensors: Set[str]) -> dict[str, Any]:
        """Return the fields of Jamba's experts, which each n-th layer has.

        Args:
            config: the other fields.
            tensors: names of all tensors.
        """
        layers = range(self._layer_count(config))
        routers = [f"blk.{i}.ffn_gate_inp.weight" in tensors for i in layers]
        period, first = self._every_nth("expert_count", routers)
        return {"expert_layer_period": period, "expert_layer_offset": first}

    def _every_nth(self, key: str, chosen: Sequence[object]) -> tuple[int, int]:
        """Return the distance of the chosen layers, and the index of the first one.

        Args:
            key: the key that chooses them.
            chosen: for each layer, a true value if it is chosen.

        Raises:
            ModelError: their distances differ.
        """
        count = len(chosen)
        indices = [i for i, one in enumerate(chosen) if one]
        first = indices[0] if indices else count
        period = indices[1] - first if len(indices) > 1 else count + 1
        if indices != [i for i in range(count) if i % period == first]:
            raise self.error(f"{self.kind}.{key} does not choose each n-th of {count} layers")
        return period, first

    def _state_spaces(self, config: Mapping[str, Any], in_layers: Set[str]) -> dict[str, Any]:
        """Return the fields of the families with Mamba-2's mixers."""
        heads, inner = self.number("ssm.time_step_rank"), self.number("ssm.inner_size")
        hidden = config.get("hidden_size")
        if not heads or not inner or inner % heads or not hidden:
            raise self.error(f"ssm.inner_size={inner} is no multiple of ssm.time_step_rank={heads}")
        size = inner // heads
        expand = _expansion(inner, hidden)
        conv_bias, in_bias = "ssm_conv1d.bias" in in_layers, "ssm_in.bias" in in_layers
        if self.kind in ("mamba2", "nemotron_h", "nemotron_h_moe"):
            fields: dict[str, Any] = {"use_conv_bias": conv_bias, "use_bias": in_bias}
        else:
            fields = {"mamba_conv_bias": conv_bias, "mamba_proj_bias": in_bias}
        match self.kind:
            case "mamba2":
                return fields | {"head_dim": size, "expand": expand}
            case "falcon-h1":
                fields["projectors_bias"] = "ssm_out.bias" in in_layers
                fields["mamba_rms_norm"] = "ssm_norm.weight" in in_layers
                return fields | {"mamba_d_head": size}
        kv_heads, num_kv_heads = self._heads_by_layer(config)
        sizes, size_of_mlps = self._by_layer("feed_forward_length", config, 1)
        kinds = ["attention" if count else "mamba" for count in kv_heads]
        is_nemotron = self.kind in ("nemotron_h", "nemotron_h_moe")
        if is_nemotron:
            own = "mlp" if self.kind == "nemotron_h" else "moe"
            kinds = [own if n else kind for n, kind in zip(sizes, kinds, strict=True)]
        fields["num_key_value_heads"], fields["intermediate_size"] = num_kv_heads, size_of_mlps
        has_rope = self._flag("rope.scaling.finetuned", True)
        if is_nemotron:
            return fields | {"layers_block_type": kinds, "mamba_head_dim": size}
        head_dim = config.get("head_dim", 1)
        fields["layer_types"] = kinds
        fields["position_embedding_type"] = "rope" if has_rope else "nope"
        fields |= {"mamba_d_head": size, "mamba_expand": expand}
        # Bamba's files lack these.
        fields["shared_intermediate_size"] = config.get(
            "shared_intermediate_size", fields["intermediate_size"]
        )
        fields["attention_multiplier"] = config.get("attention_multiplier", head_dim**-0.5)
        return fields

    def _gemma3n(self, config: Mapping[str, Any], laurel: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields of Gemma 3n; `laurel` is the shape of a low-rank projection."""
        if len(laurel) != 2:
            raise self.error("the file lacks blk.0.laurel_l.weight")
        scales = self.value("activation_sparsity_scale")  # quantiles of the standard normal
        if not isinstance(scales, np.ndarray) or scales.dtype != np.float32:
            raise self.error(f"{self.kind}.activation_sparsity_scale has no number for each layer")
        layers = config.get("num_hidden_layers")
        if len(scales) != layers or np.isnan(scales).any():
            raise self.error(
                f"{self.kind}.activation_sparsity_scale has no number for each of {layers} layers"
            )
        return {
            "intermediate_size": self._of_layers("feed_forward_length", len(scales)),
            "activation_sparsity_pattern": [NormalDist().cdf(scale) for scale in scales.tolist()],
            "laurel_rank": laurel[0],
            "vocab_size_per_layer_input": config["vocab_size"],
        }

    def _gemma4(
        self, config: Mapping[str, Any], tensors: Set[str], factors: Sequence[float]
    ) -> dict[str, Any]:
        """Return the fields of Gemma 4's two kinds of layers.

        Args:
            config: the other fields.
            tensors: names of all tensors.
            factors: factors of wavelengths of the layers without a window; very large ones stand
                for pairs that are not rotated.
        """
        windowed = [kind == "sliding_attention" for kind in config.get("layer_types", [])]
        if not any(windowed) or all(windowed):
            raise self.error("the metadata has no layers with, or none without, a sliding window")
        full_layer = windowed.index(False)
        own, full = self._heads_by_kind(windowed)
        inner, shared = self._of_layers("feed_forward_length", len(windowed)), 0
        if wide := inner[-1] != inner[0]:
            shared = min(len(inner), int(config.get("num_kv_shared_layers", 0)))
            if inner != [inner[0]] * (len(inner) - shared) + [2 * inner[0]] * shared:
                raise self.error("feed_forward_length is not doubled in the layers that share keys")
        head_dim = self.number("attention.key_length_swa") or config.get("head_dim")
        self._check_value_size("_swa", head_dim)
        if self.number("rope.dimension_count_swa") not in (None, head_dim):
            raise self.error("rope.dimension_count_swa is not the size of a head")
        turning = sum(factor == 1 for factor in factors)
        if [*factors] != [1.0] * turning + [NOT_ROTATED] * (len(factors) - turning):
            raise self.error("rope_freqs.weight has factors that are neither 1 nor 1e30")
        positions: dict[str, Any] = {"rope_theta": config.get("rope_theta", 1e6)}
        if factors:
            part = (turning + 0.5) / len(factors) if turning < len(factors) else 1.0
            positions |= {"rope_type": "proportional", "partial_rotary_factor": part}
        theta = self.number("rope.freq_base_swa") or 10000.0
        return {
            "num_key_value_heads": own,
            "num_global_key_value_heads": full,
            "attention_k_eq_v": f"blk.{full_layer}.attn_v.weight" not in tensors,
            "use_double_wide_mlp": wide,
            "global_head_dim": config.get("head_dim"),
            "head_dim": head_dim,
            "vocab_size_per_layer_input": config["vocab_size"],
            # The metadata does not say so: tokens of a picture see each other in all published
            # models but E2B and E4B, which have inputs of layers.
            "use_bidirectional_attention": (
                None if config.get("hidden_size_per_layer_input") else "vision"
            ),
            "rope_parameters": {
                "full_attention": positions,
                "sliding_attention": {"rope_theta": theta},
            },
        }

    def _laguna(self, config: Mapping[str, Any], gate: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields of Laguna's layers; `gate` is the shape of the first layer's gate.

        As in llama.cpp, of a file with a window and no pattern each fourth layer has none.
        """
        count = self._layer_count(config)
        heads = self._of_layers("attention.head_count", count)
        if not gate:
            raise self.error("the file lacks blk.0.attn_gate.weight")
        fields: dict[str, Any] = {
            "num_attention_heads_per_layer": heads,
            "gating": "per-head" if heads[:1] == [gate[0]] else "per-element",
            "rope_parameters": self.two_ropes(config),
        }
        dense = self.number("leading_dense_block_count") or 0
        fields["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(count)]
        if "sliding_window" in config and "layer_types" not in config:
            kinds = ["full_attention", *["sliding_attention"] * 3]
            fields["layer_types"] = [kinds[i % 4] for i in range(count)]
        return fields

    def _mimo2(self, config: Mapping[str, Any], tensors: Set[str]) -> dict[str, Any]:
        """Return the fields of the two kinds of layers of MiMo V2.

        Args:
            config: the other fields.
            tensors: names of all tensors.
        """
        if "rope_parameters" in config:
            raise self.error(f"{self.kind}.rope.scaling is not supported")
        kinds = config.get("layer_types", [])
        if len(kinds) != (count := self._layer_count(config)):
            raise self.error(f"the metadata has no window, or none, for each of {count} layers")
        windowed = [kind == "sliding_attention" for kind in kinds]
        own, full = self._heads_by_kind(windowed)
        with_sinks = {
            one for i, one in enumerate(windowed) if f"blk.{i}.attn_sinks.weight" in tensors
        }
        return {
            "num_key_value_heads": full,
            "swa_num_key_value_heads": own,
            "add_full_attention_sink_bias": False in with_sinks,
            "add_swa_attention_sink_bias": True in with_sinks,
            "moe_layer_freq": [
                int(f"blk.{i}.ffn_gate_inp.weight" in tensors) for i in range(count)
            ],
            "rope_parameters": self.two_ropes(config),
        }

    def two_ropes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the positions of layers without and with a window; the latter are not scaled."""
        head_dim, full = config.get("head_dim") or 1, config.get("partial_rotary_factor", 1.0)
        rotated = self.number("rope.dimension_count_swa")
        theta = self.number("rope.freq_base_swa") or config.get("rope_theta", 10000.0)
        return {
            "full_attention": {
                "rope_theta": config.get("rope_theta", 10000.0),
                "partial_rotary_factor": full,
            }
            | config.get("rope_parameters", {}),
            "sliding_attention": {
                "rope_theta": theta,
                "partial_rotary_factor": (rotated + 0.5) / head_dim if rotated else full,
            },
        }

    def _heads_by_kind(self, windowed: Sequence[bool]) -> tuple[int | None, int | None]:
        """Return the numbers of heads of keys of layers with a window, and of those without.

        None: no layer is of this kind.

        Args:
            windowed: for each layer, True if it has a window.

        Raises:
            ModelError: layers of one kind have different numbers.
        """
        heads = self._of_layers("attention.head_count_kv", len(windowed))
        kinds = [{n for n, one in zip(heads, windowed, strict=True) if one == w} for w in (1, 0)]
        if max(map(len, kinds)) > 1:
            raise self.error("attention.head_count_kv differs between layers of one kind")
        own, full = (next(iter(numbers), None) for numbers in kinds)
        return own, full

    def _layer_count(self, config: Mapping[str, Any]) -> int:
        """Return the number of layers."""
        count = config.get("num_hidden_layers", 0)
        if type(count) is not int or not 0 <= count <= MOST_LAYERS:
            raise self.error(f"{self.kind}.block_count={count} is not supported")
        return count

    def _of_layers(self, key: str, count: int) -> list[Any]:
        """Return the number of each layer, without layers that predict several tokens."""
        if type(count) is not int or count > MOST_LAYERS:
            raise self.error(f"{self.kind}.block_count={count} is not supported")
        value = self.value(key)
        numbers = value.tolist() if isinstance(value, np.ndarray) else [value] * count
        if self.num_predicting and len(numbers) == count + self.num_predicting:
            numbers = numbers[:count]
        if len(numbers) != count or any(type(number) is not int for number in numbers):
            raise self.error(f"{self.kind}.{key} is not a whole number for each of {count} layers")
        return numbers

    def _heads_by_layer(self, config: Mapping[str, Any]) -> tuple[list[int], int | None]:
        """Return the number of heads of keys of each layer, and the one of those with attention."""
        key, heads = "attention.head_count_kv", config.get("num_attention_heads")
        return self._by_layer(key, config, heads)

    def _by_layer(
        self, key: str, config: Mapping[str, Any], default: int | None
    ) -> tuple[list[int], int | None]:
        """Return the number of each layer, and the one that is not 0.

        Args:
            key: the key.
            config: the other fields.
            default: the second result if all numbers are 0.

        Raises:
            ModelError: layers have different numbers other than 0.
        """
        numbers = self._of_layers(key, config.get("num_hidden_layers", 0))
        others = {number for number in numbers if number}
        if len(others) > 1:
            raise self.error(
                f"{self.kind}.{key} has several numbers other than 0, which is not supported"
            )
        return numbers, others.pop() if others else default

    def _token(self, name: str) -> int | None:
        """Return the id of a special token; None: the file has none, which -1 can say, too."""
        token = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return token if type(token) is int and 0 <= token < NO_TOKEN else None

    def end_tokens(self) -> list[int]:
        """Return the ids of all tokens that end an answer."""
        ids = (self._token(name) for name in ("eos", "eot", "eom"))
        return list(dict.fromkeys(token for token in ids if token is not None))

    def sampling(self) -> dict[str, Any]:
        """Return the default sampling parameters, by their names in generation_config.json.

        Raises:
            ModelError: a value is not a number.
        """
        found: dict[str, Any] = {}
        for name, key in SAMPLING.items():
            value = self.metadata.get(f"general.sampling.{key}")
            if value is None:
                continue
            if type(value) not in (int, float):
                raise self.error(f"general.sampling.{key}={str(value)[:100]!r} is not a number")
            found[name] = float(str(np.float32(value))) if type(value) is float else value
        return found


def _expansion(inner: float, hidden: float) -> float:
    """Return a factor whose product with the hidden size is the inner size, rounded down.

    It has half a column more, so that the product is never too small.
    """
    return (inner + 0.5) / hidden
