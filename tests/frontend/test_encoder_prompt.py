"""Prompts of encoder-decoders, as requests for the engine core."""

from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from octavo.config import ModelConfig
from octavo.errors import ContextLengthError, RequestError, UnsupportedError
from octavo.frontend.encoder_prompt import encoder_token_ids
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.open_media import check_processor_kwargs
from octavo.messages import RequestOptions
from octavo.sampling_params import SamplingParams
from tests.frontend.test_input_processor import byte_level

START, FORCED = 2, 5


@dataclass
class Spec:
    architecture: str = "Both"
    generates: bool = True
    poolers: tuple[()] = ()
    sees_all: bool = False
    vocab_size: int = 270
    embed_size: int = 4
    eos_token_ids: tuple[int, ...] = (3,)
    is_encoder_decoder: bool = True
    encoder_modality: str = "text"
    encoder_vocab_size: int = 300
    encoder_frames: tuple[int, int] = (4, 3)
    max_encoder_len: int = 8
    decoder_start_ids: tuple[int, ...] = (START, FORCED)
    bad_words_ids: tuple[tuple[int, ...], ...] = ((7,),)

    def num_encoder_tokens(self, frames):
        """Two frames are a token."""
        return frames // 2

    def check_item(self, item):
        """Refuse sounds of more than four frames."""
        if item.data["input_features"].shape[0] > 4:
            raise RequestError("4 frames")


def run(prompt, spec=None, salt=None, **params):
    processor = InputProcessor(ModelConfig(), spec or Spec(), byte_level(), 16)
    options = RequestOptions(0.0, cache_salt=salt)
    return processor.process("r", prompt, SamplingParams(**params), options)


def of_encoder(prompt, **params):
    request, _ = run(prompt, **params)
    return encoder_token_ids(request.mm_features)


def test_a_prompt_without_parts_is_the_encoders():
    expected, text = run("abc")
    assert (text, expected.prompt_token_ids) == ("abc", [START, FORCED])
    (item,) = expected.mm_features
    assert (item.modality, item.num_encoder_tokens, item.num_rows) == ("text", 3, 3)
    ids = encoder_token_ids(expected.mm_features)
    for prompt in (ids, {"prompt": "abc"}, {"prompt_token_ids": ids}, {"encoder_prompt": "abc"}):
        assert run(prompt)[0].mm_features == expected.mm_features
    assert of_encoder([299]) == [299]  # the encoder has a vocabulary of its own


def test_the_decoders_prompt_begins_with_its_first_token():
    for given, expected in (
        ([8, 9], [START, 8, 9]),
        ([START, 8], [START, 8]),
        ([], [START]),
        ({"prompt_token_ids": [9]}, [START, 9]),
    ):
        prompt = {"encoder_prompt": "abc", "decoder_prompt": given}
        assert run(prompt)[0].prompt_token_ids == expected
    request, _ = run({"encoder_prompt": "abc", "decoder_prompt": "d"})
    assert request.prompt_token_ids[:1] == [START]
    assert len(request.prompt_token_ids) == 2


def test_words_that_the_model_never_writes():
    request, _ = run("abc")
    assert np.frombuffer(request.sampling_params.bad_words.last, np.int32).tolist() == [7]


def test_the_identifier_depends_on_content_and_scope():
    ids = {
        run(prompt, salt=salt)[0].mm_features[0].identifier
        for prompt, salt in (("abc", None), ("abd", None), ("abc", "s"), ("abc", "t"))
    }
    assert len(ids) == 4
    assert run("abc")[0].mm_features[0].identifier in ids


def test_truncation():
    assert of_encoder(list(range(20)), truncate_prompt_tokens=3) == [17, 18, 19]
    assert of_encoder(list(range(20)), truncate_prompt_tokens=-1) == [*range(12, 20)]


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ([1] * 9, ContextLengthError, "reads at most 8 tokens; your prompt has 9"),
        ("a" * 500_000, ContextLengthError, "your text of 500000 characters"),
        ([], RequestError, "encoder's prompt is empty"),
        ([300], RequestError, "encoder_prompt holds the token id 300"),
        ({"decoder_prompt": [1]}, RequestError, "'encoder_prompt' is missing"),
        ({"encoder_prompt": "a", "prompt": "b"}, RequestError, "has no 'prompt'"),
        ({"encoder_prompt": "a", "decoder_prompt": [270]}, RequestError, "token id 270"),
        ({"encoder_prompt": "a", "decoder_prompt": [1] * 16}, ContextLengthError, "16"),
        ({"encoder_prompt": {"input_features": [[1.0]]}}, RequestError, "reads text"),
        ({"encoder_prompt": {}}, RequestError, "needs 'prompt'"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, UnsupportedError, "reads text only"),
        (
            {"encoder_prompt": {"prompt": "a", "multi_modal_data": {"image": 1}}},
            UnsupportedError,
            "reads text only here",
        ),
    ],
)
def test_bad_prompts(prompt, error, match):
    with pytest.raises(error, match=match):
        run(prompt)


def test_settings_of_pictures_for_a_model_of_texts():
    check_processor_kwargs(None, {})
    with pytest.raises(UnsupportedError, match="reads text only"):
        check_processor_kwargs(None, {"max_pixels": 5})


def test_sounds():
    spec = Spec(encoder_modality="audio")
    frames = np.arange(12.0).reshape(4, 3)
    request, text = run({"encoder_prompt": {"input_features": frames}}, spec)
    (item,) = request.mm_features
    assert (text, item.modality, item.num_encoder_tokens) == (None, "audio", 2)
    assert item.data["input_features"].shape == (4, 3)
    assert encoder_token_ids(request.mm_features) is None
    for features, match in (
        (np.zeros(3), "shape"),
        (np.full((4, 3), np.nan), "finite"),
        (np.zeros((18, 3)), r"shape \(18, 3\), and the encoder reads \(4, 3\)"),
        (np.zeros((4, 2)), r"shape \(4, 2\)"),
        (np.zeros((3, 3)), r"shape \(3, 3\)"),
        ("abc", "no array of numbers"),
    ):
        with pytest.raises(RequestError, match=match):
            run({"encoder_prompt": {"input_features": features}}, spec)
    with pytest.raises(RequestError, match="reads audio"):
        run("abc", spec)


def test_a_request_of_another_engine_is_made_again():
    for spec, prompt in (
        (Spec(), {"encoder_prompt": "abc", "decoder_prompt": [8]}),
        (Spec(encoder_modality="audio"), {"encoder_prompt": {"input_features": np.ones((4, 3))}}),
    ):
        params = SamplingParams(max_tokens=4)
        processor = InputProcessor(ModelConfig(), spec, byte_level(), 16)
        request, _ = processor.process("r", prompt, params, RequestOptions(0.0, cache_salt="s"))
        forged = [replace(item, identifier="forged") for item in request.mm_features]
        made = processor.renew(replace(request, mm_features=forged), params, 1.0)
        assert made.mm_features == request.mm_features
        assert made.prompt_token_ids == request.prompt_token_ids
    with pytest.raises(RequestError):
        processor.renew(replace(request, mm_features=[]), params, 1.0)
