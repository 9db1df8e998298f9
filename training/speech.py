"""Compact Whisper in torch: the built-in speech model, and its tokenizer.

The parameter names are those of Hugging Face's ``WhisperForConditionalGeneration``, so that export
is a plain copy. ``tests/training/test_speech.py`` compares the arithmetic with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F

from training.checkpoint import write_json, write_tensors
from training.data import IGNORE
from training.loop import Batch

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
COMMANDS = ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"]
WORDS = (*DIGITS, *COMMANDS)
SECONDS = 6
"""Length of the model's window; Whisper's is 30."""
MEL = 80
SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
STATES_A_SECOND = 50


def make_tokenizer() -> Tokenizer:
    """Return byte-level BPE: bytes, the words with a space before them, special tokens, times."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    merges = []
    for word in WORDS:
        made = "Ġ"
        for letter in word:
            if (made, letter) not in merges:
                merges.append((made, letter))
            made += letter
            vocab.setdefault(made, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    times = [f"<|{i / STATES_A_SECOND:.2f}|>" for i in range(SECONDS * STATES_A_SECOND + 1)]
    tokenizer.add_tokens([AddedToken(token) for token in times])
    ids = [(token, tokenizer.token_to_id(token)) for token in SPECIAL]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[1]} {SPECIAL[8]} $A {SPECIAL[0]}", special_tokens=ids
    )
    return tokenizer


_TOKENIZER = make_tokenizer()


def word_token(word: str) -> int:
    """Return the token of a word."""
    (token,) = _TOKENIZER.encode(" " + word, add_special_tokens=False).ids
    return token


END, START, NO_SPEECH, NO_TIMESTAMPS = (_TOKENIZER.token_to_id(SPECIAL[i]) for i in (0, 1, 7, 8))
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1


@dataclass(frozen=True)
class SpeechConfig:
    """Shape of the model; the field names are those of its ``config.json``."""

    vocab_size: int = _TOKENIZER.get_vocab_size()
    d_model: int = 96
    encoder_layers: int = 3
    encoder_attention_heads: int = 3
    encoder_ffn_dim: int = 288
    decoder_layers: int = 2
    decoder_attention_heads: int = 3
    decoder_ffn_dim: int = 192
    num_mel_bins: int = MEL
    max_source_positions: int = SECONDS * STATES_A_SECOND
    max_target_positions: int = 64

    def to_json(self) -> dict[str, Any]:
        """Return the ``config.json`` of the exported folder."""
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            **asdict(self),
            "is_encoder_decoder": True,
            "activation_function": "gelu",
            "scale_embedding": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "decoder_start_token_id": START,
            "bos_token_id": END,
            "eos_token_id": END,
            "pad_token_id": END,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        }


