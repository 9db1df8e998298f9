"""SamplingParams: accepted and rejected values, and their wire format."""

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import RequestError, UnsupportedError
from octavo.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_EXTRA_ARGS_NBYTES,
    MAX_GRAMMAR_DEPTH,
    MAX_GRAMMAR_NBYTES,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    fill_defaults,
)

HUGE = 10**5000  # more digits than Python turns into text
NAN, INF = math.nan, math.inf


def refused(**fields):
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    return error.value


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.repetition_penalty, params.seed) == (0.0, 1.0, None)
    assert (params.max_tokens, params.min_tokens) == (16, 0)
    assert (params.stop, params.stop_token_ids, params.logprobs) == ([], [], None)
    assert (params.detokenize, params.skip_special_tokens, params.ignore_eos) == (True, True, False)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert not params.greedy


GOOD = [
    ("n", [1, 1024, np.int64(3)]),
    ("presence_penalty", [-2, 2.0, np.float32(0.5)]),
    ("frequency_penalty", [-2.0, 2]),
    ("repetition_penalty", [1e-3, 1, 1000.0]),
    ("temperature", [0, 0.7, 100, np.float64(1.5)]),
    ("top_p", [1e-6, 1]),
    ("top_k", [-1, 0, 1, 2**62]),
    ("min_p", [0, 1]),
    ("seed", [None, 0, -(2**63), 2**64 - 1, np.uint64(5)]),
    ("max_tokens", [None, 1, 2**62]),
    ("min_tokens", [0, 16]),
    ("logprobs", [None, -1, 0, 5, True, False]),
    ("prompt_logprobs", [None, -1, 0, 5, True]),
    ("truncate_prompt_tokens", [None, -1, 5]),
    ("truncation_side", ["left", "right"]),
    ("priority", [-5, 5]),
    ("stop", [None, "a", ["a", "b"], ("a",), []]),
    ("stop_token_ids", [None, [0, 5], (1,), [np.int64(3)]]),
    ("allowed_token_ids", [None, [0], [1, 1]]),
    ("bad_words", [None, [], ["x", "y z"]]),
    ("logit_bias", [None, {}, {5: 1, "6": -100.0}, {np.int64(2): np.float32(1)}]),
    ("ignore_eos", [True]),
    ("detokenize", [False]),
    ("skip_special_tokens", [False]),
    ("spaces_between_special_tokens", [False]),
    ("include_stop_str_in_output", [True]),
    ("cache_salt", [None, "salt"]),
    ("output_kind", [*RequestOutputKind, 1]),
    ("structured_outputs", [None, StructuredOutputsParams(regex="a")]),
    ("guided_decoding", [None, GuidedDecodingParams(regex="a")]),
    ("extra_args", [None, {}, {"a": 1, "b": [0.5, "x"], "c": {"d": None}}]),
    ("watermarking", [None, False]),
    ("prompt_logprob_token_ids", [None]),
    ("prompt_logprob_start", [None, 0]),
    ("preserved_token_ids", [None, [], [5], (1, 2)]),
    ("logprob_token_ids", [None, [], [5], (1, 2), [np.int64(3)], list(range(128))]),
    ("flat_logprobs", [True, False]),
    ("stream_interval", [None, 1]),
    ("skip_clone", [True]),
    ("skip_reading_prefix_cache", [None, False]),
    ("thinking_token_budget", [None, -1, 0, 100]),
    ("repetition_guard", [None, "off", "report", "stop", "close_thinking"]),
    ("reasoning_markers", [None, ("<think>", "</think>"), ["a", " b "]]),
    ("repetition_detection", [None]),
    ("routed_experts_prompt_start", [0]),
    ("trace_decode_token_ids", [None]),
]
BAD = [
    ("n", [0, -1, 1025, 1.5, "1", None, True, HUGE]),
    ("presence_penalty", [-2.1, 2.1, NAN, INF, "0", None, False]),
    ("frequency_penalty", [-2.1, 2.1, NAN, [0.0]]),
    ("repetition_penalty", [0, -1.0, NAN, INF, 1001, None]),
    ("temperature", [-0.1, 100.1, NAN, INF, -INF, "hot", None, True, HUGE]),
    ("top_p", [0, -0.1, 1.1, NAN, None, "1"]),
    ("top_k", [-2, 1.0, None, "5", 2**63, HUGE]),
    ("min_p", [-0.1, 1.1, NAN, None]),
    ("seed", [-(2**63) - 1, 2**64, 1.0, "1", True, HUGE, NAN]),
    ("max_tokens", [0, -1, 1.0, "1", True, 2**63]),
    ("min_tokens", [-1, None, 1.0]),
    ("logprobs", [-2, 1.0, "1"]),
    ("prompt_logprobs", [-2, 1.0]),
    ("truncate_prompt_tokens", [0, -2, 1.5]),
    ("truncation_side", ["middle", "", None, 1]),
    ("priority", [2**31, None, 0.5]),
    ("stop", ["", [""], ["a", 5], 5, {"a": 1}, [None]]),
    ("stop_token_ids", [5, "12", [-1], [1.0], [True], [2**31], [None], {1: 2}]),
    ("allowed_token_ids", [[], 5, "5", [-1], ["5"]]),
    ("bad_words", ["text", 5, [""], [5]]),
    (
        "logit_bias",
        [[1, 2], "x", 5, {-1: 1.0}, {"a": 1.0}, {"1.5": 1.0}, {1.5: 1.0}, {True: 1.0}, {1: 100.5},
         {1: NAN}, {1: "1"}, {1: None}, {2**31: 1.0}, {"9" * 5000: 1.0}, {HUGE: 1.0}],
    ),
    ("ignore_eos", [1, None, "true"]),
    ("detokenize", [0]),
    ("skip_special_tokens", [None]),
    ("spaces_between_special_tokens", ["no"]),
    ("include_stop_str_in_output", [2]),
    ("cache_salt", ["", 5]),
    ("output_kind", [3, "delta", None, 1.5]),
    ("structured_outputs", [{"regex": "a"}, "a", 5, {}]),
    ("guided_decoding", [{"regex": "a"}, "a", 5]),
    ("extra_args", [[1], "x", 5, {1: 2}, {"a": object()}, {"a": HUGE}, {"a": "\ud800"}]),
    ("watermarking", [True, "no"]),
    ("prompt_logprob_token_ids", [[[1]], np.zeros((2, 2), np.int64)]),
    ("prompt_logprob_start", [5]),
    ("preserved_token_ids", [5, "5", [-1], [1.0], list(range(257))]),
    ("logprob_token_ids", [5, "5", [-1], [1.0], [True], [2**31], [None], list(range(129))]),
    ("flat_logprobs", [1, None]),
    ("stream_interval", [2, 0]),
    ("skip_clone", ["yes"]),
    ("skip_reading_prefix_cache", [True]),
    ("thinking_token_budget", [-2, 1.5, "5", True, 2**63]),
    ("repetition_guard", ["kill", 1, True, ["stop"]]),
    ("reasoning_markers", ["<think>", ("a",), ("a", ""), ("a", " "), (1, 2), ("a", "b" * 257)]),
    ("repetition_detection", [{"min_count": 2}]),
    ("routed_experts_prompt_start", [1]),
    ("trace_decode_token_ids", [[5], HUGE]),
]  # fmt: skip


