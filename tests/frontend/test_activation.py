"""Begin of an activated LoRA in a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.frontend.activation import activate, last_occurrence
from octavo.messages import AdapterRef, RequestOptions

tokens = st.lists(st.integers(0, 2), max_size=12)


@given(tokens, st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_the_last_occurrence_is_found(prompt, part):
    found = [i for i in range(len(prompt)) if prompt[i : i + len(part)] == part]
    assert last_occurrence(prompt, part) == (found[-1] if found else None)


def test_the_options_of_a_request():
    plain = AdapterRef("a", "/x", "content")
    activated = AdapterRef("a", "/x", "content", (5, 6))
    without = RequestOptions(1.0, priority=3)
    for options in (without, RequestOptions(1.0, priority=3, adapter=plain)):
        assert activate(options, [5, 6]) is options
        assert activate(options, None) is options
    options = RequestOptions(1.0, priority=3, adapter=activated)
    begun = activate(options, [5, 6, 5, 6, 5])
    assert (begun.adapter, begun.adapter_begin, begun.priority) == (activated, 2, 3)
    assert activate(options, [5, 7]) == without
    with pytest.raises(RequestError, match="prompt_embeds has no tokens"):
        activate(options, None)
