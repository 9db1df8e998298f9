"""Formats of families of models."""

from __future__ import annotations

from octavo.parsers.answer import Format
from octavo.parsers.calls import JsonCalls, OwnCalls, PatternCalls, PythonCalls
from octavo.parsers.own_calls import gemma_arguments, read_gemma, read_harmony

THINK = ("<think>", "</think>")
_MISTRAL_THINK = ("[THINK]", "[/THINK]")
_HERMES = JsonCalls(("<tool_call>", "{"), "</tool_call>", as_list=False, space="\n")
_QWEN_XML = PatternCalls(
    ("<function={name}>", "</function>"),
    ("<parameter={key}>", "\n</parameter>"),
    ("<tool_call>", "</tool_call>"),
)
_GLM = PatternCalls(
    ("<tool_call>{name}", "</tool_call>"),
    ("<arg_key>{key}</arg_key> <arg_value>", "</arg_value>"),
)
_DSML = ('<｜DSML｜invoke name="{name}">', "</｜DSML｜invoke>")
_DSML_ARGUMENT = (
    '<｜DSML｜parameter name="{key}" string="{text}">',
    "</｜DSML｜parameter>",
)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_COHERE = JsonCalls(("<|START_ACTION|>",), "<|END_ACTION|>", keys=("tool_name", "parameters"))

