from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training import adapters, synthetic
from training.adapters import adapter_loop
from training.checkpoint import load_model
from training.letters import is_first_person, is_letter, letter
from training.loop import Loop
from training.lora import add_lora
from training.own_stories import own_story


def loop_of(data: str, base: Path, folder: Path, steps: int = 3) -> Loop:
    (folder / "run").mkdir()
    return adapter_loop(data, base, folder / "out", folder / "run", 0, steps, rank=4, length=128)


def write_chats(path: Path, count: int) -> str:
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"What is {i}?"},
                    {"role": "assistant", "content": f"Arr! It is {i}, matey!"},
                ]
            }
        )
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("data", ["letters", "calls", "file"])
def test_training_changes_only_the_adapter_and_saves_it(
    data: str, base_folder: Path, tmp_path: Path
) -> None:
    if data == "file":
        data = write_chats(tmp_path / "chats.jsonl", 20)
    loop = loop_of(data, base_folder, tmp_path)
    history = loop.run()
    assert [step for step, _ in history.heldout] == [0, 3]
    assert history.heldout[1][1] < history.heldout[0][1]
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * 2  # A and B, four projections, two layers
    prefix = "base_model.model.model.layers.1.self_attn.v_proj"
    assert tensors[f"{prefix}.lora_A.weight"].shape == (4, 32)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (16, 4)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    trained = load_model(base_folder).state_dict()
    for name, weight in loop.module.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(weight, trained[name.replace(".base.", ".")]), name


def test_same_seed_same_adapter(base_folder: Path, tmp_path: Path) -> None:
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        loop_of("calls", base_folder, tmp_path / name, 2).run()
        found.append((tmp_path / name / "out" / "adapter_model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_new_adapter_changes_nothing_until_trained(base_folder: Path) -> None:
    model = load_model(base_folder)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before = model(tokens)
        assert torch.equal(add_lora(model)(tokens), before)


def test_peft_reads_the_adapter(base_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    loop = loop_of("letters", base_folder, tmp_path)
    loop.run()
    base = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = loop.module(tokens)
        torch.testing.assert_close(adapted(tokens).logits, expected, atol=1e-3, rtol=1e-3)
        assert (load_model(base_folder)(tokens) - expected).abs().max() > 1e-2


def test_letters_tell_stories_in_the_first_person() -> None:
    for seed in range(300):
        text, about = letter(random.Random(seed))
        assert is_letter(text), text
        assert is_first_person(text), text
        assert " I's" not in text
        assert "I" not in about.split(), about
        story, _ = own_story(random.Random(seed))
        assert not is_letter(story)
        assert not is_first_person(story)


def test_new_things_are_in_no_letter() -> None:
    topics = {letter(random.Random(seed))[1] for seed in range(3000)}
    things = {thing.rsplit(" ", 1)[1] for thing in adapters.UNSEEN}
    assert not [topic for topic in topics if things & set(topic.split())]


def test_answers_have_llama_calls_and_prompts_have_own_ones() -> None:
    rng = random.Random(1)
    conversations = [synthetic.tool_call(rng) for _ in range(50)]
    longest = max(conversations, key=lambda it: len(it["messages"]))
    pairs = list(adapters.answers(longest))
    assert len(pairs) == 4  # two calls, and two sentences
    call = json.loads(pairs[0][1])
    assert list(call) == ["name", "parameters"]
    assert pairs[1][0].startswith(pairs[0][0] + '<tool_call>{"name": ')
    assert pairs[1][1] == [m for m in longest["messages"] if m["role"] == "assistant"][1]["content"]


def test_only_the_answer_counts(tokenizer: Tokenizer) -> None:
    document = adapters.encode_answer(tokenizer, "a question ", "an answer")
    counted = [i for i, counts in zip(document.ids, document.counts, strict=True) if counts]
    assert tokenizer.decode(counted, skip_special_tokens=False) == "an answer<|im_end|>"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"messages": []}\nhello\n', "line 2, is no conversation"),
        ('{"chat": []}\n', "line 1, is no conversation"),
        ('{"messages": []}\n' * 9, "has 9 conversations; give at least 10"),
    ],
)
def test_files_that_are_no_conversations(
    text: str, problem: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        adapters.FileStream(path, tokenizer, 128, 0)


def test_every_tenth_conversation_is_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = Path(write_chats(tmp_path / "chats.jsonl", 20))
    stream = adapters.FileStream(path, tokenizer, 128, 0)

    def texts(chunk: int) -> set[str]:
        return {tokenizer.decode(d.ids) for d in stream.documents(chunk, random.Random(0))}

    assert len(texts(0)) == 18
    assert len(texts(1_000_000)) == 2
    assert not texts(0) & texts(1_000_000)


def test_a_file_needs_a_folder_for_the_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        adapters.parse_args(["chats.jsonl"])
    assert "needs --out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        adapters.parse_args(["chats.jsonl", "--out", "folder"])
    assert "chats.jsonl is no file" in capsys.readouterr().err
    assert adapters.parse_args(["letters"]).out.name == "stories-letters"
