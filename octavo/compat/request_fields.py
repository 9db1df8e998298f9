"""Request fields of OpenAI, vLLM, SGLang, llama.cpp and others that Octavo does not support.

Each field is listed with the values that have no effect. The server rejects other values, because
an answer that ignores a field is worse than an error. `octavo.server.body` reports unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Unsupported: TypeAlias = Mapping[str, tuple[object, ...]]
"""Accepted values by the name of the field."""

_NOTHING = (None,)
_OFF = (None, False)
_ZERO = (None, 0)
_ONE = (None, 1)


def _all(values: tuple[object, ...], names: str) -> dict[str, tuple[object, ...]]:
    return dict.fromkeys(names.split(), values)


# Fields that never change the text: notes for a store of answers, hints for routing, caching,
# drafting and style, and settings of features that the server rejects.
NO_EFFECT = frozenset(
    _all(
        (),
        "metadata store prediction safety_identifier prompt_cache_key prompt_cache_retention "
        "prompt_cache_options verbosity "
        "prompt_text session_id return_mm_kwargs cache_control "
        "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold id_slot n_cache_reuse "
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
    )
)

GENERATION: Unsupported = {
    # OpenAI
    "service_tier": (None, "auto", "default"),
    # vLLM, newer and older
    **_all(
        _NOTHING,
        "guided_whitespace_pattern logits_processors "
        "ec_transfer_params mm_payload extra_args repetition_detection "
        "prompt_logprob_token_ids prompt_logprob_start trace_decode_token_ids "
        "output_kind",
    ),
    **_all(
        _OFF,
        "return_token_offsets return_prompt_text "
        "return_weight_versions skip_reading_prefix_cache flat_logprobs watermarking",
    ),
    "stream_interval": _ONE,
    "routed_experts_prompt_start": _ZERO,
    "detokenize": (None, True),
    # SGLang
    **_all(
        _NOTHING,
        "stop_regex custom_params custom_logit_processor lora_path session_params "
        "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank logprob_start_len "
        "token_ids_logprob max_new_tokens sampling_seed input_ids input_embeds rid extra_key",
    ),
    **_all(
        _OFF,
        "no_stop_trim return_hidden_states return_routed_experts return_logprob "
        "return_text_in_logprobs return_cached_tokens_details",
    ),
    "min_new_tokens": _ZERO,
    "top_logprobs_num": _ZERO,
    "beam_width": _ONE,
    # llama.cpp
    **_all(
        _NOTHING,
        "grammar_triggers preserved_tokens samplers lora image_data "
        "response_fields t_max_predict_ms t_max_prompt_ms n_indent adaptive_target "
        "adaptive_decay reasoning_format reasoning_budget reasoning_budget_tokens input_prefix "
        "input_suffix input_extra n_predict",
    ),
    **_all(
        _OFF,
        "grammar_lazy return_tokens timings_per_token post_sampling_probs "
        "backend_sampling thinking_forced_open parse_tool_calls",
    ),
    **_all(
        _ZERO, "mirostat dynatemp_range dry_multiplier xtc_probability n_probs n_keep n_discard"
    ),
    **_all((None, 1), "repeat_penalty typical_p tfs_z n_cmpl"),
    "repeat_last_n": (None, -1, 64),
    "top_n_sigma": (None, -1, 0),
    "min_keep": (None, 0, 1),
    "cache_prompt": (None, True),
    # TGI, Ollama, TensorRT-LLM, LMDeploy, transformers
    **_all(
        _NOTHING,
        "adapter_id guideline do_sample inputs parameters options keep_alive format think images "
        "context num_predict num_ctx max_length stop_sequences lora_request disaggregated_params "
        "lookahead_config top_p_min top_p_decay",
    ),
    **_all(
        _OFF,
        "watermark decoder_input_details details raw return_context_logits "
        "return_generation_logits return_perf_metrics",
    ),
    **_all(_ZERO, "top_a top_n_tokens no_repeat_ngram_size"),
    **_all(_ONE, "num_beams num_return_sequences"),
}

_FUNCTIONS: Unsupported = {"functions": (None, []), "function_call": (None, "none")}
_TOOLS: Unsupported = {
    "tools": (None, []),
    "tool_choice": (None, "none"),
    **_FUNCTIONS,
}
_TEMPLATE = _all(_NOTHING, "chat_template")

COMPLETION: Unsupported = {
    **GENERATION,
    **_all(
        _NOTHING,
        "messages top_logprobs max_completion_tokens chat_template_kwargs add_generation_prompt "
        "continue_final_message system template",
    ),
    **_TOOLS,
    "suffix": (None, ""),
}

CHAT: Unsupported = {
    **GENERATION,
    "prompt_embeds": (None, []),
    **_TEMPLATE,
    **_all(_NOTHING, "audio web_search_options moderation reasoning prompt suffix"),
    "modalities": (None, ["text"]),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "best_of": _ONE,
}

MESSAGE: Unsupported = {
    **_all(_NOTHING, "audio thinking"),
    **_all(_OFF, "prefix partial"),
    "refusal": _NOTHING,
    "annotations": (None, []),
}

STRUCTURED_OUTPUTS: Unsupported = {
    "whitespace_pattern": _NOTHING,
    **_all(_OFF, "disable_additional_properties disable_fallback"),
}

STREAM_OPTIONS: Unsupported = {"include_obfuscation": _OFF}

TOKENIZE: Unsupported = {
    "tool_choice": (None, "none"),
    **_FUNCTIONS,
    **_TEMPLATE,
    **_all(_NOTHING, "content add_special"),
    "with_pieces": _OFF,
    "parse_special": (None, True),
    "return_token_offsets": _OFF,
}

GENERATE: Unsupported = {
    **_all(
        _NOTHING,
        "features ec_transfer_params parse_context reasoning_parser_kwargs reasoning_ended "
        "token_offsets",
    ),
    "content_parts": (None, []),
}

ANTHROPIC: Unsupported = {
    **_all(_NOTHING, "container output_format speed inference_geo"),
    # The thoughts of earlier answers stay in the prompt in any case.
    "context_management": (
        None,
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),
}
RESPONSES: Unsupported = {
    **_all(_NOTHING, "prompt context_management moderation image access_programs personality"),
    **_all(_NOTHING, "n seed stop logprobs response_format messages"),
    "truncation": (None, "disabled"),
    "background_options": _NOTHING,
}
RESPONSES_REASONING: Unsupported = {
    "context": (None, "auto"),
    "mode": (None, "standard"),
}
RESPONSES_STREAM_OPTIONS: Unsupported = {"include_obfuscation": _OFF}
ANTHROPIC_TOOL: Unsupported = {"type": (None, "custom")}

OLLAMA_GENERATE: Unsupported = {
    **_all((None, ""), "suffix template"),
    **_all((None, []), "context"),
    **_all(_NOTHING, "width height steps"),
}

POOLING: Unsupported = {
    **_all(_NOTHING, "mm_processor_kwargs media_io_kwargs chat_template additional_data"),
    "padding": (None, "do_not_pad"),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
}
CLASSIFY: Unsupported = {
    **POOLING,
    "encoding_format": (None, "float"),
    "dimensions": _NOTHING,
}
RERANK: Unsupported = {
    **CLASSIFY,
    # Cohere
    "max_chunks_per_doc": _NOTHING,
    "rank_fields": (None, ["text"]),
}
POOLING_INSTEAD: Mapping[str, str] = {
    "chat_template": "--chat-template when the server starts",
}

DETOKENIZE: Unsupported = {"skip_special_tokens": _OFF}
SCALE: Unsupported = {}
ADAPTER: Unsupported = {}

# Alternatives to the fields.
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length"), "max_tokens"),
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
    "input_ids": "prompt",
    "inputs": "prompt",
    "rid": "request_id",
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "n_cmpl": "n",
    **dict.fromkeys(("num_beams", "beam_width"), "use_beam_search and n"),
    "n_probs": "logprobs",
    "top_logprobs_num": "logprobs",
    "content": "prompt",
    "add_special": "add_special_tokens",
    "extra_args": "vllm_xargs",
    **dict.fromkeys(
        ("whitespace_pattern", "guided_whitespace_pattern"),
        "structured_outputs.disable_any_whitespace",
    ),
    "repetition_detection": "repetition_guard",
    **dict.fromkeys(("reasoning_budget", "reasoning_budget_tokens"), "thinking_token_budget"),
    "skip_reading_prefix_cache": "a unique cache_salt",
    "logprob_token_ids": "logprobs",
    **dict.fromkeys(("prompt_logprob_token_ids", "prompt_logprob_start"), "prompt_logprobs"),
    "chat_template": "--chat-template when the server starts",
    **dict.fromkeys(("tools", "tool_choice", "functions"), "response_format to request JSON"),
    "max_completion_tokens": "max_tokens",
    "messages": "prompt, or POST /v1/chat/completions",
    "prompt": "messages, or POST /v1/completions",
    "prompt_embeds": "POST /v1/completions",
    "top_logprobs": "logprobs",
    "disable_additional_properties": "additionalProperties: false in the schema",
    "disable_fallback": "backend",
}
RESPONSES_INSTEAD: Mapping[str, str] = {
    "prompt": "instructions and input",
    "messages": "input",
    "response_format": "text.format",
    "logprobs": "include and top_logprobs",
}
