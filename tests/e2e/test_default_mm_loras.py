"""Adapters of prompts with media that name no adapter, against PEFT."""

import importlib.util
import json
import shutil

import pytest

from octavo import LoRARequest
from octavo.errors import AdapterError
from tests.e2e.harness import serve
from tests.e2e.test_chat_pictures import PARAMS, PLAIN, TEMPLATE, ask, part, text
from tests.e2e.test_peft import make_adapter
from tests.e2e.test_pictures import PICTURES, answers, prompt, prompts
from tests.pictures import assert_greedy, hf_logprobs, make_llm, save_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)
TEXT = r".*\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"
SETTINGS = {"enable_lora": True, "max_lora_rank": 4, "max_loras": 2}


@pytest.fixture(scope="module")
def phi4(tmp_path_factory):
    """Return Phi-4 multimodal with an adapter in its folder, and PEFT's model of both."""
    folder = tmp_path_factory.mktemp("phi4")
    save_model("phi4", folder)
    adapted = make_adapter(folder, folder / "vision-lora", target_modules=f"model{TEXT[2:]}")
    adapted.base_model.model.set_attn_implementation("eager")
    return folder, adapted


def is_picture(one):
    return "multi_modal_data" in one


def test_adapter_in_the_folder_of_the_model(phi4, tmp_path):
    folder, adapted = phi4
    given = prompts("phi4")
    shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("vision-lora"))
    with make_llm(tmp_path / "model", **SETTINGS) as llm:
        plain = answers(llm, given, 8)
        lora = LoRARequest("vision", 7, str(folder / "vision-lora"))
        named = answers(llm, given, 8, lora)
    with make_llm(folder, **SETTINGS) as llm:
        found = answers(llm, given, 8)
        for one, answer in zip(given, found, strict=True):
            if is_picture(one):
                ids, tokens, _ = answer
                images = one["multi_modal_data"]["image"]
                assert_greedy(answer, hf_logprobs(adapted, "phi4", llm, [*ids, *tokens], images))
        assert found == [
            name if is_picture(one) else alone
            for one, name, alone in zip(given, named, plain, strict=True)
        ]
        assert answers(llm, given, 8, lora) == named
    with pytest.raises(AdapterError, match="max_lora_rank"):
        make_llm(folder, enable_lora=True, max_lora_rank=2)


def test_adapters_of_settings(phi4, tmp_path):
    """The setting precedes; the adapter of a request precedes both."""
    folder, _ = phi4
    own, other = str(folder / "vision-lora"), tmp_path / "other"
    make_adapter(folder, other, seed=2, target_modules=f"model{TEXT[2:]}")
    one = prompt("phi4", *PICTURES[:2])
    first, second = LoRARequest("first", 7, own), LoRARequest("second", 8, str(other))
    with make_llm(folder, default_mm_loras={"image": str(other)}, **SETTINGS) as llm:
        (found,) = answers(llm, one, 8)
        assert [found] == answers(llm, one, 8, second)
        assert [found] != answers(llm, one, 8, first)
        engine = llm.llm_engine.adapters
        for none in ([], (), None):
            assert engine.of_media({"prompt": "a", "multi_modal_data": {"image": none}}) is None
        assert engine.of_media("a") is None
        output = llm.generate(one, use_tqdm=False)[0]
        assert (output.lora_request.lora_name, output.lora_request.lora_int_id) == ("image", 1)
    both = {"image": own, "audio": str(other)}
    media = {"prompt": "a", "multi_modal_data": {"image": [1], "audio": [2]}}
    with make_llm(folder, default_mm_loras=both, **SETTINGS) as llm:
        assert llm.llm_engine.adapters.of_media(media) is None
    with make_llm(folder, default_mm_loras={"image": own, "audio": own}, **SETTINGS) as llm:
        assert llm.llm_engine.adapters.of_media(media).lora_path == own
    with pytest.raises(AdapterError):
        make_llm(folder, default_mm_loras={"image": str(tmp_path / "none")}, **SETTINGS)


def test_server(phi4, tmp_path):
    """Chats with pictures have the adapter, those without have none."""
    folder, _ = phi4
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    chats = [[part(PICTURES[0]), text("and"), part(PICTURES[1])], [text("only a text")]]
    with make_llm(tmp_path, **SETTINGS) as llm:
        expected = [ask(llm, *content) for content in chats]
        lora = LoRARequest("a", 5, str(folder / "vision-lora"))
        (other,) = llm.chat(
            [{"role": "user", "content": chats[1]}], PARAMS, use_tqdm=False, lora_request=lora
        )
        assert other.outputs[0].text != expected[1][1]
    flags = ["--dtype=float32", "--max-model-len=400", "--enable-lora", "--max-lora-rank=4"]
    with serve(tmp_path, *flags, model=str(tmp_path)) as server:
        for content, (_, answer) in zip(chats, expected, strict=True):
            chat = {"model": str(tmp_path), "messages": [{"role": "user", "content": content}]}
            found = server.post("/v1/chat/completions", chat | PLAIN).json()
            assert found["choices"][0]["message"]["content"] == answer
