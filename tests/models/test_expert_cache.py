"""Experts in the file of packed weights, with the most used in memory."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ConfigError
from octavo.kernels.native import NativeOps
from octavo.kernels.routing import ExpertActivation
from octavo.models import loader
from octavo.models.blocks.base import Parts
from octavo.models.expert_sizes import ExpertSizes, divide_slots
from octavo.models.loader import LoadedWeights
from octavo.models.weight_cache import WeightCache
from octavo.system.tensor import from_numpy
from tests.models.harness import generate, load, make_hf, make_prompts, spec_of
from tests.models.test_parity import CASES, VOCAB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a mixture of 2 layers with 9 experts, of which a token uses 2."""
    folder = tmp_path_factory.mktemp("mixture")
    architecture, config = CASES["qwen3-moe"]
    few = {"num_hidden_layers": 2, "num_experts": 9, "num_experts_per_tok": 2}
    few |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    make_hf(architecture, **config | few).save_pretrained(folder)
    return folder


def run(
    folder: Path, cache: WeightCache, prompts: list[list[int]], **options: Any
) -> tuple[NDArray[Any], LoadedWeights]:
    """Return the logits of greedy answers to prompts, and the weights."""
    keep: list[LoadedWeights] = []
    model = load(folder, cache=cache, keep=keep, **options)
    if cache.writer is not None:
        cache.writer.join()
    logits = [np.asarray(rows) for rows in generate(model, prompts, 4).logits]
    return np.concatenate(logits), keep[0]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_same_bits_with_any_number_of_slots(
    folder: Path, tmp_path: Path, quantization: str | None
) -> None:
    """The file is written by a start without the cache, or by one with it: it is the same."""
    cache, prompts = WeightCache(tmp_path / "cache", 2**30), make_prompts(VOCAB, (20, 1))
    expected, resident = run(folder, cache, prompts, quantization=quantization)
    (file,) = cache.files()
    whole = file.read_bytes()
    for slots in (2, 3, 7, 18):
        if slots == 3:
            file.unlink()
        logits, weights = run(folder, cache, prompts, quantization=quantization, expert_slots=slots)
        assert (logits == expected).all()
        assert file.read_bytes() == whole
        experts = weights.experts
        assert experts is not None
        hits, misses, nbytes, failures = experts.counts.tolist()
        sizes = ExpertSizes.of(spec_of(folder, quantization=quantization).weights(), "float32")
        assert nbytes == misses * sizes.largest
        assert weights.nbytes == resident.nbytes - (18 - slots) * sizes.largest
        assert failures == 0
        assert (misses <= 18) == (slots == 18)
        assert hits > 0 or slots < 18
        weights.release()
        weights.reload(same=True)
    assert run(folder, cache, prompts, quantization=quantization)[0].tolist() == expected.tolist()


class Steps:
    """The first layer's experts, used by steps of one token."""

    def __init__(self, folder: Path, cache: WeightCache, slots: int) -> None:
        self._ops = NativeOps()
        weights = LoadedWeights(
            spec_of(folder),
            open_checkpoint(folder),
            dtype="float32",
            ops=self._ops,
            cache=cache,
            expert_slots=slots,
        )
        assert weights.experts is not None
        loaded, self.experts = weights.load(), weights.experts
        block = next(iter(self.experts.layers))
        parts = Parts(
            loaded, self._ops, dtype="float32", max_model_len=8, cached=self.experts.layers
        ).of(block[:-1])
        self._up, self._down = (
            self._ops.stack(
                [parts.of(f"experts.{i}.{name}").linear("weight") for i in range(9)],
                None,
                parts.cached_experts,
            )
            for name in ("up", "down")
        )

    def use(self, *steps: list[int]) -> list[list[float]]:
        """Compute steps, each with the experts of its token; return the first number of each."""
        x, activation = np.ones((1, self._up.first.k), np.float32), ExpertActivation("silu")
        result = []
        for step in steps:
            ids = from_numpy(np.array([step], np.int32))
            rows, _ = self._ops.experts(from_numpy(x), ids, self._up, self._down, activation)
            result.append(rows.numpy()[:, 0].tolist())
        return result

    def counts(self) -> list[int]:
        """Return the hits, misses and failures since the last call, and the bytes read."""
        counts = self.experts.counts.tolist()
        self.experts.counts[:] = 0
        return [int(counts[i]) for i in (0, 1, 3)]


