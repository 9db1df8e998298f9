from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from training import train
from training.corpus import Corpus
from training.encoder import (
    PAD,
    Encoder,
    EncoderConfig,
    PairStream,
    Reranker,
    RivalStream,
    Words,
    contrastive_loss,
    export_encoder,
    load_encoder,
    make_wordpiece,
    ranking_loss,
    tokenizer_texts,
)
from training.encoder_card import KINDS
from training.loop import Plan
from training.pairs import Pairs
from training.retrieval import Quality
from training.teacher import Lessons

TINY = EncoderConfig(
    vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=256,
)  # fmt: skip
PLAN = Plan(steps=6, bfloat16=False)


@pytest.fixture(scope="module")
def words(corpus: Corpus) -> Tokenizer:
    return make_wordpiece(tokenizer_texts(corpus, 0), TINY.vocab_size)


@pytest.fixture
def stream(words: Tokenizer) -> PairStream:
    return PairStream(Pairs(), words, 0)


def test_the_tokenizer_is_berts(words: Tokenizer) -> None:
    assert words.get_vocab_size() == TINY.vocab_size
    once = words.encode("The CAT").tokens
    assert once == words.encode("the cat").tokens
    assert (once[0], once[-1]) == ("[CLS]", "[SEP]")
    pair = words.encode("the cat", "the dog")
    assert pair.tokens.count("[SEP]") == 2
    assert words.token_to_id("[PAD]") == PAD
    assert words.encode("\u4e2d").tokens[1] == "[UNK]"


def test_the_tokenizer_is_reproducible(corpus: Corpus, words: Tokenizer) -> None:
    assert make_wordpiece(tokenizer_texts(corpus, 0), 400).to_str() == words.to_str()


def test_pieces_are_joined_by_frequency() -> None:
    signs = 2 * len({chr(i).lower() for i in range(33, 127)}) + 5
    texts = ["abab abab abab abc abc abc cd cd cd"]
    words = make_wordpiece(texts, signs + 3)
    # "ab" occurs 6 times, "##ab" and "abab" 3 times: the alphabet decides, "#" before "a".
    assert [words.id_to_token(signs + i) for i in range(3)] == ["ab", "##ab", "abab"]
    assert words.encode("ababab cd").tokens[1:-1] == ["abab", "##ab", "c", "##d"]
    with pytest.raises(ValueError, match="give more text"):
        make_wordpiece(texts, signs + 9)


def test_padding_changes_nothing(stream: PairStream) -> None:
    torch.manual_seed(0)
    model = Encoder(TINY)
    tokens = stream.next()[0][:8, 1]
    with torch.no_grad():
        together = model(tokens)
        alone = torch.cat([model(row[row != PAD][None]) for row in tokens])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_a_batch_depends_on_its_number_only(stream: PairStream, words: Tokenizer) -> None:
    batches = [stream.next()[0] for _ in range(4)]
    again = PairStream(Pairs(), words, 0)
    again.state = 3
    assert torch.equal(again.next()[0], batches[3])
    assert not torch.equal(PairStream(Pairs(), words, 1).next()[0], batches[0])
    for tokens in batches:
        assert tokens.shape[1] == 2
        assert (tokens[..., 0] == words.token_to_id("[CLS]")).all()


def test_embeddings_start_from_vectors() -> None:
    torch.manual_seed(0)
    model, given = Encoder(TINY), torch.randn(TINY.vocab_size, 20)
    model.start_from(given)
    found = model.embeddings.tok_embeddings.weight
    assert found.shape == (TINY.vocab_size, TINY.hidden_size)
    # All components fit: the directions from the mean are those of the vectors.
    wanted = F.normalize(given - given.mean(0), dim=-1)
    torch.testing.assert_close(found @ found.T, wanted @ wanted.T, atol=1e-5, rtol=1e-5)


def test_words_are_the_encoder_without_its_layers(stream: PairStream) -> None:
    model = Encoder(replace(TINY, num_hidden_layers=0))
    tokens = stream.next()[0][:8, 0]
    torch.testing.assert_close(Words(model)(tokens), model(tokens))


def test_lessons_are_some_of_the_batches(words: Tokenizer) -> None:
    texts = [f"the cat has {i} kites" for i in range(400)]
    vectors = F.normalize(torch.randn(400, 7), dim=-1)
    lessons = Lessons(vectors, texts, vectors, [], vectors[:0])
    stream = PairStream(Pairs(), words, 0, lessons, factor=2)
    sizes = set()
    for _ in range(20):
        tokens, targets = stream.next()
        assert len(tokens) == len(targets)
        if tokens.shape[1] == 1:
            sizes.add(len(tokens))
            ids = [words.encode(text).ids for text in texts]
            row = tokens[3, 0][tokens[3, 0] != PAD].tolist()
            assert torch.equal(targets[3], vectors[ids.index(row)])
    assert sizes == {192}


def test_loss_of_a_lesson_by_hand() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[3.0, 0], [0.0, 1], [0.0, 2]])

    tokens = torch.ones(3, 1, 4, dtype=torch.int64)
    lesson = torch.tensor([[1.0, 0], [0.0, 1], [1.0, 0]])
    found = contrastive_loss(Fixed())((tokens, lesson))
    # Ours: the second and the third are alike. Theirs: the first and the third are.
    torch.testing.assert_close(found, torch.tensor((math.log(2) + 20 / 2 + 20) / 3))


