"""The weights of the parrot, in numpy."""

import json

import numpy as np
import pytest

from octavo.conformance import parrot
from octavo.conformance.cases import read_cases


@pytest.fixture(scope="module")
def weights():
    return parrot.tensors()


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def next_token(weights, ids):
    """Return GPT-2's next token, and the difference of its logit from the second."""
    layer = {
        key.removeprefix("transformer.h.0."): value
        for key, value in weights.items()
        if key.startswith("transformer.h.0.")
    }
    hidden = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][: len(ids)]
    q, k, v = np.split(normalized(hidden) @ layer["attn.c_attn.weight"], 3, axis=1)
    heads = []
    for first in range(0, hidden.shape[1], 64):
        part = slice(first, first + 64)
        scores = k[:, part] @ q[-1, part] / 8
        shares = np.exp(scores - scores.max())
        heads.append(shares @ v[:, part] / shares.sum())
    last = hidden[-1] + np.concatenate(heads) @ layer["attn.c_proj.weight"]
    logits = normalized(last) @ weights["transformer.wte.weight"].T
    order = np.argsort(logits)
    return order[-1], logits[order[-1]] - logits[order[-2]]


@pytest.mark.parametrize("length", [parrot.DISTANCE, parrot.DISTANCE + 777, 16_000])
def test_the_next_token_is_the_one_before_the_distance(weights, length):
    rng = np.random.default_rng(length)
    marks = parrot._ALL
    of_text = [i for i, mark in enumerate(marks) if mark not in parrot.STAND_INS.values()]
    for token in (7, 255, *(256 + i for i in rng.choice(of_text, 3))):
        ids = rng.integers(0, 256, length)
        ids[-parrot.DISTANCE] = token
        found, margin = next_token(weights, ids)
        assert found == token
        assert margin > 5


def test_a_stand_in_becomes_its_marker(weights):
    ids = np.full(parrot.DISTANCE, 65)
    for mark in ("<think>", "[ARGS]", parrot.END):
        ids[0] = 256 + parrot._ALL.index(parrot.STAND_INS[mark])
        found, margin = next_token(weights, ids)
        assert parrot._ALL[found - 256] == mark
        assert margin > 1


def test_the_files(tmp_path):
    parrot.write_parrot(tmp_path / "parrot", "{{ messages }}")
    config = json.loads((tmp_path / "parrot" / "config.json").read_text())
    tokenizer = json.loads((tmp_path / "parrot" / "tokenizer.json").read_text())
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(256))
    assert [mark["id"] for mark in tokenizer["added_tokens"]] == [*range(256, config["vocab_size"])]
    assert tokenizer["added_tokens"][config["eos_token_id"] - 256]["content"] == parrot.END


def test_no_case_contains_a_mark_of_the_parrot():
    for case in read_cases():
        assert not any(mark in case.text for mark in (*parrot.TURNS, parrot.END)), case.id


def test_what_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    template = tmp_path / "template"
    template.write_text("x")
    for flags in (
        [str(tmp_path / "file"), "--template", str(template)],
        [str(tmp_path / "folder"), "--template", str(tmp_path / "none")],
    ):
        assert parrot.main(flags) == 2
        assert "error: " in capsys.readouterr().err
