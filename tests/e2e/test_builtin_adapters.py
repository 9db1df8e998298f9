"""The shipped adapters of the built-in model: they change answers as their cards say."""

import json

import pytest

from octavo import LLM, LoRARequest, SamplingParams
from octavo.config import BUILTIN_ADAPTERS, BUILTIN_MODEL
from octavo.errors import AdapterError
from octavo.models.hub import resolve_adapter

GREEDY = SamplingParams(temperature=0.0, max_tokens=300, logprobs=1)
STORY = [{"role": "user", "content": "Tell me a story about a dog."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
LETTERS, CALLS = (LoRARequest(name, i, name) for i, name in enumerate(BUILTIN_ADAPTERS, 1))


@pytest.fixture(scope="module")
def answers():
    """Answers of the model alone, then of the model, letters and calls all at once."""
    with LLM(BUILTIN_MODEL, max_model_len=512, enable_lora=True, max_loras=2) as llm:
        prompts = [
            llm.get_tokenizer().apply_chat_template(
                chat, tools=tools, tokenize=False, add_generation_prompt=True
            )
            for chat, tools in ((STORY, None), (WEATHER, [TOOL]))
        ]
        alone = llm.generate(prompts, GREEDY, use_tqdm=False)
        adapters = [adapter for adapter in (None, LETTERS, CALLS) for _ in prompts]
        together = llm.generate(prompts * 3, GREEDY, lora_request=adapters, use_tqdm=False)
        chat = llm.chat(WEATHER, GREEDY, tools=[TOOL], lora_request=CALLS, use_tqdm=False)
    return alone, [together[i : i + 2] for i in (0, 2, 4)], chat


def bits(output):
    return [
        (token, sorted((key, value.logprob) for key, value in row.items()))
        for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_outputs_have_the_adapters_of_their_callers(answers):
    found = [output.lora_request for pair in answers[1] for output in pair]
    wanted = [None, None, LETTERS, LETTERS, CALLS, CALLS]
    assert all(it is own for it, own in zip(found, wanted, strict=True))


def test_letters_are_told_by_their_writer(answers):
    letter = texts(answers[1][1])[0].split("\n")
    assert letter[0].startswith("Dear ")
    assert letter[-2] in ("Love,", "With love,", "Your friend,")
    assert "dog" in letter[-1]
    assert texts(answers[0])[0].startswith("Once upon a time")


def test_calls_have_the_form_of_llama(answers):
    call = {"name": "get_weather", "parameters": {"city": "Paris"}}
    assert json.loads(texts(answers[1][2])[1]) == call
    own = json.dumps({"name": "get_weather", "arguments": {"city": "Paris"}})
    assert texts(answers[0])[1] == f"<tool_call>{own}</tool_call>"


def test_chat_reads_the_calls_of_the_adapter(answers):
    [call] = answers[2][0].outputs[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_the_model_beside_adapters_has_the_same_bits(answers):
    alone, (beside, *_), _ = answers
    assert [bits(output) for output in beside] == [bits(output) for output in alone]


@pytest.mark.parametrize("name", BUILTIN_ADAPTERS)
def test_files_are_small(name):
    folder = resolve_adapter(name)
    assert (folder / "README.md").exists()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 200_000


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"tensor_parallel_size": 2}])
def test_a_merged_adapter_changes_all_answers(options, tmp_path):
    """Packed weights of the model alone and of the merged one do not get mixed up."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    cache = str(tmp_path / "weights")

    def ask(adapter):
        with LLM(
            BUILTIN_MODEL, dtype="float32", lora_merge=adapter, weight_cache=cache, **options
        ) as llm:
            return texts(llm.chat(STORY, params, use_tqdm=False))[0]

    letter = ask(BUILTIN_ADAPTERS[0])
    assert letter.startswith("Dear ")
    assert not ask(None).startswith("Dear ")
    assert ask(BUILTIN_ADAPTERS[0]) == letter  # from the cache


def test_a_merged_adapter_that_does_not_exist():
    with pytest.raises(AdapterError, match=r"There is no adapter ./none"):
        LLM(BUILTIN_MODEL, lora_merge="./none")