class Attention(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.v_proj, self.out_proj = (nn.Linear(size, size) for _ in range(3))
        self.k_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, seen: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        """Return the output, and the scores of the attention ``[batch, heads, x, seen]``."""
        q, k, v = (
            p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p, y in ((self.q_proj, x), (self.k_proj, seen), (self.v_proj, seen))
        )
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
        if causal:
            scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
        out = scores.softmax(-1) @ v
        return self.out_proj(out.transpose(1, 2).flatten(2)), scores


class Layer(nn.Module):
    def __init__(self, size: int, heads: int, inner: int, *, crosses: bool):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = Attention(size, heads), nn.LayerNorm(size)
        self.encoder_attn = Attention(size, heads) if crosses else None
        self.encoder_attn_layer_norm = nn.LayerNorm(size) if crosses else None
        self.fc1, self.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self.final_layer_norm = nn.LayerNorm(size)

    def forward(self, x: Tensor, heard: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states, and the scores of the attention to what is heard."""
        y = self.self_attn_layer_norm(x)
        y, scores = self.self_attn(y, y, causal=heard is not None)
        x = x + y
        if heard is not None:
            y, scores = self.encoder_attn(self.encoder_attn_layer_norm(x), heard)
            x = x + y
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x)))), scores


class Encoder(nn.Module):
    def __init__(self, config: SpeechConfig):
        super().__init__()
        size = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, size, 3, padding=1)
        self.conv2 = nn.Conv1d(size, size, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, size)
        self.embed_positions.weight.data = _sinusoids(config.max_source_positions, size)
        self.embed_positions.requires_grad_(False)
        self.layers = nn.ModuleList(
            Layer(size, config.encoder_attention_heads, config.encoder_ffn_dim, crosses=False)
            for _ in range(config.encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(size)

    def forward(self, features: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(features))))
        x = x.transpose(1, 2) + self.embed_positions.weight
        for layer in self.layers:
            x, _ = layer(x)
        return self.layer_norm(x)


class Decoder(nn.Module):
    def __init__(self, config: SpeechConfig):
        super().__init__()
        size = config.d_model
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_positions = nn.Embedding(config.max_target_positions, size)
        self.layers = nn.ModuleList(
            Layer(size, config.decoder_attention_heads, config.decoder_ffn_dim, crosses=True)
            for _ in range(config.decoder_layers)
        )
        self.layer_norm = nn.LayerNorm(size)

    def forward(self, tokens: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the last layer's scores of attention to what is heard."""
        x = self.embed_tokens(tokens) + self.embed_positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x, scores = layer(x, heard)
        return self.layer_norm(x) @ self.embed_tokens.weight.T, scores


class Speech(nn.Module):
    """Whisper, and a classifier of the encoder's states, which only the training uses."""

    def __init__(self, config: SpeechConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.classifier = nn.Linear(config.d_model, config.vocab_size)
        for module in (self.decoder.embed_tokens, self.decoder.embed_positions):
            nn.init.normal_(module.weight, std=0.02)
        # A time resembles the state of the encoder at that time, and times resemble their
        # neighbors, so all of them are learnt from few.
        times = config.vocab_size - FIRST_TIMESTAMP
        positions = _sinusoids(times, config.d_model)
        self.decoder.embed_tokens.weight.data[FIRST_TIMESTAMP:] = 0.1 * positions
        # What is heard is as large as the positions that are added to it.
        for conv, gain in ((self.encoder.conv1, 1.5), (self.encoder.conv2, 3.0)):
            nn.init.normal_(conv.weight, std=gain * conv.weight[0].numel() ** -0.5)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return logits ``[sounds, tokens, vocabulary]``.

        Args:
            features: float32 ``[sounds, mel bands, frames]``.
            tokens: int64 ``[sounds, tokens]``.
        """
        logits: Tensor = self.decoder(tokens, self.encoder(features))[0]
        return logits


def _sinusoids(length: int, size: int) -> Tensor:
    """Return Whisper's positions of the encoder, ``[length, size]``: sines, then cosines."""
    step = math.log(10_000) / (size // 2 - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(size // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def speech_loss(model: Speech) -> Callable[[Batch], Tensor]:
    """Return the loss of a batch of `training.spoken.SpokenStream`.

    It is the cross-entropy of the tokens, and two more terms that show the model where each word
    is: the cross-entropy of the word at each state of the encoder, and the share of the last
    layer's attention that is not on the word that is written next.
    """

    def loss(batch: Batch) -> Tensor:
        features, rows = batch
        states = model.config.max_source_positions
        tokens, targets = rows[:, :-states].chunk(2, dim=1)
        spans = rows[:, -states:]
        heard = model.encoder(features)
        logits, scores = model.decoder(tokens, heard)
        text = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, label_smoothing=0.02
        )
        # Token k of the text follows the start and a time, or <|notimestamps|>.
        said = tokens.gather(1, torch.where(spans > 0, spans + 1, 0))
        said = torch.where(spans > 0, said, END)
        words = F.cross_entropy(model.classifier(heard).flatten(0, 1), said.flatten())
        order = torch.arange(tokens.shape[1])[None, :, None]
        there = (spans[:, None] == order) & (order > 0)
        logs = scores.log_softmax(-1)[:, :2].logsumexp(1) - math.log(2)
        mass = logs.masked_fill(~there, -1e4).logsumexp(-1)[there.any(-1)]
        return text + words - 0.3 * mass.mean()

    return loss


def export_speech(model: Speech, folder: Path) -> None:
    """Write a folder that transformers and Octavo load: config, weights, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model.config.to_json())
    ends = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    write_json(
        folder / "generation_config.json",
        {
            **ends,
            "decoder_start_token_id": START,
            "is_multilingual": False,
            "no_timestamps_token_id": NO_TIMESTAMPS,
            "max_initial_timestamp_index": STATES_A_SECOND * SECONDS,
            "max_length": model.config.max_target_positions,
            "return_timestamps": False,
            "suppress_tokens": [],
            "begin_suppress_tokens": [],
        },
    )
    write_json(
        folder / "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": MEL,
            "chunk_length": SECONDS,
            "sampling_rate": 16_000,
            "hop_length": 160,
            "n_fft": 400,
            "padding_value": 0.0,
            "return_attention_mask": False,
        },
    )
    _TOKENIZER.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[0],
            "pad_token": SPECIAL[0],
            "unk_token": SPECIAL[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_target_positions,
        },
    )
    weights = {
        f"model.{name}": weight
        for name, weight in model.state_dict().items()
        if not name.startswith("classifier")
    }
    write_tensors(folder / "model.safetensors", weights)
