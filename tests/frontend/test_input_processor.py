"""Input processor: every check, the defaults, and the fan-out of n > 1."""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from octavo.config import ModelConfig
from octavo.errors import ContextLengthError, RequestError, UnsupportedError
from octavo.frontend.input_processor import InputProcessor
from octavo.messages import (
    NO_TOKEN,
    CoreSamplingParams,
    EngineCoreRequest,
    GrammarSpec,
    RequestOptions,
)
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from tests.params import set_options
from tests.small_tokenizers import BOS, EOS, byte_level, sentencepiece

NOT_FINITE = "prompt_embeds", "not finite"


@dataclass(frozen=True)
class Spec:
    is_encoder_decoder = False
    architecture: str = "Small"
    generates: bool = True
    poolers: tuple[()] = ()
    sees_all: bool = False
    vocab_size: int = 270
    embed_size: int = 4
    eos_token_ids: tuple[int, ...] = (EOS, 3)


def make(tokenizer="default", max_model_len=32, spec=None, **config):
    tokenizer = byte_level() if tokenizer == "default" else tokenizer
    return InputProcessor(ModelConfig(**config), spec or Spec(), tokenizer, max_model_len)


def run(prompt="abc", processor=None, request_id="r", **kwargs):
    special = kwargs.pop("add_special_tokens", True)
    options = RequestOptions(
        1.5, cache_salt=kwargs.pop("cache_salt", None), deadline=kwargs.pop("deadline", None)
    )
    params = SamplingParams(**kwargs)
    processor = processor or make()
    return processor.process(request_id, prompt, params, options, add_special_tokens=special)


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
    assert (request.request_id, request.options.arrival_time) == ("r", 1.5)


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


def embeds(*shape, dtype=torch.float32, **more):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return {"prompt_embeds": tensor, **more}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4)])
def test_embeddings_stand_in_for_tokens(dtype, shape):
    prompt = embeds(*shape, dtype=dtype)
    request, text = run(prompt | {"prompt": "abc"}, make(enable_prompt_embeds=True))
    given = request.prompt_embeds
    assert text == "abc"
    assert request.prompt_token_ids == [0, 0, 0]
    assert request.known_token_ids == []
    assert (given.dtype, given.size, given.num_tokens) == (str(dtype)[6:], 4, 3)
    found = torch.frombuffer(bytearray(given.data), dtype=dtype)
    assert torch.equal(found.view(3, 4), prompt["prompt_embeds"].view(3, 4))
    assert request.sampling_params.max_tokens == 16
    packed = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(packed, type=EngineCoreRequest).prompt_embeds == given