def cases(table):
    """Return a test for each value; values may be too long for a test's name."""
    return pytest.mark.parametrize(
        ("field", "value"),
        [pytest.param(f, v, id=f"{f}-{i}") for f, values in table for i, v in enumerate(values)],
    )


@cases(GOOD)
def test_accepts(field, value):
    SamplingParams(**{field: value})


@cases(BAD)
def test_refuses_and_names_the_field(field, value):
    error = refused(**{field: value})
    assert error.param == field
    assert field in error.message
    assert error.status == 400
    assert len(error.message) < 400


def test_every_field_is_tested():
    fields = {f.name for f in msgspec.structs.fields(SamplingParams)}
    assert fields == {f for f, _ in GOOD} == {f for f, _ in BAD}


def test_contradictions():
    assert refused(min_tokens=17).param == "min_tokens"
    assert refused(min_tokens=5, max_tokens=4).param == "min_tokens"
    assert refused(stop="x", detokenize=False).param == "stop"
    SamplingParams(min_tokens=17, max_tokens=None)


def test_positional_arguments_come_in_vllms_order():
    params = SamplingParams(2, 0.1, 0.2, 1.5, 0.7, None, 0.9, 40, 0.05, 7, "x", [5], True, 9, 3)
    assert params == SamplingParams(
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.5,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=7,
        stop=["x"],
        stop_token_ids=[5],
        ignore_eos=True,
        max_tokens=9,
        min_tokens=3,
    )
    grammar = StructuredOutputsParams(None, None, ["a", "b"])
    assert grammar.kind == "choice"


