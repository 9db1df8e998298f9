from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from training import train
from training.data import IGNORE
from training.loop import Loop, Plan
from training.speech import (
    END,
    FIRST_TIMESTAMP,
    NO_SPEECH,
    NO_TIMESTAMPS,
    SECONDS,
    SPECIAL,
    START,
    STATES_A_SECOND,
    WORDS,
    Speech,
    SpeechConfig,
    export_speech,
    make_tokenizer,
    speech_loss,
    word_token,
)
from training.spoken import RATE, Spoken, SpokenStream, disturb, silence, speak
from training.spoken_card import num_errors

SMALL = SpeechConfig(
    d_model=24, encoder_layers=1, encoder_ffn_dim=32, decoder_layers=1, decoder_ffn_dim=32
)


def test_the_tokenizer_has_a_token_for_each_word_and_all_text() -> None:
    tokenizer = make_tokenizer()
    assert len({word_token(word) for word in WORDS}) == len(WORDS)
    for text in (" one two seven", "Ünseen 12\n"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    ids = tokenizer.encode(" one").ids
    assert ids == [START, NO_TIMESTAMPS, word_token("one"), END]
    assert tokenizer.id_to_token(FIRST_TIMESTAMP) == "<|0.00|>"
    assert tokenizer.id_to_token(tokenizer.get_vocab_size() - 1) == f"<|{SECONDS:.2f}|>"
    assert tokenizer.id_to_token(NO_SPEECH) == SPECIAL[7]


def test_the_exported_model_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Speech(SMALL)
    export_speech(model, tmp_path)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32
    ).eval()
    model.load_state_dict(
        {
            k.removeprefix("model."): v
            for k, v in theirs.state_dict().items()
            if "proj_out" not in k
        },
        strict=False,
    )
    features = torch.randn(2, 80, 100 * SECONDS)
    tokens = torch.tensor([[START, NO_TIMESTAMPS, word_token("one")]] * 2)
    with torch.no_grad():
        wanted = theirs(input_features=features, decoder_input_ids=tokens).logits
        torch.testing.assert_close(model(features, tokens), wanted, atol=2e-5, rtol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer(" one two").input_ids, skip_special_tokens=True) == " one two"
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    assert extractor(np.zeros(8000), sampling_rate=RATE).input_features[0].shape == (80, 600)


class TonesForWords:
    """Synthesizer of tests: each word is a tone of its own, 0.25 s long."""

    rate = 22_050

    def speak(self, text: str, *_: object) -> tuple[np.ndarray, list[int]]:
        words = text.replace(",", "").split()
        times = np.arange(self.rate // 4) / self.rate
        tones = [0.3 * np.sin(2e3 * (1 + WORDS.index(word)) * times) for word in words]
        begins = [i * len(times) for i in range(len(words))]
        return np.concatenate(tones).astype(np.float32), begins


def spoken() -> Spoken:
    return speak(TonesForWords(), random.Random(0), "any", ["one", "two"])  # type: ignore[arg-type]


def test_noise_keeps_the_times_of_words() -> None:
    clean = spoken()
    noisy = disturb(clean, np.random.default_rng(0))
    assert noisy.words == ["one", "two"]
    shift = noisy.edges[0] - clean.edges[0]
    assert noisy.edges == pytest.approx([edge + shift for edge in clean.edges])
    assert 0 <= shift <= 1
    assert len(noisy.samples) <= SECONDS * RATE
    assert np.abs(silence(np.random.default_rng(0))).max() < 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SpokenStream:
    monkeypatch.setattr("training.spoken.Synthesizer", TonesForWords)
    return SpokenStream(SMALL, 0, 24)


def test_batches_are_functions_of_the_seed_and_their_number(stream: SpokenStream) -> None:
    features, rows = stream.next()
    other = stream.next()
    assert not torch.equal(other[1], rows)
    stream.state = 0
    again = stream.next()
    assert torch.equal(again[0], features)
    assert torch.equal(again[1], rows)


def test_rows_name_the_word_of_each_state(stream: SpokenStream) -> None:
    _, rows = stream.next()
    states = SMALL.max_source_positions
    heads = set()
    for row in rows:
        tokens, targets = row[:-states].chunk(2)
        kept = targets[targets != IGNORE].tolist()
        assert tokens[0] == START
        assert kept[-1] == END
        heads.add("silence" if kept[0] == NO_SPEECH else kept[0] == NO_TIMESTAMPS)
        said = [token for token in kept if token < END]
        if kept[0] > NO_TIMESTAMPS:
            seconds = (kept[-2] - kept[0]) / STATES_A_SECOND
            assert 0.2 * len(said) < seconds < 0.3 * len(said)
        spans = row[-states:].tolist()
        for i, word in enumerate(said, 1):
            assert targets[i] == word
            assert 8 < spans.count(i) < 17
    assert heads == {"silence", True, False}


def test_training_lowers_the_loss(stream: SpokenStream, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Speech(SMALL)
    plan = Plan(steps=8, workers=1, bfloat16=False)
    loop = Loop(model, speech_loss(model), stream, plan, tmp_path)
    first = loop.train_step()
    loop.run()
    with torch.no_grad():
        assert speech_loss(model)(stream.next()) < first - 1


def test_num_errors() -> None:
    assert num_errors(["one", "two", "two"], ["one", "two", "two"]) == 0
    assert num_errors(["one", "two", "two"], ["two", "two", "no"]) == 2
    assert num_errors(["one"], []) == 1


def test_the_command_has_no_time_budget() -> None:
    assert train.parse_args(["spoken"]).out.name == "spoken-words"
    with pytest.raises(SystemExit):
        train.parse_args(["spoken", "--minutes", "1"])


def test_the_config_is_exported(tmp_path: Path) -> None:
    export_speech(Speech(SMALL), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_source_positions"] == STATES_A_SECOND * SECONDS
    assert config["decoder_start_token_id"] == START