def test_embeddings_are_truncated_like_tokens():
    processor, prompt = make(enable_prompt_embeds=True), embeds(10, 4)
    rows = prompt["prompt_embeds"].numpy()
    for side, kept in (("left", rows[-4:]), ("right", rows[:4])):
        request, _ = run(prompt, processor, truncate_prompt_tokens=4, truncation_side=side)
        assert request.prompt_embeds.data == kept.tobytes()
        assert request.prompt_token_ids == [0] * 4
    view = {"prompt_embeds": rows.T.copy().T[::2]}  # numpy's, and not contiguous
    assert run(view, processor)[0].prompt_embeds.data == rows[::2].tobytes()


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "says"),
    [
        ({"prompt_embeds": [[0.0] * 4]}, {}, "prompt_embeds", "of type list"),
        (embeds(3, 4, multi_modal_data={"image": 1}), {}, "multi_modal_data", "both"),
        ({"prompt_embeds": b"abc"}, {}, "prompt_embeds", "of type bytes"),
        (embeds(3, 5), {}, "prompt_embeds", "of 5 numbers; this model's have 4"),
        (embeds(4), {}, "prompt_embeds", "shape"),
        (embeds(2, 3, 4), {}, "prompt_embeds", "shape"),
        (embeds(0, 4), {}, "prompt", "empty"),
        (embeds(3, 0), {}, "prompt_embeds", "without numbers"),
        (embeds(3, 4, dtype=torch.int8), {}, "prompt_embeds", "of type int8"),
        ({"prompt_embeds": np.zeros((2, 4), np.complex64)}, {}, "prompt_embeds", "complex64"),
        ({"prompt_embeds": torch.eye(4).to_sparse()}, {}, "prompt_embeds", "to_dense"),
        (embeds(32, 4), {}, "prompt_embeds", "no room"),
        (embeds(3, 4), {"prompt_logprobs": 1}, "prompt_logprobs", "prompt_embeds"),
        (embeds(3, 4, prompt_token_ids=[1, 2, 3]), {}, "prompt", "both"),
        (embeds(3, 4, prompt=5), {}, "prompt", "not a text"),
        *(
            ({"prompt_embeds": torch.tensor([[0, 1, value, 2]], dtype=dtype)}, {}, *NOT_FINITE)
            for value in (torch.nan, torch.inf, -torch.inf)
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_bad_embeddings(prompt, fields, param, says):
    with pytest.raises(RequestError, match=says) as caught:
        run(prompt, make(enable_prompt_embeds=True), **fields)
    assert caught.value.param == param
    with pytest.raises(RequestError, match="--enable-prompt-embeds"):
        run(prompt, **fields)


def test_text_outside_the_models_vocabulary():
    """A tokenizer may have more tokens than the model has rows."""
    with pytest.raises(RequestError, match="out of vocabulary: this model has 100"):
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
    request, _ = make().process("r", "abc", params, RequestOptions(0.0))
    completed = request.sampling_params
    assert params.seed is None
    assert params.top_k == 10**15
    assert completed.stop_token_ids == {5}
    assert completed.top_k == 0  # more than the vocabulary: keeps all
    packed = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(packed, type=EngineCoreRequest) == request
    with pytest.raises(RequestError, match="SamplingParams"):
        make().process("r", "abc", {"max_tokens": 3}, RequestOptions(0.0))


def test_stop_token_ids():
    assert params_of(stop_token_ids=[9, 5]).all_stop_token_ids == {3, 5, 9, EOS}
    assert params_of(stop_token_ids=[9], ignore_eos=True).all_stop_token_ids == {9}
    # The tokenizer's end of sequence counts too; ids beyond the vocabulary cannot occur.
    processor = make(spec=Spec(eos_token_ids=(3, 9999)))
    assert params_of(processor=processor).all_stop_token_ids == {3, EOS}
    processor = make(spec=Spec(eos_token_ids=(0, -1)))
    assert params_of(processor=processor).all_stop_token_ids == {0, EOS}


def test_max_tokens():
    assert params_of(max_tokens=None).max_tokens == 29
    assert params_of(max_tokens=29).max_tokens == 29
    assert params_of(max_tokens=30).max_tokens == 29  # the number that fits
    assert params_of(max_tokens=10**15).max_tokens == 29
    with pytest.raises(ContextLengthError, match="min_tokens=30"):
        run(max_tokens=None, min_tokens=30)
    with pytest.raises(ContextLengthError, match="min_tokens=30"):
        run(max_tokens=40, min_tokens=30)


def test_prompt_too_long():
    assert params_of(prompt=[1] * 31, max_tokens=None).max_tokens == 1
    with pytest.raises(ContextLengthError, match="32 tokens") as caught:
        run([1] * 32, max_tokens=1)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


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
    for keep, kept in ((5, ids[:5]), (-1, ids[:22])):
        options = {"truncate_prompt_tokens": keep, "truncation_side": "right", "max_tokens": 10}
        assert run(ids, **options)[0].prompt_token_ids == kept
    assert run(truncation_side="right")[0].prompt_token_ids == [97, 98, 99]
    with pytest.raises(RequestError, match="truncation_side='up' is not left or right") as caught:
        run(truncation_side="up")
    assert caught.value.param == "truncation_side"
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
        return run(cache_salt=scope)[0].options.cache_salt if own is None else scoped(scope, own)

    def scoped(scope, own):
        params = SamplingParams(cache_salt=own)
        return (
            make()
            .process("r", "a", params, RequestOptions(0.0, cache_salt=scope))[0]
            .options.cache_salt
        )

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


CONTEXT = "This model's maximum context length is 32 tokens; "
REFUSALS = [
    ({"prompt": [5, -1]}, "prompt", "prompt holds the token id -1, which is out of vocabulary: "
     "this model has 270 tokens."),
    ({"prompt": [5, 270]}, "prompt", "prompt holds the token id 270, which is out of vocabulary: "
     "this model has 270 tokens."),
    ({"logit_bias": {270: 1.0}}, "logit_bias", "logit_bias holds the token id 270, which is out of "
     "vocabulary: this model has 270 tokens."),
    ({"prompt": []}, "prompt", "The prompt is empty; give at least one token."),
    ({"prompt": {"x": 1}}, "prompt", "A prompt dict needs 'prompt', 'prompt_token_ids' or "
     "'prompt_embeds'."),
    ({"prompt": {"prompt": 3}}, "prompt", "'prompt' is a int, not a text."),
    ({"prompt": [True]}, "prompt", "A prompt is a text or a list of token ids (integers)."),
    ({"prompt": [1] * 32}, "prompt", CONTEXT + "your prompt has 32 tokens, which leaves no room "
     "for an answer. Shorten the prompt or set truncate_prompt_tokens."),
    ({"max_tokens": None, "min_tokens": 30}, "min_tokens", CONTEXT + "your prompt has 3 tokens, "
     "which leaves 29, fewer than min_tokens=30."),
    ({"prompt": "x" * 100_000}, "prompt", CONTEXT + "your prompt of 100000 characters is longer. "
     "Shorten it."),
    ({"truncate_prompt_tokens": 33}, "truncate_prompt_tokens", "truncate_prompt_tokens=33 is more "
     "than the model's context of 32 tokens."),
    ({"logprobs": 21}, "logprobs", "logprobs=21 is more than this server allows: 20 "
     "(max_logprobs)."),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs=-1 is more than this server "
     "allows: 20 (max_logprobs)."),
    ({"cache_salt": "s" * 1025}, "cache_salt", "cache_salt has 1025 characters; at most 1024 are "
     "allowed."),
]  # fmt: skip


@pytest.mark.parametrize(("given", "param", "message"), REFUSALS)
def test_refusals_in_full(given, param, message):
    with pytest.raises(RequestError) as caught:
        run(**given)
    assert (caught.value.message, caught.value.param) == (message, param)


def test_what_lies_just_within_the_bounds():
    assert run([0, 269])[0].prompt_token_ids == [0, 269]
    assert run([1] * 31, max_tokens=1)[0].sampling_params.max_tokens == 1
    assert params_of(max_tokens=None, min_tokens=29).min_tokens == 29
    assert run(list(range(40)), truncate_prompt_tokens=31, max_tokens=1)[
        0
    ].prompt_token_ids == list(range(9, 40))
    assert run("a", truncate_prompt_tokens=32, max_tokens=1)[0].prompt_token_ids == [97]
    assert run(cache_salt="s" * 1024)[0].options.cache_salt == "1024:" + "s" * 1024
    longest = "x" * 64
    assert params_of(bad_words=[longest], processor=make(max_model_len=64)).bad_words is not None


def test_a_whole_request():
    params = SamplingParams(
        n=3,
        temperature=0.5,
        top_p=0.9,
        top_k=269,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=11,
        max_tokens=7,
        min_tokens=2,
        logprobs=3,
        prompt_logprobs=4,
        priority=-5,
        stop_token_ids=[9],
        allowed_token_ids=[0, 33, 269],
        logit_bias={4: 1.5, 2: -3.0},
        cache_salt="own",
    )
    request, text = make().process(
        "r", "ab", params, RequestOptions(1.5, "mine", cache_salt="scope", deadline=9.5)
    )
    assert text == "ab"
    mask = bytearray(36)  # 270 bits in words of 32
    mask[0] = 1
    mask[4] = 2
    mask[33] = 1 << 5
    assert request == EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[97, 98],
        sampling_params=CoreSamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=269,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            seed=11,
            max_tokens=7,
            min_tokens=2,
            logprobs=3,
            prompt_logprobs=4,
            stop_token_ids=frozenset({9}),
            all_stop_token_ids=frozenset({9, 3, EOS}),
            allowed_token_ids=bytes(mask),
            logit_bias=(
                np.array([4, 2], np.int32).tobytes(),
                np.array([1.5, -3.0], np.float32).tobytes(),
            ),
            bad_words=None,
        ),
        options=RequestOptions(1.5, "mine", priority=-5, cache_salt="5:scopeown", deadline=9.5),
        n=3,
    )
    assert params_of(top_k=270).top_k == 0


