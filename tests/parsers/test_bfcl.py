"""Calls of the Berkeley Function Calling Leaderboard, as each format writes them."""

import json
import random
from pathlib import Path

import pytest

from octavo.parsers.formats import FORMATS
from tests.parsers.test_laws import parse
from tests.parsers.writers import write

DATA = Path(__file__).parents[3] / "shared" / "data" / "tool_calls"
KINDS = ["simple_python", "multiple", "parallel", "parallel_multiple"]
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None, "list": "array"}

pytestmark = pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data/tool_calls")


def schema_of(value):
    """Return a JSON schema for a description of BFCL, whose types are Python's."""
    if isinstance(value, dict):
        value = {k: schema_of(v) for k, v in value.items()}
        if isinstance(value.get("type"), str):
            kind = TYPES.get(value["type"], value["type"])
            value = {**value, "type": kind} if kind else {**value}
        return value
    return [schema_of(v) for v in value] if isinstance(value, list) else value


def cases(kind):
    """Yield (schemas, calls); each argument has the first value that is allowed."""
    answers = (DATA / f"answers_{kind}.json").read_text().splitlines()
    truths = {case["id"]: case["ground_truth"] for case in map(json.loads, answers)}
    for case in map(json.loads, (DATA / f"BFCL_v4_{kind}.json").read_text().splitlines()):
        functions = case["function"]
        schemas = {f["name"]: schema_of(f["parameters"]) for f in functions}
        calls = [
            (name, {key: first(values) for key, values in arguments.items() if values != [""]})
            for truth in truths[case["id"]]
            for name, arguments in truth.items()
        ]
        yield schemas, calls


def first(values):
    """Return an allowed value; in objects, each value is again a list of allowed ones."""
    value = values[0] if isinstance(values, list) and values else values
    if isinstance(value, dict):
        return {k: first(v) for k, v in value.items()}
    return value


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_call_is_parsed_whole_and_streamed(name):
    fmt, rng = FORMATS[name], random.Random(name)
    for kind in KINDS:
        for i, (schemas, calls) in enumerate(cases(kind)):
            if i % 4 != sorted(FORMATS).index(name) % 4:
                continue
            if fmt.name == "openai":
                calls = calls[:1]
            expected = [[*call] for call in calls]
            answer = write(fmt, None, "", calls)
            whole = parse(fmt, [answer], schemas)
            assert [[b[1], json.loads(b[2])] for b in whole] == expected, answer
            cuts = sorted(rng.choices(range(len(answer) + 1), k=len(answer) // 5))
            bounds = zip([0, *cuts], [*cuts, len(answer)], strict=True)
            assert parse(fmt, [answer[a:b] for a, b in bounds], schemas) == whole