def test_a_group_has_its_own_text_first(words: Tokenizer) -> None:
    encoder, sep = Encoder(TINY), words.token_to_id("[SEP]")
    rivals = RivalStream(Pairs(), words, 0, encoder)
    pairs = PairStream(Pairs(), words, 0, factor=2)
    for _ in range(3):
        own = {tuple(row[row != PAD].tolist()) for row in pairs.next()[0].flatten(0, 1)}
        tokens, targets = rivals.next()
        assert tokens.shape[:2] == (len(targets), 4)
        joined = PairStream(Pairs(), words, 0, factor=2)
        joined.state = pairs.state - 1
        right = {(*q[q != PAD].tolist(), *t[t != PAD].tolist()[1:]) for q, t in joined.next()[0]}
        for group in tokens:
            rows = [tuple(row[row != PAD].tolist()) for row in group]
            assert rows[0] in right
            assert not right & set(rows[1:])
            assert len({row[: row.index(sep)] for row in rows}) == 1
            for row in rows:
                cut = row.index(sep) + 1
                assert {row[:cut], (row[0], *row[cut:])} <= own


def test_ranking_loss_by_hand() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens[:, 1].float()

    tokens = torch.tensor([[[1, 2], [1, 1]], [[1, 3], [1, 5]]])
    found = ranking_loss(Fixed())((tokens, torch.zeros(2)))
    order = (F.softplus(torch.tensor(-1.0)) + F.softplus(torch.tensor(2.0))) / 2
    each = F.softplus(torch.tensor([-2.0, 1.0, -3.0, 5.0])).mean()
    torch.testing.assert_close(found, order + each)


@pytest.mark.parametrize("kind", [Encoder, Reranker])
def test_exported_folder_gives_transformers_the_same(
    kind: type[Encoder | Reranker], words: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = kind(TINY)
    for weight in model.parameters():
        weight.data = (3 * weight.data).bfloat16().float()
    export_encoder(model, words, tmp_path)
    name = "AutoModel" if kind is Encoder else "AutoModelForSequenceClassification"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        other = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = theirs("the cat and the dog", "Once upon a time", return_tensors="pt")
    with torch.no_grad():
        ours, found = model(given["input_ids"]), other(**given)
    wanted = found.last_hidden_state.mean(1) if kind is Encoder else found.logits[:, 0]
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


def test_the_folder_is_one_of_sentence_transformers(words: Tokenizer, tmp_path: Path) -> None:
    model = Encoder(TINY)
    export_encoder(model, words, tmp_path)
    types = [part["type"] for part in json.loads((tmp_path / "modules.json").read_text())]
    assert [name.rsplit(".", 1)[1] for name in types] == ["Transformer", "Pooling", "Normalize"]
    assert json.loads((tmp_path / "1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"]
    for name, weight in load_encoder(tmp_path, TINY).state_dict().items():
        assert torch.equal(weight, model.state_dict()[name].bfloat16().float()), name


def test_runs_export_and_write_cards(
    corpus: Corpus, words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {kind: (9, 50, [Quality(0.5, 0.6), Quality(0.7, 0.8)]) for kind in KINDS}
    monkeypatch.setattr("training.encoder_card.measure", lambda *args: measured)
    pairs, run = Pairs(corpus), tmp_path / "run"
    out = tmp_path / "stories-encoder"
    make = partial(train.encoder_loop, TINY, pairs, words, PLAN, out, run, 0)
    make().run()
    card = (out / "README.md").read_text()
    assert "| question about a child | note of a sentence or two | 9, 50 | 50 %, 0.60 |" in card
    assert "6 steps" in card
    assert "CDLA-Sharing-1.0" in card

    first = make()
    first.run(until_step=3)
    second = make()
    second.resume()
    second.run()
    wanted = load_encoder(out, TINY).state_dict()
    for name, weight in second.module.state_dict().items():
        assert torch.equal(weight.bfloat16().float(), wanted[name]), name

    ranked = tmp_path / "stories-reranker"
    short = Pairs(corpus, short=True)
    loop = train.reranker_loop(TINY, out, short, replace(PLAN, steps=3), ranked, run, 0)
    for name, weight in loop.module.model.state_dict().items():
        assert torch.equal(weight, wanted[name]), name
    loop.run()
    assert "reads a query and a text together" in (ranked / "README.md").read_text()
    assert json.loads((ranked / "config.json").read_text())["id2label"] == {"0": "match"}


@pytest.mark.parametrize(("kind", "share"), [("encoder", 0.7), ("reranker", 0.9)])
def test_the_loss_falls(kind: str, share: float, words: Tokenizer, tmp_path: Path) -> None:
    pairs, plan = Pairs(), replace(PLAN, steps=60)
    pairs.makers = {"facts": pairs.makers["facts"]}
    out = tmp_path / "stories-encoder"
    loop = train.encoder_loop(TINY, pairs, words, plan, out, tmp_path / "run", 0)
    if kind == "reranker":
        export_encoder(loop.module, words, out)
        loop = train.reranker_loop(TINY, out, pairs, plan, out, tmp_path / "run", 0)
    losses = [loop.train_step() for _ in range(40)]
    assert sum(losses[-5:]) / 5 < share * losses[0]


def test_encoders_have_no_time_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse_args(["encoder", "--minutes", "3"])
    assert "encoder trains a number of steps" in capsys.readouterr().err
    assert train.parse_args(["reranker"]).out.name == "stories-reranker"