def test_from_optional_takes_none_as_the_default():
    given = dict.fromkeys(f.name for f in msgspec.structs.fields(SamplingParams))
    assert SamplingParams.from_optional(**given) == SamplingParams(max_tokens=None)
    assert SamplingParams.from_optional() == SamplingParams()
    biased = SamplingParams.from_optional(logit_bias={"5": 500, 6: -500.0, 7: 1})
    assert biased.logit_bias == {5: 100.0, 6: -100.0, 7: 1.0}
    for bias in ({"x": 1}, {5: "1"}, [5], {5: NAN}):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams.from_optional(logit_bias=bias)
    with pytest.raises(RequestError, match="top_p"):
        SamplingParams.from_optional(top_p=5)


def test_a_clone_shares_nothing():
    params = SamplingParams(
        stop=["a"],
        logit_bias={5: 1.0},
        extra_args={"a": [1]},
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
    )
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[6] = 2.0
    clone.extra_args["a"].append(2)
    clone.structured_outputs.choice.append("c")
    assert params.stop == ["a"]
    assert params.logit_bias == {5: 1.0}
    assert params.extra_args == {"a": [1]}
    assert params.structured_outputs.choice == ["a", "b"]


def test_unknown_name():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_values_are_brought_to_one_form():
    params = SamplingParams(
        stop="x",
        top_k=-1,
        logprobs=True,
        prompt_logprobs=False,
        temperature=1,
        seed=np.int64(7),
        logit_bias={"5": 1, np.int64(6): 2},
        stop_token_ids=(1, np.int32(2)),
        output_kind=1,
    )
    assert params.stop == ["x"]
    assert (params.top_k, params.logprobs, params.prompt_logprobs) == (0, 1, None)
    assert type(params.temperature) is float
    assert type(params.seed) is int
    assert params.logit_bias == {5: 1.0, 6: 2.0}
    assert params.stop_token_ids == [1, 2]
    assert all(type(t) is int for t in params.stop_token_ids)
    assert params.output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-4, False)])
def test_greedy(temperature, greedy):
    params = SamplingParams(temperature=temperature)
    assert params.greedy is greedy
    assert (params.temperature == 0.0) is greedy


def test_lists_are_not_shared():
    first, second = SamplingParams(), SamplingParams()
    first.stop_token_ids.append(5)
    assert second.stop_token_ids == []


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("stop", ["x" * MAX_STOP_LENGTH] * MAX_STOP_STRINGS),
        ("stop_token_ids", [0] * MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", [5] * MAX_ALLOWED_TOKEN_IDS),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)),
        ("bad_words", ["x" * MAX_BAD_WORD_LENGTH] * MAX_BAD_WORDS),
    ],
)
def test_sizes_are_bounded(name, most):
    assert getattr(SamplingParams(**{name: most}), name) == most
    more = most | {2**20: 1.0} if isinstance(most, dict) else [*most, most[0]]
    with pytest.raises(RequestError, match=f"at most {len(most)} ") as error:
        SamplingParams(**{name: more})
    assert error.value.param == name


@pytest.mark.parametrize(
    ("name", "longest"), [("stop", MAX_STOP_LENGTH), ("bad_words", MAX_BAD_WORD_LENGTH)]
)
def test_lengths_are_bounded(name, longest):
    with pytest.raises(RequestError, match=f"at most {longest} ") as error:
        SamplingParams(**{name: ["x", "y" * (longest + 1)]})
    assert error.value.param == name


def test_extra_args_are_bounded():
    most = {"a": "x" * (MAX_EXTRA_ARGS_NBYTES - 6)}
    assert SamplingParams(extra_args=most).extra_args == most
    error = refused(extra_args={"a": "x" * (MAX_EXTRA_ARGS_NBYTES - 5)})
    assert f"at most {MAX_EXTRA_ARGS_NBYTES} " in error.message
    assert error.param == "extra_args"
    endless = []
    endless.append(endless)
    assert refused(extra_args={"a": endless}).param == "extra_args"


def test_extra_args_are_plain_data_of_their_own():
    given = {"a": [1, (2, 3)]}
    params = SamplingParams(extra_args=given)
    given["a"].append(4)
    assert params.extra_args == {"a": [1, [2, 3]]}


