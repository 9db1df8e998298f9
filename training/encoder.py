"""Compact ModernBERT in torch: the built-in encoder and reranker.

The parameter names are those of Hugging Face's ``ModernBertModel``, and of
``ModernBertForSequenceClassification`` for the reranker, so that export is a plain copy. Every
token sees the whole text in every layer. ``tests/training/test_encoder.py`` compares the
arithmetic with transformers.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from torch import Tensor, nn
from torch.nn import functional as F

from training.checkpoint import write_json, write_tensors
from training.corpus import Corpus
from training.loop import Batch
from training.model import rope_tables, rotate
from training.pairs import Pairs
from training.teacher import Lessons

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD = 0
TEMPERATURE = 0.05
# Share of the batches, number of pairs and longest text in tokens of each kind.
RECIPE = {
    "notes": (0.12, 96, 32),
    "facts": (0.12, 64, 48),
    "titles": (0.12, 24, 160),
    "stories": (0.15, 48, 96),
    "quotes": (0.12, 48, 96),
    "books": (0.15, 48, 96),
    "extracts": (0.12, 48, 96),
    "lines": (0.12, 64, 48),
}
LESSON_SHARE = 0.25
WORD_STEPS = 1200
"""Number of steps that train the encoder's embeddings alone, as a bag of words, at first."""
_LESSON = 96
_QUERY_TOKENS = 48
_RIVALS = 3
_GROUPS = 32


@dataclass(frozen=True)
class EncoderConfig:
    """Shape of an encoder; the field names are those of its ``config.json``."""

    vocab_size: int = 5376
    hidden_size: int = 128
    intermediate_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    max_position_embeddings: int = 512
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def to_json(self, architecture: str) -> dict[str, Any]:
        """Return the ``config.json`` of the exported folder."""
        fields = asdict(self)
        theta = fields.pop("rope_theta")
        return {
            "architectures": [architecture],
            "model_type": "modernbert",
            **fields,
            "global_attn_every_n_layers": 1,
            "global_rope_theta": theta,
            "local_attention": 128,
            "local_rope_theta": theta,
            "hidden_activation": "gelu",
            "attention_bias": False,
            "mlp_bias": False,
            "norm_bias": False,
            "classifier_activation": "gelu",
            "classifier_bias": False,
            "classifier_pooling": "mean",
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "pad_token_id": PAD,
            "cls_token_id": 2,
            "sep_token_id": 3,
            "bos_token_id": 2,
            "eos_token_id": 3,
        }


