"""Input processor: every check, what is filled in, and the fan-out of n > 1."""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from octavo.config import ModelConfig
from octavo.engine.input_processor import InputProcessor
from octavo.errors import ContextLengthError, RequestError, UnsupportedError
from octavo.messages import NO_TOKEN, EngineCoreRequest
from octavo.sampling_params import SamplingParams
from tests.small_tokenizers import BOS, EOS, byte_level, sentencepiece


@dataclass(frozen=True)
class Spec:
    vocab_size: int = 270
    eos_token_ids: tuple[int, ...] = (EOS, 3)


def make(tokenizer="default", max_model_len=32, spec=None, **config):
    tokenizer = byte_level() if tokenizer == "default" else tokenizer
    return InputProcessor(ModelConfig(**config), spec or Spec(), tokenizer, max_model_len)


def run(prompt="abc", processor=None, request_id="r", **kwargs):
    names = ("clip_max_tokens", "cache_salt", "deadline", "add_special_tokens")
    options = {n: kwargs.pop(n) for n in names if n in kwargs}
    params = SamplingParams(**kwargs)
    processor = processor or make()
    return processor.process(request_id, prompt, params, arrival_time=1.5, **options)


def params_of(**kwargs):
    return run(**kwargs)[0].sampling_params


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ("abc", [97, 98, 99], "abc"),
        ([97, 98], [97, 98], None),
        ((97,), [97], None),
        (np.array([97, 98]), [97, 98], None),
        ([np.int64(97), np.uint8(3)], [97, 3], None),
        ({"prompt": "abc"}, [97, 98, 99], "abc"),
        ({"prompt_token_ids": [97]}, [97], None),
        ({"prompt_token_ids": [97], "prompt": "a"}, [97], "a"),
    ],
)
def test_forms_of_prompts(prompt, ids, text):
    request, got_text = run(prompt)
    assert request.prompt_token_ids == ids
    assert all(type(i) is int for i in request.prompt_token_ids)
    assert got_text == text
    assert (request.request_id, request.arrival_time) == ("r", 1.5)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        {},
        {"prompt": ""},
        {"prompt": 3},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": None},
        {"text": "a"},
        None,
        3,
        b"abc",
        ["a"],
        [1.0],
        [True],
        [None],
        {1, 2},
        [-1],
        [270],
        [10**30],
        [-(10**30)],
        np.array([0.5]),
        "\ud800",
    ],
)
def test_bad_prompts(prompt):
    with pytest.raises(RequestError) as caught:
        run(prompt)
    assert caught.value.param == "prompt"
    assert not isinstance(caught.value, ContextLengthError)


def test_media_is_refused():
    with pytest.raises(UnsupportedError):
        run({"prompt": "a", "multi_modal_data": {"image": 1}})


def test_text_outside_the_models_vocabulary():
    """A tokenizer may have more tokens than the model has rows."""
    with pytest.raises(RequestError, match="vocabulary of 100"):
        run("zzz", make(spec=Spec(vocab_size=100)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [270]),
        ("logit_bias", {270: 1.0}),
        ("allowed_token_ids", [1, 2, 999]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 10**20),
        ("stop", ["\ud800"]),
        ("bad_words", ["x\udc00"]),
        ("cache_salt", "\ud800"),
        ("cache_salt", "s" * 1025),
        ("truncate_prompt_tokens", 33),
    ],
)
def test_bad_parameters(name, value):
    with pytest.raises(RequestError) as caught:
        run(**{name: value})
    assert caught.value.param == name


def test_limits_of_logprobs():
    assert params_of(logprobs=20).logprobs == 20
    unlimited = make(max_logprobs=-1)
    assert params_of(logprobs=-1, processor=unlimited).logprobs == -1
    with pytest.raises(RequestError):
        run(logprobs=271, processor=unlimited)


def test_params_are_copied_and_travel():
    params = SamplingParams(stop=["x"], stop_token_ids=[5], top_k=10**15, max_tokens=3)
    request, _ = make().process("r", "abc", params, arrival_time=0.0)
    completed = request.sampling_params
    assert params.seed is None
    assert params.top_k == 10**15
    assert completed.stop_token_ids == {5}
    assert completed.top_k == 0  # more than the vocabulary: keeps all
    packed = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(packed, type=EngineCoreRequest) == request
    with pytest.raises(RequestError, match="SamplingParams"):
        make().process("r", "abc", {"max_tokens": 3}, arrival_time=0.0)


def test_stop_token_ids():
    assert params_of(stop_token_ids=[9, 5]).all_stop_token_ids == {3, 5, 9, EOS}
    assert params_of(stop_token_ids=[9], ignore_eos=True).all_stop_token_ids == {9}
    # The tokenizer's own end of sequence counts too; ids beyond the vocabulary cannot come.
    processor = make(spec=Spec(eos_token_ids=(3, 9999)))
    assert params_of(processor=processor).all_stop_token_ids == {3, EOS}


