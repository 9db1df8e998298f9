"""Vectors of long texts, computed in parts, offline and through the asyncio engine."""

import asyncio

import numpy as np
import pytest

from octavo import LLM, AsyncLLM, PoolingParams
from octavo.config import EngineConfig
from octavo.errors import RequestError
from tests.encoders import write_encoder

LONG = "".join(chr(97 + i * i % 26) for i in range(150))
WINDOWS = PoolingParams(task="embed", windows=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, load_format="dummy") as llm:
        yield llm


def vectors(llm, texts, params):
    return [output.outputs.data for output in llm.encode(texts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(llm):
    """Vector of the long text: the context has room for 62 tokens beside the special ones."""
    parts = [LONG[:62], LONG[62:124], LONG[124:]]
    raw = vectors(llm, parts, PoolingParams(task="embed", use_activation=False))
    mean = sum(v * np.float32(len(p)) for v, p in zip(raw, parts, strict=True)) / np.float32(150)
    return mean / np.linalg.norm(mean)


def test_a_long_text_is_the_mean_of_its_parts(llm, expected):
    long, short = vectors(llm, [LONG, "short"], WINDOWS)
    np.testing.assert_allclose(long, expected, atol=1e-6)
    np.testing.assert_allclose(short, vectors(llm, "short", None)[0], atol=1e-7)
    (output,) = llm.encode(LONG, WINDOWS, use_tqdm=False)
    assert len(output.prompt_token_ids) == 150 + 3 * 2


def test_no_empty_step_while_texts_are_computed(llm, monkeypatch):
    core, sizes = llm.llm_engine.client.core, []
    execute = core.executor.execute

    def note(work):
        sizes.append(work.total_num_scheduled_tokens)
        return execute(work)

    monkeypatch.setattr(core.executor, "execute", note)
    for _ in range(3):
        vectors(llm, ["a b c", "d"], PoolingParams(task="embed"))
    assert len(sizes) == 3
    assert min(sizes) > 0


def test_through_the_asyncio_engine(model, llm):
    async def run():
        config = EngineConfig.from_kwargs(model=model, load_format="dummy")
        engine = await AsyncLLM.start(config)
        try:
            return [output async for output in engine.encode(LONG, WINDOWS, "long")]
        finally:
            await engine.shutdown()

    (output,) = asyncio.run(run())
    assert output.request_id == "long"
    assert np.array_equal(output.outputs.data, vectors(llm, LONG, WINDOWS)[0])


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([5, 6], {}, "windows is for the vectors of single texts"),
        ({"prompt": "a", "text_pair": "b"}, {}, "windows is for the vectors of single texts"),
        ("a", {"task": "token_embed"}, "windows is for the vectors of single texts"),
        ("a", {"truncate_prompt_tokens": 5}, "windows and truncate_prompt_tokens=5 contradict"),
        ("a", {"windows": 1}, "windows=1 is not true or false"),
    ],
)
def test_what_has_no_parts(prompt, params, message, llm):
    with pytest.raises(RequestError, match=message):
        llm.encode(
            [prompt], PoolingParams(**{"task": "embed", "windows": True} | params), use_tqdm=False
        )


PAIRS = "{% for m in messages %}{{ m.role[0] }}={{ m.content }};{% endfor %}"


def test_scores_of_pairs_in_a_template(tmp_path):
    heads = {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    folder = write_encoder(tmp_path, **heads)
    (tmp_path / "modules.json").unlink()
    with LLM(folder, load_format="dummy") as llm:

        def score(**options):
            outputs = llm.score("x", ["one", "two"], use_tqdm=False, **options)
            return [output.outputs.score for output in outputs]

        def probabilities(*texts):
            return [o.outputs.probs[0] for o in llm.classify(list(texts), use_tqdm=False)]

        assert score(chat_template=PAIRS) == probabilities("q=x;d=one;", "q=x;d=two;")
        found = score(chat_template=PAIRS, instruction="i")
        assert found == probabilities("s=i;q=x;d=one;", "s=i;q=x;d=two;")
        assert score() != score(chat_template=PAIRS)
        with pytest.raises(RequestError, match="no template with the roles"):
            score(instruction="i")


def test_an_instruction_for_vectors(llm):
    with pytest.raises(RequestError, match="is a model of vectors"):
        llm.score("a", "b", instruction="i", use_tqdm=False)