class Attention(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        size = config.hidden_size
        self.heads, self.dim = config.num_attention_heads, config.head_dim
        self.Wqkv = nn.Linear(size, 3 * size, bias=False)
        self.Wo = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.Wqkv(x).unflatten(-1, (3, self.heads, self.dim))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        scores = q @ (k * self.dim**-0.5).transpose(-1, -2) + mask
        return self.Wo((scores.softmax(-1, dtype=q.dtype) @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given, gate = self.Wi(x).chunk(2, dim=-1)
        return self.Wo(F.gelu(given) * gate)


class Layer(nn.Module):
    def __init__(self, config: EncoderConfig, *, first: bool):
        super().__init__()
        # The embeddings are already normalized.
        self.attn_norm = nn.Identity() if first else _norm(config)
        self.attn = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), mask, cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(tokens))


class Encoder(nn.Module):
    """ModernBERT whose layers all see the whole text."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(
            Layer(config, first=i == 0) for i in range(config.num_hidden_layers)
        )
        self.final_norm = _norm(config)
        self._tables = rope_tables(config, config.max_position_embeddings)
        self.apply(_init)
        for name, weight in self.named_parameters():
            if name.endswith("Wo.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.num_hidden_layers))

    def start_from(self, vectors: Tensor) -> None:
        """Set the embeddings to the principal components of vectors ``[vocab_size, any]``.

        Each has length 1. They are turned at random, so that no dimension is small in all.
        """
        centred = vectors - vectors.mean(0)
        parts = torch.linalg.svd(centred, full_matrices=False)
        size = self.config.hidden_size
        found = F.normalize(parts.U[:, :size] * parts.S[:size], dim=-1)
        turn = torch.linalg.qr(torch.randn(size, size))[0][: found.shape[1]]
        self.embeddings.tok_embeddings.weight.data = found @ turn

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean state of each text, ``[texts, hidden]``, of ``tokens [texts, length]``.

        Texts are int64 ids, padded at the end.
        """
        real = tokens != PAD
        x = self.embeddings(tokens)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        mask = torch.zeros_like(real, dtype=x.dtype).masked_fill(~real, float("-inf"))
        cos, sin = (table[: tokens.shape[1]].to(x.dtype) for table in self._tables)
        for layer in self.layers:
            x = layer(x, mask[:, None, None], cos, sin)
        x = self.final_norm(x).float() * real[..., None]
        return x.sum(1) / real.sum(1, keepdim=True)


class Words(nn.Module):
    """An encoder's embeddings and last norm alone: a bag of words, which is trained fast."""

    def __init__(self, model: Encoder):
        super().__init__()
        self.embeddings, self.final_norm = model.embeddings, model.final_norm

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what the encoder without its layers returns."""
        real = (tokens != PAD)[..., None]
        x = self.final_norm(self.embeddings(tokens)).float() * real
        return x.sum(1) / real.sum(1)


class Head(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x)))


class Reranker(nn.Module):
    """Encoder of a query and a text together, with a head that returns one number."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.model = Encoder(config)
        self.head = Head(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.head.apply(_init)
        self.classifier.apply(_init)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the numbers ``[pairs]`` of ``tokens [pairs, length]``; more is better."""
        return self.classifier(self.head(self.model(tokens)))[:, 0].float()


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


# --- losses -----------------------------------------------------------------------------------


def contrastive_loss(model: Encoder | Words) -> Callable[[Batch], Tensor]:
    """Return InfoNCE (van den Oord et al. 2018) over pairs ``[pairs, 2, length]``, both ways.

    The other texts of the batch are the rivals of a query's own text. A batch of lessons has
    sentences ``[sentences, 1, length]`` and the teacher's vectors: the loss is the cross-entropy
    of the student's similarities to the teacher's.
    """

    def loss(batch: Batch) -> Tensor:
        parts = [F.normalize(model(_trim(tokens)), dim=-1) for tokens in batch[0].unbind(1)]
        if len(parts) == 1:
            found, wanted = (_similarities(v) / TEMPERATURE for v in (parts[0], batch[1]))
            return F.cross_entropy(found, wanted.softmax(-1))
        queries, texts = parts
        scores = queries @ texts.T / TEMPERATURE
        own = torch.arange(len(scores))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

    return loss


def _similarities(vectors: Tensor) -> Tensor:
    """Return the similarities of each vector to each other one, ``[n, n - 1]``."""
    others = ~torch.eye(len(vectors), dtype=torch.bool)
    return (vectors @ vectors.T)[others].unflatten(0, (len(vectors), -1))


def ranking_loss(model: Reranker) -> Callable[[Batch], Tensor]:
    """Return the loss of groups ``[groups, 1 + rivals, length]``, whose first pair is right.

    It is the cross-entropy of the right pair among its group, so that the order is right, and the
    binary one of each pair, so that the sigmoid of a number is a probability.
    """

    def loss(batch: Batch) -> Tensor:
        tokens, _ = batch
        scores = model(_trim(tokens.flatten(0, 1))).unflatten(0, tokens.shape[:2])
        right = torch.zeros_like(scores)
        right[:, 0] = 1
        order = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))
        return order + F.binary_cross_entropy_with_logits(scores, right)

    return loss


def _trim(tokens: Tensor) -> Tensor:
    """Return tokens ``[texts, length]`` without the columns that are padding in every text."""
    return tokens[:, : int((tokens != PAD).sum(1).max())]


# --- data -------------------------------------------------------------------------------------


class PairStream:
    """Endless, seeded, resumable stream of batches of pairs; those of a batch have one kind.

    A batch depends only on (seed, its number), which is ``state``.
    """

    def __init__(
        self,
        pairs: Pairs,
        tokenizer: Tokenizer,
        seed: int,
        lessons: Lessons | None = None,
        factor: int = 1,
    ):
        self.pairs, self.tokenizer, self.seed = pairs, tokenizer, seed
        self.lessons, self.factor = lessons, factor
        self.state = 0
        self.progress = 0.0

    def next(self) -> Batch:
        """Return tokens ``[pairs, 2, length]`` int64, and as many zeros."""
        rng = random.Random(f"{self.seed}/pairs/{self.factor}/{self.state}")
        self.state += 1
        if self.lessons is not None and rng.random() < LESSON_SHARE:
            chosen = rng.sample(range(len(self.lessons.sentences)), self.factor * _LESSON)
            ids = self._ids([self.lessons.sentences[i] for i in chosen], _QUERY_TOKENS)
            return self.batch(ids, 1)[0], self.lessons.vectors[chosen]
        kinds = list(self.pairs.makers)
        (kind,) = rng.choices(kinds, [RECIPE[kind][0] for kind in kinds])
        _, count, longest = RECIPE[kind]
        drawn = self.pairs.train(kind, rng, self.factor * count)
        queries = self._ids([pair.query for pair in drawn], _QUERY_TOKENS)
        texts = self._ids([pair.text for pair in drawn], longest)
        return self.batch([pair for both in zip(queries, texts, strict=True) for pair in both], 2)

    def batch(self, rows: list[list[int]], group: int) -> Batch:
        """Return rows of ids in groups: tokens ``[groups, group, length]``, and as many zeros."""
        tokens = torch.full((len(rows), max(map(len, rows))), PAD)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        tokens = tokens.unflatten(0, (-1, group))
        return tokens, torch.zeros(len(tokens), dtype=torch.int64)

    def _ids(self, texts: list[str], longest: int) -> list[list[int]]:
        """Return the ids of each text, cut, between [CLS] and [SEP]."""
        encoded = self.tokenizer.encode_batch(texts)
        return [[*item.ids[:-1][: longest - 1], item.ids[-1]] for item in encoded]


class RivalStream(PairStream):
    """Stream of groups for the reranker: a query with its text, and with rivals of this text.

    The rivals are drawn from the texts of the batch that the encoder finds most similar to the
    query.
    """

    def __init__(self, pairs: Pairs, tokenizer: Tokenizer, seed: int, encoder: Encoder):
        super().__init__(pairs, tokenizer, seed, factor=2)
        self.encoder = encoder

    def next(self) -> Batch:
        """Return tokens ``[groups, 1 + rivals, length]`` int64, and as many zeros."""
        tokens, _ = super().next()
        rng = random.Random(f"{self.seed}/rivals/{self.state}")
        with torch.no_grad():
            queries, texts = (
                F.normalize(self.encoder(_trim(part)), dim=-1) for part in tokens.unbind(1)
            )
        scores = (queries @ texts.T).fill_diagonal_(-1)
        near = scores.topk(min(10, len(scores) - 1)).indices.tolist()
        rows = []
        for i in rng.sample(range(len(tokens)), min(_GROUPS, len(tokens))):
            query = _real(tokens[i, 0])
            for j in (i, *rng.sample(near[i], _RIVALS)):
                rows.append([*query, *_real(tokens[j, 1])[1:]])
        return self.batch(rows, 1 + _RIVALS)


def _real(row: Tensor) -> list[int]:
    ids: list[int] = row[row != PAD].tolist()
    return ids


# --- files ------------------------------------------------------------------------------------


def tokenizer_texts(corpus: Corpus, seed: int) -> Iterator[str]:
    """Yield the tokenizer's text: stories, a quarter of the books, pairs of the other kinds."""
    yield from corpus.stories
    yield from corpus.books[::4]
    rng = random.Random(f"{seed}/tokenizer")
    for make in Pairs().makers.values():
        for pair in islice(iter(lambda make=make: make(rng), None), 3000):
            yield f"{pair.query}\n{pair.text}"


def make_wordpiece(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Make a tokenizer of BERT's kind, without case, from the words of ``texts``.

    Its pieces are letters and those that byte pair encoding (Sennrich et al. 2016) joins first.
    The trainer of `tokenizers` is not used, because its ties are broken at random.

    Raises:
        ValueError: the words are too few for ``vocab_size`` pieces.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall("[a-z]+", text.lower()))
    counts = Counter({word: number for word, number in counts.items() if number > 2})
    signs = sorted({chr(i).lower() for i in range(33, 127)})
    pieces = [*SPECIAL, *signs, *(f"##{sign}" for sign in signs)]
    pieces += islice(_joined(counts), vocab_size - len(pieces))
    if len(pieces) < vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}, but the texts have {len(pieces)} pieces; give more text."
        )
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def _joined(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the pieces that byte pair encoding joins; ties are broken by the alphabet."""
    words = {word: [word[0], *(f"##{c}" for c in word[1:])] for word in counts}
    found: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], set[str]] = {}

    def count(word: str, sign: int) -> list[tuple[str, str]]:
        both = list(pairwise(words[word]))
        for pair in both:
            found[pair] += sign * counts[word]
            where.setdefault(pair, set()).add(word)
        return both

    for word in words:
        count(word, 1)
    heap = [(-number, pair) for pair, number in found.items()]
    heapify(heap)
    made: set[str] = set()
    while heap:
        number, pair = heappop(heap)
        if number != -found[pair] or not number:
            continue  # the count is out of date
        piece = pair[0] + pair[1].removeprefix("##")
        if piece not in made:
            made.add(piece)
            yield piece
        changed: set[tuple[str, str]] = set()
        for word in where.pop(pair):
            changed.update(count(word, -1))
            words[word] = _join(words[word], pair, piece)
            changed.update(count(word, 1))
        for other in changed:
            heappush(heap, (-found[other], other))


def _join(parts: list[str], pair: tuple[str, str], piece: str) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] = piece
        else:
            joined.append(part)
    return joined


def export_encoder(model: Encoder | Reranker, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers and Octavo load; sentence-transformers, if an encoder."""
    trunk = model if isinstance(model, Encoder) else model.model
    kind = "Model" if isinstance(model, Encoder) else "ForSequenceClassification"
    folder.mkdir(parents=True, exist_ok=True)
    config = trunk.config.to_json(f"ModernBert{kind}")
    if isinstance(model, Reranker):
        config |= {"id2label": {"0": "match"}, "label2id": {"match": 0}}
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", model.state_dict())
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    length = trunk.config.max_position_embeddings
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **names,
            "model_max_length": length,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    )
    if isinstance(model, Encoder):
        parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(parts)
        ]
        write_json(folder / "modules.json", modules)
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": length})
        (folder / "1_Pooling").mkdir(exist_ok=True)
        size = trunk.config.hidden_size
        pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True}
        write_json(folder / "1_Pooling" / "config.json", pooling)


def load_encoder(folder: Path, config: EncoderConfig) -> Encoder:
    """Return the encoder of an exported folder, float32."""
    model = Encoder(config)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model