def test_max_tokens():
    assert params_of(max_tokens=None).max_tokens == 29
    assert params_of(max_tokens=29).max_tokens == 29
    with pytest.raises(ContextLengthError, match=r"32 tokens; you asked for 33 tokens \(3 in") as e:
        run(max_tokens=30)
    assert e.value.code == "context_length_exceeded"
    assert params_of(max_tokens=10**15, clip_max_tokens=True).max_tokens == 29
    with pytest.raises(ContextLengthError, match="min_tokens=30"):
        run(max_tokens=None, min_tokens=30)
    with pytest.raises(ContextLengthError, match="min_tokens=30"):
        run(max_tokens=40, min_tokens=30, clip_max_tokens=True)


def test_prompt_too_long():
    assert params_of(prompt=[1] * 31, max_tokens=None).max_tokens == 1
    for clip in (False, True):
        with pytest.raises(ContextLengthError, match="32 tokens") as caught:
            run([1] * 32, max_tokens=1, clip_max_tokens=clip)
        assert caught.value.param == "prompt"


def test_far_too_long_text_is_not_even_tokenised(monkeypatch):
    processor = make()
    monkeypatch.setattr(type(processor._tokenizer), "encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(ContextLengthError, match="100000 characters"):
        run("x" * 100_000, processor)


def test_truncation():
    ids = list(range(1, 41))
    assert run(ids, truncate_prompt_tokens=5)[0].prompt_token_ids == ids[-5:]
    assert run(ids, truncate_prompt_tokens=-1, max_tokens=10)[0].prompt_token_ids == ids[-22:]
    assert run(ids, truncate_prompt_tokens=-1, max_tokens=None)[0].prompt_token_ids == ids[-31:]
    assert run([1, 2], truncate_prompt_tokens=5)[0].prompt_token_ids == [1, 2]
    request, text = run("x" * 5000, truncate_prompt_tokens=3)
    assert request.prompt_token_ids == [120] * 3
    assert len(text) == 5000


def test_special_tokens_of_a_text():
    processor = make(sentencepiece(), spec=Spec(eos_token_ids=(2,)))
    assert run("a", processor)[0].prompt_token_ids[0] == 1
    assert 1 not in run("a", processor, add_special_tokens=False)[0].prompt_token_ids


def test_seeds():
    first, again = params_of(request_id="a"), params_of(request_id="a")
    assert first.seed == again.seed >= 0
    assert params_of(request_id="b").seed != first.seed
    assert params_of(request_id="a", processor=make(seed=1)).seed != first.seed
    assert params_of(seed=7).seed == 7


def test_bad_words():
    tokenizer = byte_level()
    hello = tokenizer.encode("hello")

    def sequences(*words):
        packed = params_of(bad_words=list(words)).bad_words
        last = np.frombuffer(packed.last, np.int32).tolist()
        prefixes = np.frombuffer(packed.prefixes, np.int32).reshape(len(last), -1).tolist()
        return [
            [*(t for t in prefix if t != NO_TOKEN), token]
            for prefix, token in zip(prefixes, last, strict=True)
        ]

    assert sequences("hello") == [hello, [32, *hello]]
    assert sequences(" x", "x") == [[120], [32, 120]]
    assert sequences(" ") == [[32], [32, 32]]
    with pytest.raises(RequestError, match="bad_words"):
        run(bad_words=["z"], processor=make(spec=Spec(vocab_size=100)), prompt="a")


def test_without_tokenizer():
    processor = make(tokenizer=None)
    assert run([1, 2], processor)[0].sampling_params.all_stop_token_ids == {3, EOS}
    for kwargs in ({"prompt": "abc"}, {"stop": ["a"]}, {"bad_words": ["a"]}):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            run(**({"prompt": [1], "processor": processor} | kwargs))


def test_salts_do_not_mix():
    def salt(scope, own):
        return run(cache_salt=scope)[0].cache_salt if own is None else scoped(scope, own)

    def scoped(scope, own):
        params = SamplingParams(cache_salt=own)
        return make().process("r", "a", params, arrival_time=0.0, cache_salt=scope)[0].cache_salt

    assert salt(None, None) is None
    pairs = [("ab", None), (None, "ab"), ("a", "b"), ("", "2:ab"), ("2:ab", None), ("a", "bc")]
    assert len({salt(*pair) for pair in pairs}) == len(pairs)
    assert salt("k", "s") == salt("k", "s")


def test_bos_is_no_end():
    assert BOS not in params_of().all_stop_token_ids


def test_the_seed_of_minus_one_is_none():
    drawn = [params_of(seed=-1, request_id=i).seed for i in ("a", "b")]
    assert drawn == [params_of(request_id=i).seed for i in ("a", "b")]
    assert drawn[0] != drawn[1]