token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(1, 1024),
            "temperature": st.floats(0, 100),
            "top_p": st.floats(1e-9, 1),
            "top_k": st.integers(-1, 2**40),
            "min_p": st.floats(0, 1),
            "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
            "stop": st.lists(st.text(min_size=1), max_size=3),
            "max_tokens": st.none() | st.integers(1, 2**62),
            "logprobs": st.none() | st.integers(-1, 50),
            "logit_bias": st.none()
            | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
            "stop_token_ids": token_ids,
            "bad_words": st.none() | st.lists(st.text(min_size=1, max_size=64), max_size=3),
            "output_kind": st.sampled_from(RequestOutputKind),
            "cache_salt": st.none() | st.text(min_size=1),
            "ignore_eos": st.booleans(),
            "extra_args": st.none()
            | st.dictionaries(st.text(), st.integers(-(2**63), 2**64 - 1) | st.text()),
        },
    )
)
def test_round_trip(fields):
    params = SamplingParams(**fields)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again == params
    assert type(again.output_kind) is RequestOutputKind


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=np.int64(-1)).seed is None
    assert SamplingParams(seed=-2).seed == -2
    with pytest.raises(RequestError, match="seed"):
        SamplingParams(seed=-1.0)


def test_decoding_checks_too():
    data = msgspec.msgpack.encode({"temperature": -1.0})
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(data, type=SamplingParams)


def nested(depth):
    schema = {}
    for _ in range(depth - 1):
        schema = {"a": schema}
    return schema


