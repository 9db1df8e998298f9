import argparse
import json

import numpy as np
import pytest

from octavo import LLM
from octavo.errors import ConfigError, RequestError
from octavo.llm_pooling import PoolingMethods
from octavo.model_tools import embed
from tests.encoders import write_encoder

TEXTS = [f"text {i}" * (1 + i % 3) for i in range(10)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"id": i, "body": t}) for i, t in enumerate(TEXTS)))
    return file


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(embed, "_BATCH", 4)


def run(model, file, out, *flags):
    parser = argparse.ArgumentParser()
    embed.add_arguments(parser)
    words = [str(file), "--out", str(out), "--model", model, "--load-format", "dummy", *flags]
    return embed.run(parser.parse_args(words))


@pytest.fixture(scope="module")
def expected(model):
    with LLM(model, load_format="dummy") as llm:
        return np.array([o.outputs.embedding for o in llm.embed(TEXTS, use_tqdm=False)], np.float32)


def test_rows_and_objects_with_their_vectors(model, texts, tmp_path, expected):
    result = run(model, texts, tmp_path / "v.npy", "--field", "body")
    assert result == {"texts": 10, "continued": 0, "dimensions": 32}
    assert np.array_equal(np.load(tmp_path / "v.npy"), expected)
    run(model, texts, tmp_path / "v.jsonl", "--field", "body")
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [(line["id"], line["body"]) for line in lines] == list(enumerate(TEXTS))
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), expected)
    assert not list(tmp_path.glob("*.unfinished"))


def test_lines_of_text(model, tmp_path, expected):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS) + "\n\n")
    run(model, file, tmp_path / "v.npy")
    assert np.array_equal(np.load(tmp_path / "v.npy"), expected)


def test_an_interrupted_run_continues(model, texts, tmp_path, expected, monkeypatch):
    encode, calls = PoolingMethods.encode, []

    def interrupted(self, prompts, *args, **kwargs):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, prompts, *args, **kwargs)

    monkeypatch.setattr(PoolingMethods, "encode", interrupted)
    out = tmp_path / "v.npy"
    with pytest.raises(KeyboardInterrupt):
        run(model, texts, out, "--field", "body")
    assert not out.exists()
    with (tmp_path / "v.npy.unfinished").open("ab") as file:
        file.write(b"a part of a row")
    result = run(model, texts, out, "--field", "body")
    assert result["continued"] == 8
    assert calls == [4, 4, 2, 2]
    assert np.array_equal(np.load(out), expected)


def test_an_unfinished_file_of_other_settings(model, texts, tmp_path):
    (tmp_path / "v.npy.unfinished").write_bytes(b"x" * 40)
    with pytest.raises(ConfigError, match="other texts or settings"):
        run(model, texts, tmp_path / "v.npy", "--field", "body")


def test_a_long_text(model, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("a" * 70)
    with pytest.raises(RequestError, match="64 tokens"):
        run(model, file, tmp_path / "v.npy")
    (tmp_path / "v.npy.unfinished").unlink()
    for flag in ("--truncate", "--windows"):
        assert run(model, file, tmp_path / f"v{flag}.npy", flag)["texts"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no texts"),
        ('{"text": "a"}\n{"text": ""}', "line 2: it has no text in the field 'text'"),
        ('"a"\n{', "line 2: this is not JSON"),
        ("[1]", "line 1: it has no text"),
    ],
)
def test_bad_files(text, message, model, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(model, file, tmp_path / "v.npy")


def test_bad_outputs(model, texts, tmp_path):
    with pytest.raises(ConfigError, match=r"must end with \.jsonl"):
        run(model, texts, tmp_path / "v.csv")
    (tmp_path / "v.npy").write_text("")
    with pytest.raises(ConfigError, match="exists already"):
        run(model, texts, tmp_path / "v.npy")
