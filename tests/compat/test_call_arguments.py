"""Arguments of vLLM's calls that have no counterpart here."""

import pytest

from octavo.compat.call_arguments import refuse_unsupported
from octavo.errors import UnsupportedError


def test_arguments_that_request_nothing_pass():
    refuse_unsupported(chat_template_content_format="auto")
    refuse_unsupported(data_parallel_rank=[None, None], chat_template_content_format={})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("data_parallel_rank", [None, 5], "least load"),
        ("data_parallel_rank", 0, "least load"),
        ("chat_template_content_format", "openai", "leave it out"),
    ],
)
def test_others_are_rejected_with_a_remedy(name, value, remedy):
    with pytest.raises(
        UnsupportedError, match=f"^{name}=.* is not supported: .*{remedy}"
    ) as raised:
        refuse_unsupported(**{name: value})
    assert raised.value.param == name
