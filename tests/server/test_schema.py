"""What a body of millions of wrong entries costs: no more than one of them."""

import pytest
from pydantic import ValidationError

from octavo.errors import RequestError
from octavo.sampling_params import MAX_LOGIT_BIAS
from octavo.server.body import validate
from octavo.server.schema import MAX_PROMPTS, CompletionBody, DetokenizeBody


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "bad_words"])
def test_a_list_is_given_up_at_its_first_wrong_entry(name):
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": "x", name: [None] * 1000})
    assert caught.value.error_count() == 1
    with pytest.raises(RequestError) as refused:
        validate(CompletionBody, {"prompt": "x", name: [None] * 1000})
    assert refused.value.param == f"{name}[0]"


def test_tokens_to_detokenize():
    with pytest.raises(ValidationError) as caught:
        DetokenizeBody.model_validate({"tokens": [-1] * 1000})
    assert caught.value.error_count() == 1


def test_numbers_of_entries_are_bounded():
    bias = {str(i): "x" for i in range(MAX_LOGIT_BIAS + 1)}
    for name, body in (("logit_bias", {"logit_bias": bias}), ("prompt", {"prompt": ["x"] * 5000})):
        with pytest.raises(RequestError, match="at most") as refused:
            validate(CompletionBody, {"prompt": "x"} | body)
        assert refused.value.param == name
    assert len(validate(CompletionBody, {"prompt": [[1]] * MAX_PROMPTS}).prompt) == MAX_PROMPTS