def test_a_plain_request_asks_for_nothing():
    assert params_of(seed=1, max_tokens=5) == CoreSamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=5,
        all_stop_token_ids=frozenset({3, EOS}),
    )


def test_bad_words_of_different_lengths_are_packed_to_the_right():
    packed = params_of(bad_words=["xyz", "q"]).bad_words
    assert np.frombuffer(packed.last, np.int32).tolist() == [122, 122, 113, 113]
    none = NO_TOKEN
    assert np.frombuffer(packed.prefixes, np.int32).reshape(4, 3).tolist() == [
        [none, 120, 121],
        [32, 120, 121],
        [none, none, none],
        [none, none, 32],
    ]


def test_seeds_fit_a_signed_number():
    assert all(0 <= params_of(request_id=str(i)).seed < 2**63 for i in range(50))


@pytest.mark.parametrize(
    ("wanted", "spec"),
    [
        ({"json": {"type": "object"}}, GrammarSpec("json", '{"type":"object"}')),
        (
            {"json": "true", "disable_any_whitespace": True},
            GrammarSpec("json", "true", any_whitespace=False),
        ),
        ({"json_object": True}, GrammarSpec("json_object")),
        ({"regex": "a+", "backend": "guidance"}, GrammarSpec("regex", "a+", "llguidance")),
        ({"choice": ["a", 'é"']}, GrammarSpec("choice", '["a", "é\\""]')),
        ({"grammar": "root ::= x"}, GrammarSpec("grammar", "root ::= x")),
        (
            {"structural_tag": {"type": "structural_tag"}},
            GrammarSpec("structural_tag", '{"type":"structural_tag"}'),
        ),
    ],
    ids=str,
)
def test_structured_outputs_become_a_grammar(wanted, spec):
    params = params_of(structured_outputs=StructuredOutputsParams(**wanted))
    assert params.grammar == spec
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=CoreSamplingParams).grammar == spec


