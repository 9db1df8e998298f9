"""Models in Mistral's own form, from the folder to the answer, which is that of the other form."""

import base64
import io

import httpx
import pytest
import torch
from PIL import Image

from octavo import SamplingParams
from octavo.checkpoints.mistral.folder import _sinusoids
from octavo.errors import ModelError
from tests.checkpoints.mistral.test_folder import CASES
from tests.e2e.harness import serve
from tests.media.sounds import chirp, encode
from tests.mistral_files import COUNT, save_both
from tests.models.harness import make_hf
from tests.pictures import make_llm, picture
from tests.sounds import sound

PREPROCESSOR = {"image_processor_type": "PixtralImageProcessor", "patch_size": 4}
PREPROCESSOR |= {"size": {"longest_edge": 40}}
SOUNDS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8}
SOUNDS |= {"chunk_length": 6}
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
GREEDY |= {"logit_bias": dict.fromkeys(range(COUNT), -100.0)}
MODES = {"load_format": "mistral", "config_format": "mistral", "tokenizer_mode": "mistral"}


def url(height, width, seed=0):
    file = io.BytesIO()
    Image.fromarray(picture(height, width, seed)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(text, *pictures):
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in pictures]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


CHATS = [ask("What?", url(48, 30)), ask("Only a text."), ask("Two", url(16, 40, 1), url(9, 9, 2))]


def answers(llm, given, method="chat"):
    params = SamplingParams(**GREEDY, logprobs=0)
    outputs = getattr(llm, method)(given, params, use_tqdm=False)
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def pixtral(tmp_path_factory):
    """Return the folder of a model in Mistral's form, and its answers in the other form."""
    model = make_hf(CASES["pixtral"][0], **CASES["pixtral"][1])
    hf, own = save_both(model, tmp_path_factory.mktemp("pixtral"), PREPROCESSOR)
    with make_llm(hf) as llm:
        return own, answers(llm, CHATS)


@pytest.mark.parametrize("settings", [MODES, {"tensor_parallel_size": 2, "num_threads": 1}])
def test_pictures(pixtral, settings):
    folder, expected = pixtral
    with make_llm(folder, **settings) as llm:
        assert answers(llm, CHATS) == expected


def test_served(pixtral, tmp_path):
    folder, ((ids, tokens, _), *_) = pixtral
    with serve(tmp_path, "--dtype", "float32", "--max-model-len", "400", model=folder) as server:
        body = {"model": str(folder), "messages": CHATS[0], "return_token_ids": True} | GREEDY
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()
    assert answer["prompt_token_ids"] == list(ids)
    assert answer["choices"][0]["token_ids"] == list(tokens)


def test_sounds(tmp_path):
    model = make_hf(CASES["voxtral"][0], **CASES["voxtral"][1])
    table = model.model.audio_tower.embed_positions.weight
    table.data.copy_(torch.from_numpy(_sinusoids(*table.shape)))
    given = [
        {"prompt": "[INST][BEGIN_AUDIO][AUDIO]a[/INST]", "multi_modal_data": {"audio": [one]}}
        for one in (sound(7.1), sound(0.5, 1))
    ]
    heard = encode(chirp(3.0), "flac")
    found = []
    for folder in save_both(model, tmp_path, SOUNDS, "v11"):
        with make_llm(folder) as llm:
            text = llm.transcribe(heard, language="de")[0].text
            found.append((answers(llm, given, "generate"), text))
    assert found[0] == found[1]


def test_a_tokenizer_that_is_missing(pixtral, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer_mode=mistral: .*tekken\.json is missing"):
        make_llm(pixtral[0], tokenizer=str(tmp_path), tokenizer_mode="mistral")
