"""Runs of encoders in parts, which have the bits of whole runs."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from octavo.attention.cpu import CPUAttention
from octavo.errors import EngineDeadError
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import as_torch
from octavo.messages import EncoderSlice
from octavo.models import encoder as encoders
from octavo.models.blocks.attention import AttentionSpec
from octavo.worker.encoder_runner import EncoderRunner, encoder_arena, runner_nbytes
from tests.models.harness import make_hf
from tests.models.test_towers import CASES, feature, load_tower

NAMES = ["qwen3vl", "qwen2_5_vl", "gemma4"]
"""Towers with taps, with windows, and with parts of heads that turn separately."""


@pytest.fixture(scope="module", params=NAMES)
def tower(request, tmp_path_factory):
    """Return a tower in bfloat16, and several pictures."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("tower")
    make_hf(case.architecture, factor=0.6, **case.config).save_pretrained(folder)
    (encoder,) = load_tower(folder, "bfloat16").encoders
    pictures = case.pictures(np.random.default_rng(1), case.config["vision_config"])
    return encoder, [feature(arrays) for arrays in pictures]


@pytest.fixture
def small(monkeypatch):
    """Make small pieces."""
    monkeypatch.setattr(encoders, "LAYER_TOKENS", 5)
    monkeypatch.setattr(encoders, "STORE_TOKENS", 12)


def make_runner(encoder):
    ops, backend = NativeOps(), CPUAttention()
    nbytes, _ = runner_nbytes(encoder, ops, backend)
    return EncoderRunner(encoder, ops, backend, encoder_arena(nbytes))


def count(runner, item):
    """Return the number of pieces of an item's run."""
    arrays = {name: encoders.array_of(tensor) for name, tensor in item.data.items()}
    read = runner.spec.inputs.read(arrays)
    return runner.spec.num_pieces(read.num_tokens, read.num_rows)


def same(a, b):
    return torch.equal(as_torch(a), as_torch(b))


def test_parts_have_the_bits_of_the_whole_run(tower, small):
    """Also if other items overwrite the keys and values between any two of them."""
    encoder, items = tower
    runner = make_runner(encoder)
    alone = [runner.run([item])[0] for item in items]
    for item, rows in zip(items, alone, strict=True):
        total = count(runner, item)
        for overwrites in (lambda place: False, lambda place: True, lambda place: place % 4 == 1):
            for place in range(total):
                part = runner.advance(EncoderSlice(item, place, place + 1))
                assert (part is None) == (place + 1 < total)
                if overwrites(place) and part is None:
                    assert same(runner.run([items[0]])[0], alone[0])
            assert same(part, rows)


def test_keys_and_values_are_stored_once(tower, small, monkeypatch):
    encoder, items = tower
    runner, item, stored = make_runner(encoder), items[-1], []
    store = encoders.EncoderModel.store

    def note(self, layer, x, residual, step):
        stored.append((layer, x.shape[0]))
        store(self, layer, x, residual, step)

    monkeypatch.setattr(encoders.EncoderModel, "store", note)
    total = count(runner, item)
    runner.advance(EncoderSlice(item, 0, total - 1))
    rows = runner.advance(EncoderSlice(item, total - 1, total))
    tokens = sum(size for layer, size in stored if layer == 0)
    assert tokens > 12
    found = {layer: sum(s for at, s in stored if at == layer) for layer, _ in stored}
    assert found == dict.fromkeys(range(len(encoder.spec.layers)), tokens)
    assert same(rows, runner.run([item])[0])


@pytest.mark.parametrize("piece", ["begin", "store", "layer", "end"])
def test_a_part_that_fails_forgets_the_run(tower, small, monkeypatch, piece):
    encoder, items = tower
    runner, item = make_runner(encoder), items[-1]
    expected, total = runner.run([item])[0], count(runner, item)

    def fail(*args):
        raise ValueError("bad item")

    with monkeypatch.context() as patch:
        patch.setattr(encoders.EncoderModel, piece, fail)
        assert runner.advance(EncoderSlice(item, 0, total)) is None
    assert runner.advance(EncoderSlice(item, 1, total)) is None
    assert same(runner.advance(EncoderSlice(item, 0, total)), expected)
    divided = make_runner(encoder)
    divided.spec = replace(encoder.spec, is_divided=True)
    monkeypatch.setattr(encoders.EncoderModel, piece, fail)
    with pytest.raises(EngineDeadError):
        divided.advance(EncoderSlice(item, 0, total))


def test_a_run_takes_the_place_of_another(tower, small):
    encoder, items = tower
    runner = make_runner(encoder)
    first, last = msgspec.structs.replace(items[0], identifier="a"), items[-1]
    expected = runner.run([last])[0]
    runner.advance(EncoderSlice(first, 0, 3))
    runner.advance(EncoderSlice(last, 0, 3))
    assert runner.advance(EncoderSlice(first, 3, count(runner, first))) is None
    runner.advance(EncoderSlice(last, 0, 3))
    assert same(runner.advance(EncoderSlice(last, 3, count(runner, last))), expected)


def test_layers_that_mix_tokens_stay_whole(tower, small):
    """So do those of short items."""
    spec = tower[0].spec
    assert spec.is_by_rows
    assert {piece.kind for piece in spec.pieces(40, 10)} >= {"begin", "store", "layer", "end"}
    assert "store" not in {piece.kind for piece in spec.pieces(4, 1)}
    (layer, *_) = spec.layers
    attention, *others = layer.blocks
    assert isinstance(attention, AttentionSpec)
    windowed = layer.with_blocks([replace(attention, sliding_window=4), *others])
    turned = replace(layer, sublayers=layer.sublayers[::-1])
    for changed in (windowed, turned, replace(layer, arrangement="parallel")):
        whole = replace(spec, layers=(changed, *spec.layers[1:]))
        assert not whole.is_by_rows
        pieces = [piece for piece in whole.pieces(40, 10) if piece.kind != "tap"]
        assert [(it.begin, it.end) for it in pieces if it.kind == "layer"] == [(0, 40)] * len(
            spec.layers
        )
        assert "store" not in {piece.kind for piece in pieces}
