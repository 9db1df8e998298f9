"""gpt-oss with MXFP4 experts and harmony, with OpenAI's client.

The weights of the small model are computed, as in `octavo.conformance.parrot`: it repeats its
prompt. So a message decides what the model writes, markers of harmony included. The copy passes
through the attention and the experts of both layers: if these are misread, nothing is repeated.
"""

import json
import re

import jsonschema
import ml_dtypes
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from octavo.conformance import parrot
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from tests.e2e import harness

MODEL = "gpt-oss-small"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 300}
TEMPLATE = """\
{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n" }}
{{- "Knowledge cutoff: 2024-06\\nCurrent date: " + strftime_now("%Y-%m-%d") }}
{{- "\\n\\nReasoning: " + (reasoning_effort or "medium") + "\\n\\n" }}
{{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{%- if tools %}
    {{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}
{%- endif %}
{{- "<|end|>" }}
{%- if tools %}
    {{- "<|start|>developer<|message|># Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n" }}
    {%- for tool in tools %}
        {{- "// " + tool.function.description + "\\ntype " + tool.function.name + " = (_: {\\n" }}
        {%- for name, value in tool.function.parameters.properties.items() %}
            {{- name + ("" if name in tool.function.parameters.required else "?") + ": " }}
            {{- "number" if value.type == "integer" else '"' + value.enum | join('" | "') + '"' }}
            {{- ",\\n" }}
        {%- endfor %}
        {{- "}) => any;\\n\\n" }}
    {%- endfor %}
    {{- "} // namespace functions<|end|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" }}
        {{- "<|message|>" + call.arguments | tojson + "<|call|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start|>functions.get_weather to=assistant<|channel|>commentary" }}
        {{- "<|message|>" + message.content | tojson + "<|end|>" }}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}
"""
"""The published template, for conversations such as this file's."""

CODE = 64
HIDDEN = 5 * CODE
EXPERTS = 4
WINDOW = 32
REACHES = (20, 492)
"""Distances over which the two layers copy."""
DISTANCE = sum(REACHES) + 1
MARKERS = re.compile("|".join(map(re.escape, parrot.TOKENS)))
AFTER = "<|end|><|start|>assistant"
"""End of a prompt, after the last message."""
END_IDS = [256 + parrot._ALL.index(token) for token in ("<|return|>", "<|call|>")]
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 256 + len(parrot._ALL),
    "hidden_size": HIDDEN,
    "intermediate_size": CODE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": END_IDS[0],
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def attention(reach, place):
    """Return the tensors of an attention that copies the code at `place` over `reach` tokens.

    The biases make the query and the key, so the score depends on the distance only. It is a sum
    of cosines, which is largest at `reach`. YaRN leaves these 8 frequencies as they are.
    """
    waves = 150000.0 ** (-np.arange(8) / 32)
    query, key = np.zeros(64), np.zeros(64)
    query[:8], query[32:40] = np.cos(reach * waves), -np.sin(reach * waves)
    key[:8] = 1.0
    value, out = np.zeros((64, HIDDEN)), np.zeros((HIDDEN, 128))
    number = np.arange(CODE)
    value[number, place + number] = 0.5
    out[place + CODE + number, number] = out[place + CODE + number, CODE + number] = 0.5
    return {
        "q_proj.weight": np.zeros((128, HIDDEN)),
        "q_proj.bias": 12 * np.tile(query, 2),
        "k_proj.weight": np.zeros((64, HIDDEN)),
        "k_proj.bias": 12 * key,
        "v_proj.weight": value,
        "v_proj.bias": np.zeros(64),
        "o_proj.weight": out,
        "o_proj.bias": np.zeros(HIDDEN),
        "sinks": np.array([0.5, -0.5]),
    }


def experts(rng, place):
    """Return the tensors of experts that copy the code at `place` to the next place.

    Each one permutes the code, with signs of its own, and then permutes it back.
    """
    up = np.zeros((EXPERTS, 2 * CODE, HIDDEN), np.uint8)  # codes of e2m1: 2 is 1, and 10 is -1
    down = np.zeros((EXPERTS, HIDDEN, CODE), np.uint8)
    number = np.arange(CODE)
    for expert in range(EXPERTS):
        order, signs = rng.permutation(CODE), rng.choice([2, 10], CODE)
        up[expert, 2 * order + 1, place + number] = signs  # rows of gate and up in turn
        down[expert, place + CODE + number, order] = signs
    gate_and_up = np.tile([2.0, -1.0], (EXPERTS, CODE))  # the factor is up + 1

    def packed(codes, exponent):
        blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(*codes.shape[:2], -1, 16)
        return blocks, np.full(blocks.shape[:3], 127 + exponent, np.uint8)

    up_blocks, up_scales = packed(up, 0)
    down_blocks, down_scales = packed(down, -1)
    return {
        "router.weight": rng.normal(size=(EXPERTS, HIDDEN)),
        "router.bias": rng.normal(size=EXPERTS),
        "experts.gate_up_proj_blocks": up_blocks,
        "experts.gate_up_proj_scales": up_scales,
        "experts.gate_up_proj_bias": gate_and_up,
        "experts.down_proj_blocks": down_blocks,
        "experts.down_proj_scales": down_scales,
        "experts.down_proj_bias": np.zeros((EXPERTS, HIDDEN)),
    }