def test_the_backend_is_the_request_s_or_the_engine_s():
    processor = make(guided_decoding_backend="llguidance")
    for named, used in [("auto", "llguidance"), ("xgrammar", "xgrammar")]:
        wanted = StructuredOutputsParams(regex="a", backend=named)
        grammar = params_of(processor=processor, structured_outputs=wanted).grammar
        assert grammar.backend == used


def test_structured_outputs_need_a_tokenizer():
    with pytest.raises(RequestError, match="skip_tokenizer_init") as caught:
        run(
            [97],
            make(tokenizer=None),
            structured_outputs=StructuredOutputsParams(json_object=True),
        )
    assert caught.value.param == "structured_outputs"


class TestRenewed:
    """Request of a recording, renewed for the engine that replays it."""

    PARAMS = SamplingParams(
        n=2,
        max_tokens=9,
        stop=["x"],
        bad_words=["b"],
        logit_bias={5: 1.0},
        allowed_token_ids=[5],
        truncate_prompt_tokens=5,
        cache_salt="s",
        priority=3,
        min_tokens=1,
    )

    def record(self, params=PARAMS, prompt="abcdefgh"):
        return make(enable_prompt_embeds=True).process(
            "r",
            prompt,
            params,
            RequestOptions(
                1.5,
                cache_salt="t",
                deadline=2.0,
                first_token_deadline=1.75,
                tenant="someone",
                turn=4,
            ),
        )[0]

    def test_it_is_the_same_but_for_its_times(self):
        """The original deadlines would have passed."""
        recorded = self.record()
        found = make().renew(recorded, self.PARAMS, 100.0)
        set_options(recorded, arrival_time=100.0, deadline=None, first_token_deadline=None)
        assert found == recorded

    def test_a_seed_that_was_chosen_is_kept(self):
        params = SamplingParams()
        recorded = self.record(params)
        chosen = msgspec.structs.replace(recorded.sampling_params, seed=2**64 - 1, max_tokens=3)
        recorded = msgspec.structs.replace(recorded, sampling_params=chosen)
        assert make().renew(recorded, params, 2.0).sampling_params == chosen

    def test_embeddings(self):
        recorded = self.record(SamplingParams(), embeds(3, 4))
        assert recorded.prompt_embeds is not None
        renew = make(enable_prompt_embeds=True).renew
        assert renew(recorded, SamplingParams(), 2.0).prompt_embeds == recorded.prompt_embeds
        short = msgspec.structs.replace(recorded, prompt_token_ids=[0, 0])
        with pytest.raises(RequestError, match="more than the prompt"):
            renew(short, SamplingParams(), 2.0)
        other = make(spec=Spec(embed_size=8), enable_prompt_embeds=True)
        with pytest.raises(RequestError, match="embeddings of 4 numbers"):
            other.renew(recorded, SamplingParams(), 2.0)
        with pytest.raises(RequestError, match="enable"):
            make().renew(recorded, SamplingParams(), 2.0)

    @pytest.mark.parametrize("ids", [[300], [-1], [97] * 40, []])
    def test_what_this_model_cannot_take_is_refused(self, ids):
        recorded = msgspec.structs.replace(self.record(), prompt_token_ids=ids)
        with pytest.raises(RequestError, match="prompt"):
            make().renew(recorded, self.PARAMS, 2.0)
        small = make(spec=Spec(vocab_size=4), tokenizer=None)
        with pytest.raises(RequestError, match="out of vocabulary"):
            small.renew(self.record(), SamplingParams(logit_bias={5: 1.0}), 2.0)


def test_a_prompt_may_name_its_scope():
    def salt(prompt, **fields):
        params = SamplingParams(**fields)
        return make().process("r", prompt, params, RequestOptions(0.0))[0].options.cache_salt

    own = salt("a", cache_salt="mine")
    assert salt({"prompt": "a", "cache_salt": "mine"}) == own
    assert salt({"prompt_token_ids": [1], "cache_salt": "mine"}) == own
    assert salt({"prompt": "a", "cache_salt": "mine"}, cache_salt="mine") == own
    assert salt({"prompt": "a", "cache_salt": None}) is None
    for prompt in ({"prompt": "a", "cache_salt": 5}, {"prompt": "a", "cache_salt": "x" * 1025}):
        with pytest.raises(RequestError, match="cache_salt"):
            salt(prompt)
    with pytest.raises(RequestError, match="differ; set only one"):
        salt({"prompt": "a", "cache_salt": "mine"}, cache_salt="other")


def test_additional_properties_are_a_setting():
    wanted = StructuredOutputsParams(json={})
    for allowed in (False, True):
        processor = make(allow_additional_properties=allowed)
        grammar = params_of(structured_outputs=wanted, processor=processor).grammar
        assert grammar == GrammarSpec("json", "{}", additional_properties=allowed)