def test_the_most_used_stay(folder: Path, tmp_path: Path) -> None:
    """Experts that are used often survive a scan of all others; unused ones age."""
    steps = Steps(folder, WeightCache(tmp_path, 2**30), 3)
    steps.use(*[[0, 1]] * 10, *[[i] for i in range(2, 9)], [0, 1])
    assert steps.counts() == [18 + 2, 2 + 7, 0]
    steps.use(*[[i] for i in (2, 3, 4)] * 400)
    steps.counts()
    steps.use([2], [3], [4])
    assert steps.counts() == [3, 0, 0], "what was used long ago still has slots"


def test_damage_to_the_file_is_a_failure_of_the_experts(folder: Path, tmp_path: Path) -> None:
    """A file that was replaced goes on; from one that changed or shrank, good parts are read."""
    steps, each = Steps(folder, WeightCache(tmp_path, 2**30), 2), [[0], [1, 2], [3]]
    expected = steps.use(*each)
    assert steps.counts() == [0, 4, 0]
    (file,) = tmp_path.glob("*.weights")
    kept = file.rename(tmp_path / "kept")
    file.write_bytes(b"another file")
    assert steps.use(*each) == expected
    good = kept.read_bytes()
    for damage, says in (
        (good[:-1000] + bytes(1000), None),
        (bytes(len(good)), "has changed"),
        (good[:100], "has become shorter"),
    ):
        kept.write_bytes(damage)
        steps.counts()
        steps.experts._native.release()
        got = steps.use(*each)
        error = steps.experts.take_error()
        if says is None:  # the damage is elsewhere
            assert (got, error) == (expected, None)
            continue
        assert all(np.isnan(row).all() for row in got)
        assert steps.counts() == [0, 4, 4]
        assert error is not None
        assert says in error
        assert steps.experts.take_error() is None
    kept.write_bytes(good)
    assert steps.use(*each) == expected


def test_division_among_ranks() -> None:
    one = ExpertSizes(count=10, nbytes=1000, largest=100, least=2, per_token=200)
    other = ExpertSizes(count=5, nbytes=500, largest=100, least=2, per_token=100)
    none = ExpertSizes(0, 0, 0, 0, 0)
    assert divide_slots(10**6, [one, other, none], "M") == [10, 5, 0]
    assert divide_slots(600, [one, other], "M") == [4, 2]
    with pytest.raises(ConfigError, match=r"expert_cache=599 has no room .* at least 600 bytes"):
        divide_slots(599, [one, other], "M")
    with pytest.raises(ConfigError, match=r"not supported with M, which has no experts"):
        divide_slots(599, [none], "M")


def test_a_disk_without_room_is_reported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise weight_cache_bytes"):
        Steps(folder, WeightCache(tmp_path, 1000), 2)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set weight_cache to another folder"):
        Steps(folder, WeightCache(tmp_path / "file", 2**30), 2)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", tmp_path / "lock"]


def test_errors_of_the_checkpoint_and_of_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that cannot be read is no problem of the cache's folder."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    cache = WeightCache(tmp_path / "cache", 2**30)
    with monkeypatch.context() as patched:
        patched.setattr(loader, "_read", fail)
        with pytest.raises(OSError, match="Input/output error"):
            load(folder, cache=cache, expert_slots=3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        with pytest.raises(ConfigError, match=r"expert_cache cannot write .*Input/output error"):
            load(folder, cache=cache, expert_slots=3)
    assert cache.files() == []
