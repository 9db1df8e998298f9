"""The file of cases, and Octavo's parser on all of them."""

import time
from collections import Counter

import pytest

from octavo.conformance.cases import FILE, read_cases
from octavo.conformance.laws import SUBJECTS, Answer, FoundCall, judge
from octavo.parsers.answer import AnswerParser
from octavo.parsers.detect import schemas_of
from octavo.parsers.formats import FORMATS
from octavo.parsers.parts import CallArguments, CallStart, Reasoning
from tests.conformance.make_cases import encode, make

CASES = read_cases()


def parse(case, pieces):
    """Return the parts that Octavo's parser makes of pieces of text."""
    parser = AnswerParser(FORMATS[case.format], schemas_of(case.tools))
    return [part for piece in pieces for part in parser.feed(piece)] + parser.end()


def answer(case, pieces, finish_reason=None):
    """Return the answer that Octavo's parser makes of pieces of text."""
    found = Answer()
    for part in parse(case, pieces):
        if isinstance(part, CallStart):
            found.calls.append(FoundCall(f"call{len(found.calls)}", part.text))
        elif isinstance(part, CallArguments):
            found.calls[-1].arguments += part.text
        elif isinstance(part, Reasoning):
            found.reasoning += part.text
        else:
            found.content += part.text
    found.finish_reason = finish_reason or ("tool_calls" if found.calls else "stop")
    return found


def test_the_file_is_up_to_date():
    assert FILE.read_bytes() == encode(make())


def test_there_is_enough_of_everything():
    of_format = Counter(case.format for case in CASES)
    assert len(of_format) >= 16
    assert min(of_format.values()) >= 15
    assert len({case.id for case in CASES}) == len(CASES)
    assert {case.subject for case in CASES} == {None, *SUBJECTS}
    for case in CASES:
        assert case.id.startswith(f"{case.format}/")
        for call in case.calls:
            assert call.text is None or call.text in case.text


@pytest.mark.parametrize("name", sorted({case.format for case in CASES}))
def test_octavo_keeps_the_laws(name):
    for case in CASES:
        if case.format == name:
            case = case.filled(300) if case.is_long else case
            result = judge(case, answer(case, [case.text]), answer(case, case.text))
            assert not result.broken, case.id


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4", "pythonic"])
def test_a_megabyte_costs_linear_time(name):
    case = next(case for case in CASES if case.id == f"{name}/long")
    for _ in range(5):  # the processor's speed may change between the two
        seconds = []
        for size in (250_000, 1_000_000):
            text = case.filled(size).text
            pieces = [text[i : i + 64] for i in range(0, len(text), 64)]
            begin = time.process_time()
            parts = parse(case, pieces)
            seconds.append(time.process_time() - begin)
            assert sum(len(part.text) for part in parts if isinstance(part, CallArguments)) > size
        if seconds[1] < 8 * seconds[0] + 0.1:
            return
    raise AssertionError(seconds)


def test_a_long_text_has_its_size():
    case = next(case for case in CASES if case.id == "hermes/long")
    for size in (8, 13, 100):
        filled = case.filled(size)
        assert len(filled.calls[0].arguments["query"]) == size
        assert not filled.is_long
        assert filled.calls[0].text in filled.text
