"""Transcripts of Moonshine, Voxtral and Qwen3-ASR, and sounds in chats of a server."""

import argparse
import base64
import json

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from octavo import LLM, SamplingParams
from octavo.errors import RequestError, UnsupportedError
from octavo.model_tools import transcribe
from tests.e2e.harness import serve
from tests.media.sounds import wav
from tests.models.harness import make_hf
from tests.models.test_speech_models import MOONSHINE
from tests.pictures import make_llm
from tests.sounds import ID, SPECIAL, VOCAB, save_model, sound

SOUND = np.round(sound(1.2) * 2**15) / np.float32(2**15)
LONG = np.concatenate([sound(25.0, 1), np.zeros(16_000, np.float32), SOUND])
FILE = wav((SOUND * 2**15).astype("<i2"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of both models, by name."""
    folder = tmp_path_factory.mktemp("models")
    save_model("voxtral", folder / "voxtral")
    config = {"vocab_size": VOCAB, "bos_token_id": ID["<s>"], "eos_token_id": ID["</s>"]}
    config |= {"decoder_start_token_id": ID["<s>"]}
    make_hf("MoonshineForConditionalGeneration", **MOONSHINE | config).save_pretrained(
        folder / "moonshine"
    )
    backend = Backend.from_file(str(folder / "voxtral" / "tokenizer.json"))
    assert backend.token_to_id(SPECIAL[-1]) == VOCAB - 1
    backend.save(str(folder / "moonshine" / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'audio' %}[BEGIN_AUDIO]"
        "[AUDIO]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    settings = {"bos_token": "<s>", "chat_template": template}
    (folder / "voxtral" / "tokenizer_config.json").write_text(json.dumps(settings))
    return {name: str(folder / name) for name in ("moonshine", "voxtral")}


@pytest.fixture(params=["moonshine", "voxtral"])
def llm(request, folders):
    settings = {"dtype": "float32", "max_model_len": 64 if request.param == "moonshine" else 400}
    settings |= {"num_gpu_blocks_override": 400, "block_size": 16}
    with LLM(folders[request.param], **settings) as llm:
        yield llm


def asked(llm, samples, language=None):
    """Return the text of a window, as the engine answers to its prompt."""
    params = SamplingParams(temperature=0.3, seed=0, max_tokens=17)
    prompt = {"encoder_prompt": {"input_features": samples[:, None]}}
    if not llm.llm_engine.spec.is_encoder_decoder:
        named = f"lang:{language}" if language else ""
        text = f"<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{named}[TRANSCRIBE]"
        prompt = {"prompt": text, "multi_modal_data": {"audio": samples}}
        params.max_tokens = None
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].text.strip()


def test_transcripts(llm):
    (found,) = llm.transcribe(SOUND, temperature=0.3)
    assert found.text == asked(llm, SOUND)
    (segment,) = found.segments
    assert (segment.start, segment.end, segment.text) == (0.0, 1.2, found.text)
    assert (found.language, found.duration) == ("", pytest.approx(1.2))
    (named,) = llm.transcribe([FILE], language="German", temperature=0.3)
    assert (named.language, named.text) == ("de", asked(llm, SOUND, "de"))


def test_transcripts_of_qwen3_asr(tmp_path):
    """As the engine answers to vLLM's prompt; the language and the text have a tag between them."""
    save_model("qwen3_asr", tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("[TRANSCRIBE]", "<asr_text>"))
    user = "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
    user += "<|im_start|>assistant\n"
    settings = {"num_gpu_blocks_override": 400, "block_size": 16, "max_model_len": 400}
    with LLM(str(tmp_path), dtype="float32", **settings) as llm:
        (plain,) = llm.transcribe(SOUND, temperature=0.3)
        (named,) = llm.transcribe([FILE], language="German", prompt="Names", temperature=0.3)
        texts = [
            user,
            f"<|im_start|>system\nNames<|im_end|>\n{user}language German<asr_text>",
        ]
        params = SamplingParams(temperature=0.3, seed=0, max_tokens=200)
        given = [{"prompt": text, "multi_modal_data": {"audio": SOUND}} for text in texts]
        params = [
            SamplingParams(temperature=0.3, seed=0, max_tokens=400 - len(output.prompt_token_ids))
            for output in llm.generate(given, params, use_tqdm=False)
        ]
        outputs = llm.generate(given, params, use_tqdm=False)
        for output, found in zip(outputs, (plain, named), strict=True):
            ids = list(output.outputs[0].token_ids)
            assert found.segments[0].tokens == ids
            tag = ID["[TRANSCRIBE]"]
            rest = ids[len(ids) - ids[::-1].index(tag) :] if tag in ids else ids
            assert found.text == llm.get_tokenizer().decode(rest, skip_special_tokens=True).strip()
        assert named.language == "de"
        assert llm.transcribe([LONG, SOUND], temperature=0.3)[1] == plain
        with pytest.raises(RequestError, match=r"contains <\|im_end\|>, a special token"):
            llm.transcribe(SOUND, prompt="a<|im_end|>")


def test_a_sound_has_the_same_transcript_among_others(llm):
    sounds = [LONG, SOUND, np.zeros(9000, np.float32)]
    together = llm.transcribe(sounds)
    assert together == [llm.transcribe(one)[0] for one in sounds]
    assert len(together[0].segments) >= 2
    assert together[0].text == "".join(segment.text for segment in together[0].segments)
    assert [one.start for one in together[0].segments] == sorted(
        one.start for one in together[0].segments
    )
    assert (together[2].text, together[2].segments) == ("", [])


def test_options_that_are_not_supported(llm):
    for options, error, message in (
        ({"task": "translate"}, RequestError, "cannot translate"),
        ({"prompt": "Names"}, UnsupportedError, "prompt='Names' is not supported"),
        ({"word_timestamps": True}, UnsupportedError, "timestamp_granularities=word"),
        ({"condition_on_previous_text": True}, UnsupportedError, "condition_on_previous_text"),
        ({"language": "Klingon"}, RequestError, "language='Klingon'"),
    ):
        with pytest.raises(error, match=message):
            llm.transcribe(SOUND, **options)


def test_other_models_do_not_hear(tmp_path):
    save_model("qwen2_audio", tmp_path)
    with (
        make_llm(tmp_path) as llm,
        pytest.raises(RequestError, match=r"Qwen2AudioForConditionalGeneration.*not transcribe"),
    ):
        llm.transcribe(SOUND)


@pytest.mark.parametrize("name", ["moonshine", "voxtral"])
def test_server_and_command(name, folders, tmp_path, capsys):
    length = "64" if name == "moonshine" else "300"
    flags = ["--dtype", "float32", "--max-model-len", length]
    (tmp_path / "a.wav").write_bytes(FILE)
    parser = argparse.ArgumentParser()
    transcribe.add_arguments(parser)
    given = [str(tmp_path / "a.wav"), "--model", folders[name], *flags]
    transcribe.run(parser.parse_args(given))
    expected = capsys.readouterr().out.strip()
    with serve(tmp_path, *flags, model=folders[name]) as server:

        def post(path, **form):
            return httpx.post(f"{server.url}{path}", files={"file": FILE}, data=form, timeout=240)

        response = post("/v1/audio/transcriptions", model=folders[name])
        assert response.status_code == 200, response.text
        assert response.json()["text"] == expected
        wrong = post("/v1/audio/translations", model=folders[name])
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unsupported_task")
        if name == "voxtral":
            check_chats(server)


def check_chats(server):
    """Check sounds in chats of a server."""
    data = base64.b64encode(FILE).decode()

    def answer(part, status=200):
        content = [part, {"type": "text", "text": "what?"}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        response = server.post("/v1/chat/completions", body | {"max_tokens": 8})
        assert response.status_code == status, response.text
        return response.json()

    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
    first, second = answer(sound), answer(url)
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] > 75
    sound["input_audio"]["data"] = data[:300]
    assert "sound 1: The file is" in answer(sound, 400)["error"]["message"]
    sound["input_audio"] = {"data": data}
    assert "format" in answer(sound, 400)["error"]["message"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert "send text and sounds only" in answer(image, 400)["error"]["message"]
