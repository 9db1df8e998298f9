"""Messages of answers of `LLM.chat`."""

import json

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.parsers.formats import FORMATS
from octavo.parsers.message import MessageReader
from octavo.sampling_params import StructuredOutputsParams
from tests.parsers.writers import write
from tests.server.fake_engine import EOS, make_tokenizer
from tests.server.test_tools import TEMPLATE

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def read(fmt, tokens, tools=(TOOL,), prompt="", params=None, **fields):
    tokenizer = make_tokenizer()
    tokenizer._backend.add_special_tokens(["[THINK]", "[/THINK]", "[TOOL_CALLS]"])
    tokenizer.all_special_ids = frozenset(range(256, 261))
    params = params or SamplingParams()
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    completion = CompletionOutput(0, text, tokens, **fields)
    output = RequestOutput("r", None, [5], None, [completion], True)
    MessageReader(fmt, tokenizer, tools).read(prompt, params, output)
    assert completion.text == text
    return completion.message


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_of_all_formats(name):
    fmt = FORMATS[name]
    tokens = [*write(fmt, None, "", [("f", {"a": 1})]).encode()]
    message = read(fmt, tokens)
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "f")
    assert json.loads(call.function.arguments) == {"a": 1}
    assert (message.role, message.content, message.reasoning) == ("assistant", None, None)
    assert read(fmt, tokens).tool_calls[0].id == call.id
    assert not read(fmt, tokens, tools=None).tool_calls


def test_special_tokens_stay_out_of_the_text():
    """The parser sees them; the text of the answer does not change."""
    begin, end, calls = 258, 259, 260
    tokens = [begin, *b"Hm", end, *b"Yes", calls, *b'[{"name": "f", "arguments": {}}]', EOS]
    message = read(FORMATS["mistral"], tokens, finish_reason="stop")
    assert (message.reasoning, message.content) == ("Hm", "Yes")
    assert [call.function.name for call in message.tool_calls] == ["f"]


def test_the_prompt_begins_the_thought():
    message = read(FORMATS["hermes"], [*b"Hm</think>Yes"], prompt="<think>\n")
    assert (message.reasoning, message.content) == ("Hm", "Yes")


def test_a_stop_text():
    params = SamplingParams(stop=["END"])
    fields = {"params": params, "finish_reason": "stop", "stop_reason": "END"}
    assert read(FORMATS["hermes"], [*b"Yes END"], **fields).content == "Yes "


def test_no_format_and_no_text():
    assert read(None, [*b"<think>Hm"]).content == "<think>Hm"
    assert read(None, [*b"x"], params=SamplingParams(detokenize=False)) is None
    assert read(FORMATS["hermes"], []).content == ""


@pytest.mark.parametrize("tool", [{}, "f", {"type": "function", "function": {"name": 3}}])
def test_wrong_tools(tool):
    with pytest.raises(RequestError, match=r"tools\[0\] is no function"):
        read(FORMATS["hermes"], [], tools=[tool])


def test_the_built_in_model():
    """Its calls come from a grammar; chats may be queued, too."""
    pattern = r'<tool_call>\{"name": "f", "arguments": \{"a": [0-9]\}\}</tool_call>'
    form = StructuredOutputsParams(regex=pattern)
    calling = SamplingParams(max_tokens=60, temperature=0, structured_outputs=form)
    plain = SamplingParams(max_tokens=8, temperature=0)
    chats = [[{"role": "user", "content": text}] for text in ("Tell me.", "A cat?")]
    with LLM(max_model_len=512) as llm:
        first, second = llm.chat(chats, [calling, plain], tools=[TOOL], use_tqdm=False)
        (call,) = first.outputs[0].message.tool_calls
        assert call.function.name == "f"
        assert 0 <= json.loads(call.function.arguments)["a"] <= 9
        assert second.outputs[0].message.content == second.outputs[0].text
        assert not second.outputs[0].message.tool_calls
        llm.enqueue_chat(chats[0], calling, tools=[TOOL])
        llm.enqueue("Once", plain)
        queued, prompt = llm.wait_for_completion(use_tqdm=False)
        assert queued.outputs[0].message.tool_calls[0].function == call.function
        assert prompt.outputs[0].message is None
        limited = SamplingParams(thinking_token_budget=3)
        with pytest.raises(RequestError, match="shows no reasoning"):
            llm.chat(chats, limited, use_tqdm=False)
        for ask in (llm.chat, llm.enqueue_chat):
            with pytest.raises(RequestError, match="no token of its own"):
                ask(chats, limited, use_tqdm=False, chat_template=TEMPLATE)
