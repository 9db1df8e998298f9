"""Files of a speech model."""

import json

import pytest

from octavo import LLM
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError
from octavo.speech.model import SpeechModel
from octavo.text.tokenizer import Tokenizer
from tests.speech_model import END, FIRST_TIMESTAMP, START, write_speech_model


def read(folder):
    return SpeechModel.read(open_checkpoint(folder), Tokenizer.from_folder(folder), 48)


def test_files(tmp_path):
    write_speech_model(tmp_path)
    model = read(tmp_path)
    assert (model.tokens.start, model.tokens.end) == (START, END)
    assert model.tokens.first_timestamp == FIRST_TIMESTAMP
    assert set(model.tokens.languages) == {"en", "de"}
    assert (model.suppress, model.begin_suppress, model.max_initial) == ((1, 2), (0, END), 10)
    assert (model.features.feature_size, model.features.chunk_length) == (8, 6)
    assert model.decode(model.encode(" Hi!")) == " Hi!"
    (tmp_path / "generation_config.json").unlink()
    model = read(tmp_path)
    assert (model.suppress, model.max_initial) == ((), None)
    assert model.tokens.languages


def test_settings_in_one_file(tmp_path):
    """transformers 5 writes the settings of features to processor_config.json."""
    write_speech_model(tmp_path)
    expected = read(tmp_path).features
    file = tmp_path / "preprocessor_config.json"
    whole = {"feature_extractor": json.loads(file.read_text())}
    file.unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    assert read(tmp_path).features == expected


def test_english_only(tmp_path):
    write_speech_model(tmp_path, is_multilingual=False)
    assert not read(tmp_path).tokens.languages


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("preprocessor_config.json", None, "is missing"),
        ("preprocessor_config.json", "{", "is not valid JSON"),
        ("preprocessor_config.json", "[]", "is not a JSON object"),
        ("preprocessor_config.json", '{"feature_size": -1}', "feature_size=-1"),
        ("generation_config.json", '{"suppress_tokens": 5}', "suppress_tokens=5 is not a list"),
        ("generation_config.json", '{"max_initial_timestamp_index": "x"}', "not a whole number"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, text, message):
    write_speech_model(tmp_path)
    file = tmp_path / name
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path)
    assert name in str(caught.value)


def test_heads_of_alignment(tmp_path):
    def heads(**generation):
        with LLM(write_speech_model(tmp_path, **generation), load_format="dummy") as llm:
            engine = llm.llm_engine
            return SpeechModel.open(
                engine.checkpoint, engine.spec, engine.tokenizer, 48
            ).alignment_heads

    upper = ((1, 0), (1, 1), (1, 2), (1, 3))  # the upper half of the layers
    assert heads() == upper
    assert heads(alignment_heads=[[0, 3], [1, 2]]) == ((0, 3), (1, 2))
    # Distilled models have the list of their teacher, with more layers.
    assert heads(alignment_heads=[[0, 3], [2, 0]]) == heads(alignment_heads=[[0, 4]]) == upper
    for wrong in ([[-1, 0]], [[0, 1, 2]], [["0", 1]], [0], "x", 5, {"a": 1}):
        with pytest.raises(ModelError, match="alignment_heads="):
            heads(alignment_heads=wrong)


def test_a_missing_token_is_named(tmp_path):
    write_speech_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != "<|nospeech|>"]
    file.write_text(json.dumps(data))
    with pytest.raises(ModelError, match="nospeech"):
        read(tmp_path)
