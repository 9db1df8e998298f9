"""Forms of prompts."""

import pytest

from octavo.frontend.prompts import processing_time
from octavo.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("prompt", "fields", "microseconds"),
    [
        ("x" * 1000, {}, 1000),
        ({"prompt": "x" * 1000}, {}, 1000),
        ([5] * 1000, {}, 500),
        ({"prompt_token_ids": [5]}, {}, 0),
        ("", {"bad_words": ["x" * 60] * 10}, 600),
        ("", {"stop_token_ids": [5] * 1000}, 500),
        ("", {"allowed_token_ids": [5] * 1000}, 500),
        ("", {"logit_bias": dict.fromkeys(range(1000), 1.0)}, 500),
    ],
)
def test_how_long_it_takes_is_known_before(prompt, fields, microseconds):
    """Long work is done on a thread; a factor of two does not matter, one of ten would."""
    found = processing_time(prompt, SamplingParams(**fields))
    assert microseconds / 2 <= found <= 2 * microseconds + len(prompt) + 1