_ALL = [
    Format("hermes", THINK, _HERMES),
    Format("qwen3_coder", THINK, _QWEN_XML),
    Format(
        "llama3_json",
        None,
        JsonCalls(("{", "<|python_tag|>"), as_list=False, keys=("name", "parameters")),
    ),
    Format("pythonic", None, PythonCalls(("[", "<|python_start|>"))),
    Format("mistral", _MISTRAL_THINK, JsonCalls(("[TOOL_CALLS]",))),
    Format(
        "mistral_v11", _MISTRAL_THINK, PatternCalls(("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]", ""))
    ),
    Format("mistral_v13", _MISTRAL_THINK, PatternCalls(("[TOOL_CALLS]{name}[ARGS]", ""))),
    Format(
        "deepseek_v3",
        THINK,
        PatternCalls(
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name} ```json",
                "``` <｜tool▁call▁end｜>",
            ),
            section=_DEEPSEEK_SECTION,
        ),
    ),
    Format(
        "deepseek_v31",
        THINK,
        PatternCalls(
            ("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            section=_DEEPSEEK_SECTION,
        ),
    ),
    Format(
        "deepseek_v32",
        THINK,
        PatternCalls(
            _DSML,
            _DSML_ARGUMENT,
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ),
    ),
    Format(
        "deepseek_v4",
        THINK,
        PatternCalls(_DSML, _DSML_ARGUMENT, ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),
    ),
    Format(
        "kimi_k2",
        THINK,
        PatternCalls(
            ("<|tool_call_begin|>{id}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
    ),
    Format("glm45", THINK, _GLM),
    Format(
        "minimax_m2",
        THINK,
        PatternCalls(
            ('<invoke name="{name}">', "</invoke>"),
            ('<parameter name="{key}">', "</parameter>"),
            ("<minimax:tool_call>", "</minimax:tool_call>"),
        ),
    ),
    Format("granite", THINK, JsonCalls(("<|tool_call|>",))),
    Format("phi4_mini_json", THINK, JsonCalls(("functools", "<|tool_call|>"), "<|/tool_call|>")),
    Format(
        "internlm",
        None,
        JsonCalls(
            ("<|action_start|><|plugin|>",),
            "<|action_end|>",
            as_list=False,
            keys=("name", "parameters"),
        ),
    ),
    Format("jamba", None, JsonCalls(("<tool_calls>",), "</tool_calls>")),
    Format("xlam", THINK, JsonCalls(("[",))),
    Format(
        "gemma4",
        ("<|channel>thought", "<channel|>"),
        OwnCalls(
            ("<|tool_call>",),
            ("<tool_call|>", '<|"|>'),
            read_gemma,
            ("<|tool_call>call:{name}", "<tool_call|>"),
            gemma_arguments,
        ),
    ),
    Format("olmo3", THINK, PythonCalls(("<function_calls>",), "</function_calls>")),
    Format(
        "cohere",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        _COHERE,
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Format("hunyuan_a13b", THINK, JsonCalls(("<tool_calls>",), "</tool_calls>")),
    Format(
        "hunyuan_3",
        ("<think:opensource>", "</think:opensource>"),
        PatternCalls(
            (
                "<tool_call:opensource>{name}<tool_sep:opensource>",
                "</tool_call:opensource>",
            ),
            (
                "<arg_key:opensource>{key}</arg_key:opensource> <arg_value:opensource>",
                "</arg_value:opensource>",
            ),
            ("<tool_calls:opensource>", "</tool_calls:opensource>"),
        ),
    ),
    Format("ernie45", THINK, _HERMES, silent=("<response>", "</response>")),
    Format(
        "seed_oss",
        ("<seed:think>", "</seed:think>"),
        PatternCalls(
            ("<function={name}>", "</function>"),
            ("<parameter={key}>", "</parameter>"),
            ("<seed:tool_call>", "</seed:tool_call>"),
        ),
    ),
    Format("nemotron", THINK, JsonCalls(("<TOOLCALL>",), "</TOOLCALL>")),
    Format("lfm2", THINK, PythonCalls(("<|tool_call_start|>",), "<|tool_call_end|>")),
    Format(
        "openai",
        ("<|channel|>analysis<|message|>", "<|end|>"),
        OwnCalls(
            (" to=functions.", "<|channel|>commentary to=functions."),
            ("<|constrain|>", "<|message|>", "<|call|>"),
            read_harmony,
            (
                "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                "<|call|>",
            ),
        ),
        silent=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
        ),
        after_thoughts="<|start|>assistant",
    ),
    Format("exaone4", THINK, _HERMES),
    Format(
        "apertus",
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        JsonCalls(("<|tools_prefix|>",), "<|tools_suffix|>", named_by_key=True),
    ),
    Format(
        "apriel",
        ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
        JsonCalls(("<tool_calls>",), "</tool_calls>"),
        silent=("[END FINAL RESPONSE]",),
    ),
    Format(
        "gigachat3",
        None,
        JsonCalls(
            ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>"), as_list=False
        ),
    ),
    Format(
        "minicpm5",
        THINK,
        PatternCalls(
            ('<function name="{name}">', "</function>"), ('<param name="{key}">', "</param>")
        ),
    ),
    Format("functionary_v3_1", None, PatternCalls(("<function={name}>", "</function>"))),
    Format(
        "solar",
        ("<|think|>", "<|end|><|begin|>assistant"),
        PatternCalls(
            (
                "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",
                "<|tool_call:end|>",
            ),
            section=("<|tool_calls|>", "<|calls|>"),
        ),
        silent=("<|content|>",),
    ),
]

FORMATS = {entry.name: entry for entry in _ALL}
"""Formats by name; the names are those of vLLM's parsers where it has one."""

_OTHER_NAMES = {
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "glm47": "glm45",
    "step3p5": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "gpt_oss": "openai",
}
TOOL_CALL_PARSERS = {**FORMATS, **{name: FORMATS[own] for name, own in _OTHER_NAMES.items()}}
"""Formats by the names of --tool-call-parser."""

REASONING_PARSERS: dict[str, tuple[str, str] | None] = {
    "none": None,
    **dict.fromkeys(
        (
            "deepseek_r1",
            "deepseek_v3",
            "qwen3",
            "glm45",
            "granite",
            "hunyuan_a13b",
            "ernie45",
            "kimi_k2",
            "minimax_m2",
            "nemotron_v3",
            "olmo3",
            "step3",
        ),
        THINK,
    ),
    "mistral": _MISTRAL_THINK,
    **{
        name: FORMATS[name].thoughts
        for name in ("seed_oss", "cohere", "gemma4", "apertus", "apriel", "hunyuan_3", "solar")
    },
}
"""Texts before and after reasoning by the names of --reasoning-parser."""
