"""Options and truncation of texts for pooling models."""

from dataclasses import dataclass

import pytest

from octavo import PoolingParams
from octavo.config import ModelConfig
from octavo.frontend.input_processor import InputProcessor
from octavo.messages import RequestOptions
from octavo.models.blocks.pooler import NO_SENTENCES, PoolerSpec, SentencesSpec
from tests.small_tokenizers import byte_level


@dataclass(frozen=True)
class Spec:
    is_encoder_decoder = False
    architecture: str = "Small"
    generates: bool = False
    sentences: SentencesSpec = NO_SENTENCES
    poolers: tuple[PoolerSpec, ...] = (PoolerSpec("embed", ("cls",), 4),)
    sees_all: bool = True
    vocab_size: int = 270
    embed_size: int = 4
    eos_token_ids: tuple[int, ...] = ()


def run(prompt, options=None, **params):
    processor = InputProcessor(ModelConfig(), Spec(), byte_level(), 8)
    request, _ = processor.pooling.process(
        "r", prompt, PoolingParams(**params), options or RequestOptions(0.0)
    )
    return request


def test_the_envelope_is_kept():
    options = RequestOptions(1.0, priority=-2, tenant="t", turn=3, cache_salt="s")
    made = run("abc", options).options
    assert (made.priority, made.tenant, made.turn) == (-2, "t", 3)
    assert made.cache_salt
    assert run("abc").options.priority == 0


@pytest.mark.parametrize("prompt", ["abcdefghijkl", [*b"abcdefghijkl"]])
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"truncate_prompt_tokens": -1}, b"abcdefgh"),
        ({"truncate_prompt_tokens": 3}, b"abc"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"jkl"),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, b"efghijkl"),
    ],
)
def test_the_whole_context_may_be_used(prompt, params, kept):
    assert bytes(run(prompt, **params).prompt_token_ids) == kept