def tensors():
    """Return all tensors; a token's code moves through the five parts of the hidden state."""
    rng, stand_ins = np.random.default_rng(0), len(parrot.STAND_INS)
    code = rng.choice([-1.0, 1.0], (CONFIG["vocab_size"], CODE))
    code[-stand_ins:] = code[-2 * stand_ins : -stand_ins]  # a stand-in becomes its marker
    embed, head = np.zeros((2, len(code), HIDDEN))
    embed[:, :CODE] = head[:, -CODE:] = code
    head[-stand_ins:] = 0
    made = {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    made["model.norm.weight"] = np.ones(HIDDEN)
    for layer, reach in enumerate(REACHES):
        place, prefix = 2 * layer * CODE, f"model.layers.{layer}."
        parts = {"self_attn": attention(reach, place), "mlp": experts(rng, place + CODE)}
        for part, found in parts.items():
            made |= {f"{prefix}{part}.{name}": value for name, value in found.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}{norm}.weight"] = np.ones(HIDDEN)
    return {
        name: value if value.dtype == np.uint8 else value.astype(ml_dtypes.bfloat16)
        for name, value in made.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model") / MODEL
    parrot.write_parrot(made, TEMPLATE)
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": END_IDS}))
    save_file(tensors(), made / "model.safetensors", {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def lesson(folder):
    """Return a function that returns the message by which the model writes a text."""
    tokenizer = Tokenizer.from_folder(folder)
    after = len(tokenizer.encode(AFTER, add_special_tokens=False))

    def make(text):
        hidden = MARKERS.sub(lambda found: parrot.STAND_INS[found[0]], text)
        size = len(tokenizer.encode(hidden, add_special_tokens=False))
        return hidden + "." * (DISTANCE - after - size)

    return make


@pytest.fixture(scope="module")
def client(folder, tmp_path_factory):
    flags = ["--served-model-name", MODEL, "--max-model-len", "4096"]
    with (
        harness.serve(tmp_path_factory.mktemp("server"), *flags, model=str(folder)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def ask(client, messages, **fields):
    """Return (reasoning, content, calls, reason to finish); a stream adds up to the same."""
    fields |= GREEDY | {"messages": messages}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    found = []
    for answer in (whole, streamed):
        (choice,) = answer.choices
        message = choice.message
        reasoning = getattr(message, "reasoning", None)
        assert reasoning == getattr(message, "reasoning_content", None)
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
        found.append((reasoning, message.content or None, calls, choice.finish_reason))
    assert found[0] == found[1]
    return found[0]


def user(text):
    return {"role": "user", "content": text}


THOUGHT = "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Good morning, 世界!<|return|>"
CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": 3}<|call|>'
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Paris"]},
        "days": {"type": "integer"},
    },
    "required": ["city"],
}
WEATHER = {"name": "get_weather", "description": "Get the weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLED = ("get_weather", '{"city": "Paris", "days": 3}')


def test_the_template_is_the_published_one(shared_data):
    published = (shared_data / "chat_templates/models/openai-gpt-oss-120b.jinja").read_text()
    call = {"id": "1", "type": "function", "function": {"name": CALLED[0], "arguments": CALLED[1]}}
    turn = {"role": "assistant", "content": "", "reasoning": "So.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "Rain."}
    answer = {"role": "assistant", "content": "It rains."}
    own, other = (ChatTemplate({"default": text}, {}) for text in (TEMPLATE, published))
    for messages, tools in (
        ([user("Hi.")], None),
        ([user("Hi."), answer, user("And?")], None),
        ([user("Hi."), turn, result], TOOLS),
        ([user("Hi."), turn, result, user("And?")], TOOLS),
    ):
        assert own.render(messages, tools=tools) == other.render(messages, tools=tools)


def test_a_thought_and_an_answer(client, lesson):
    found = ask(client, [user(lesson(THOUGHT + FINAL))])
    assert found == ("I should look.", "Good morning, 世界!", [], "stop")


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_thought_and_a_call(client, lesson, choice):
    found = ask(client, [user(lesson(THOUGHT + CALL))], tools=TOOLS, tool_choice=choice)
    assert found == ("I should look.", None, [CALLED], "tool_calls")


def test_a_call_that_the_model_would_not_write(client, lesson):
    found = ask(client, [user(lesson(FINAL))], tools=TOOLS, tool_choice=NAMED)
    *nothing, ((name, arguments),), reason = found
    assert (nothing, name, reason) == ([None, None], "get_weather", "tool_calls")
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_the_answer_after_a_call(client, lesson):
    first = client.chat.completions.create(
        messages=[user(lesson(THOUGHT + CALL))], tools=TOOLS, **GREEDY
    )
    turn = first.choices[0].message.model_dump(exclude_none=True)
    (call,) = turn["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"weather": "sunny"}'}
    found = ask(client, [user("Paris?"), turn, result, user(lesson(FINAL))], tools=TOOLS)
    assert found == (None, "Good morning, 世界!", [], "stop")


def test_responses(client, lesson):
    fields = {"model": MODEL, "tools": [{"type": "function", **WEATHER}], "temperature": 0}
    first = client.responses.create(input=lesson(THOUGHT + CALL), **fields)
    thought, call = first.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "I should look.")
    assert (call.type, call.name, call.arguments) == ("function_call", *CALLED)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    fields |= {"input": [result, user(lesson(FINAL))], "previous_response_id": first.id}
    second = client.responses.create(**fields)
    assert (second.status, second.output_text) == ("completed", "Good morning, 世界!")
    with client.responses.stream(**fields) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(deltas) == second.output_text
