"""Events of output items: the quick way and the general way make the same bytes."""

from itertools import count

import msgspec
import pytest

from octavo.parsers.parts import CallArguments, CallStart, Reasoning, Text
from octavo.server.response_output import OutputItems, write_event

PARTS = [
    *(Reasoning("Hm"), Reasoning(' 100% "sure" %d\n'), Text("é 😀 %b"), Text(""), Text("\x00")),
    *(CallStart("find"), CallArguments('{"a": '), CallArguments("1}"), CallStart("now")),
    *(CallArguments("{}"), Text("."), Reasoning("?"), Reasoning("!")),
]


def items():
    return OutputItems(lambda kind: f"{kind}_1", lambda start: f"call_{start.text}", {})


@pytest.mark.parametrize("end", range(1, len(PARTS) + 1))
def test_a_part_that_continues_an_item(end):
    slow, quick, numbers = items(), items(), count()
    for part in PARTS[:end]:
        events = slow.add(part)
        written = [
            write_event(event, number) for event, number in zip(events, numbers, strict=False)
        ]
        template = quick.grow(part)
        if template is None:
            assert quick.add(part) == events
            assert len(events) > 1
        else:
            number = msgspec.json.decode(written[0].split(b"data: ")[1])["sequence_number"]
            assert [template % (number, msgspec.json.encode(part.text))] == written
        assert quick.whole() == slow.whole()
    assert quick.end() == slow.end()
    assert quick.grow(Text("after the end")) is None