ENDLESS = {}
ENDLESS["a"] = ENDLESS
WANTED = [
    ("json", {"type": "object"}, '{"type":"object"}'),
    ("json", ' {"b": 1, "a": [1.50, "\\u00e9"], "b": 2}', '{"b":2,"a":[1.5,"é"]}'),
    ("json", {"const": 10**30}, '{"const":1000000000000000000000000000000}'),
    ("json", True, "true"),
    ("json", "false", "false"),
    ("json", nested(MAX_GRAMMAR_DEPTH), None),
    ("json", {"a": "é" * (MAX_GRAMMAR_NBYTES // 2 - 4)}, None),
    ("regex", "a+", "a+"),
    ("regex", "é" * (MAX_GRAMMAR_NBYTES // 2), None),
    ("choice", ["a", "b", "a"], ["a", "b"]),
    ("choice", ("a",), ["a"]),
    ("choice", [str(i) for i in range(MAX_CHOICES)], None),
    ("grammar", 'root ::= "x"', 'root ::= "x"'),
    ("json_object", True, True),
    ("structural_tag", {"type": "structural_tag"}, '{"type":"structural_tag"}'),
    ("structural_tag", '{ "type": "structural_tag" }', '{"type":"structural_tag"}'),
]
UNWANTED = [
    ("json", [5, "5", "[1]", [1], "{", "", "{} {}", '{"a": NaN}', '{"a": 1e999}', {"a": math.nan}]),
    ("json", [{"a": INF}, {1: 2}, {"a": [{None: 1}]}, {"a": object()}, dict, object(), ENDLESS]),
    ("json", [nested(MAX_GRAMMAR_DEPTH + 1), nested(5000), "[" * 10**6, '{"a":' * 10**5]),
    ("json", [{"a": "x" * MAX_GRAMMAR_NBYTES}, "x" * 10**7, {"a": "\ud800"}, '{"a":"\\ud800"}']),
    ("json", [{"a": HUGE}, '{"a": ' + "9" * 5000 + "}"]),
    ("regex", ["", 5, ["a"], "\ud800", "x" * (MAX_GRAMMAR_NBYTES + 1), "é" * 2**18 + "x"]),
    ("choice", [[], "ab", [5], ["a", None], {"a": 1}, [""], ["\ud800"], ["x"] * 100_000]),
    ("choice", [["a"] * (MAX_CHOICES + 1), ["x" * MAX_GRAMMAR_NBYTES, "y"]]),
    ("grammar", ["", {}, 5, "\ud800"]),
    ("json_object", [1, "true", None]),
    ("structural_tag", [True, "[]", "x", 5, nested(MAX_GRAMMAR_DEPTH + 1)]),
]


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [pytest.param(*case, id=f"{case[0]}-{i}") for i, case in enumerate(WANTED)],
)
def test_structured_outputs(kind, value, kept):
    wanted = StructuredOutputsParams(**{kind: value})
    assert wanted.kind == kind
    if kept is not None:
        assert getattr(wanted, kind) == kept
    elif kind == "json":
        assert json.loads(wanted.json) == value
    else:
        assert getattr(wanted, kind) == value
    # A copy, such as by `msgspec.structs.replace`, is equal.
    assert msgspec.structs.replace(wanted) == wanted
    assert msgspec.convert(msgspec.to_builtins(wanted), StructuredOutputsParams) == wanted


@cases(UNWANTED)
def test_structured_outputs_that_nobody_can_follow(field, value):
    with pytest.raises(RequestError) as error:
        StructuredOutputsParams(**{field: value})
    assert error.value.param == field
    assert error.value.message.startswith(field)
    assert len(error.value.message) < 400


def test_structured_outputs_name_one_thing():
    for fields, param in [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"disable_any_whitespace": True}, "structured_outputs"),
        ({"json": False, "json_object": True}, "json_object"),
        ({"regex": "", "choice": []}, "choice"),
    ]:
        with pytest.raises(RequestError) as error:
            StructuredOutputsParams(**fields)
        assert error.value.param == param


def test_settings_of_structured_outputs():
    for name, kept in [("guidance", "llguidance"), ("xgrammar", "xgrammar"), ("auto", "auto")]:
        assert StructuredOutputsParams(regex="a", backend=name).backend == kept
    for name, value in [
        *(("backend", value) for value in ("outlines", "", None, 5, [])),
        *(("disable_any_whitespace", value) for value in (None, 1, "yes")),
        *(("strict", value) for value in (None, 1, "yes")),
    ]:
        with pytest.raises(RequestError) as error:
            StructuredOutputsParams(**{"json": {}, name: value})
        assert error.value.param == name
    for name, value in [
        ("whitespace_pattern", " ?"),
        ("whitespace_pattern", ""),
        ("disable_additional_properties", True),
        ("disable_additional_properties", None),
    ]:
        with pytest.raises(UnsupportedError) as error:
            StructuredOutputsParams(**{"json": {}, name: value})
        assert error.value.param == name


def test_a_backend_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"^backend='guidance' needs the package") as error:
        StructuredOutputsParams(regex="a", backend="guidance")
    assert error.value.param == "backend"
    StructuredOutputsParams(regex="a")


def test_guided_decoding_is_the_older_name():
    wanted = GuidedDecodingParams(choice=["a", "b"])
    params = SamplingParams(guided_decoding=wanted)
    assert params.structured_outputs is wanted
    assert params.guided_decoding is None
    assert params == SamplingParams(structured_outputs=wanted)
    assert msgspec.structs.replace(params, n=2).structured_outputs == wanted
    error = refused(guided_decoding=wanted, structured_outputs=wanted)
    assert error.param == "guided_decoding"


def test_certain_logprobs_and_their_number():
    """The rule is vLLM's: the ids determine the number, and `logprobs` may only repeat it."""
    assert SamplingParams(logprobs=3).num_logprobs == 3
    assert SamplingParams().num_logprobs is None
    assert SamplingParams(logprob_token_ids=[5, 6]).num_logprobs == 2
    assert SamplingParams(logprob_token_ids=[5, 6], logprobs=2).num_logprobs == 2
    empty = SamplingParams(logprob_token_ids=[], logprobs=2)
    assert (empty.logprob_token_ids, empty.num_logprobs) == (None, 2)
    for number in (0, 1, 3, -1):
        with pytest.raises(RequestError, match="leave logprobs out"):
            SamplingParams(logprob_token_ids=[5, 6], logprobs=number)


def test_all_wrong_entries_of_a_logit_bias_are_named():
    wrong = {"bad1": 1.0, 5: 2.0, "bad2": 3.0, 6: "x"}
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias=wrong)
    assert caught.value.message == (
        "logit_bias has 'bad1': 1.0, 'bad2': 3.0, 6: 'x'; it maps token ids to numbers."
    )
    with pytest.raises(RequestError, match=r"2: 'x' and 7 more; it maps"):
        SamplingParams(logit_bias=dict.fromkeys(range(10), "x"))


def test_defaults_of_a_model():
    rules = {"top_k": 5, "min_tokens": 54, "extra_args": {"no_repeat_ngram_size": 3}}
    assert fill_defaults({}, rules) == rules
    # A model's least number of tokens never refuses a request.
    assert fill_defaults({"max_tokens": 16}, rules)["min_tokens"] == 16
    assert fill_defaults({"max_tokens": 16, "min_tokens": 0}, rules)["min_tokens"] == 0
    found = fill_defaults({"extra_args": {"a": 1, "no_repeat_ngram_size": 0}}, rules)
    assert found["extra_args"] == {"a": 1, "no_repeat_ngram_size": 0}
    # A grammar may allow a short answer only.
    grammar = StructuredOutputsParams(choice=["yes", "no"])
    found = fill_defaults({"structured_outputs": grammar, "extra_args": {"a": 1}}, rules)
    assert found == {"structured_outputs": grammar, "extra_args": {"a": 1}, "top_k": 5}
    assert "min_tokens" not in fill_defaults({"max_tokens": 9}, {})
