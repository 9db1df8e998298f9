"""Experts in the file of packed weights, with the most used in memory."""

import errno
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo._native import ExpertLayer
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ConfigError
from octavo.kernels.native import NativeOps
from octavo.kernels.routing import ExpertActivation
from octavo.kernels.weights import StackedWeight
from octavo.layers.experts import Experts
from octavo.models import loader
from octavo.models.blocks.base import Parts
from octavo.models.expert_sizes import ExpertSizes, divide_slots
from octavo.models.loader import LoadedWeights
from octavo.models.weight_cache import WeightCache
from octavo.system.tensor import from_numpy
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import generate, load, make_hf, make_prompts, spec_of


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


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_same_bits_with_any_number_of_slots(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
    ahead: bool,
) -> None:
    """The file is written by a start without the cache, or by one with it: it is the same."""
    if not ahead:
        monkeypatch.setattr(Experts, "expect", lambda *_: None)
    cache, prompts = WeightCache(tmp_path / "cache", 2**30), make_prompts(VOCAB, (20, 1))
    expected, resident = run(folder, cache, prompts, quantization=quantization)
    (file,) = cache.files()
    whole = file.read_bytes()
    uses = set()
    for slots in (2, 3, 7, 18):
        if slots == 3:
            file.unlink()
        logits, weights = run(folder, cache, prompts, quantization=quantization, expert_slots=slots)
        assert (logits == expected).all()
        assert file.read_bytes() == whole
        experts = weights.experts
        assert experts is not None
        hits, misses, nbytes, failures, fetched, used = experts.counts.tolist()
        uses.add(hits + misses)
        sizes = ExpertSizes.of(spec_of(folder, quantization=quantization).weights(), "float32")
        assert (misses - used) * sizes.largest <= nbytes <= (misses + fetched) * sizes.largest
        assert weights.nbytes == resident.nbytes - (18 - slots) * sizes.largest
        assert failures == 0
        assert used <= fetched
        assert (fetched > 0) == (ahead and slots < 18), "nothing is missing if all are in memory"
        if not ahead:
            assert (misses <= 18) == (slots == 18)
        assert hits > 0 or slots < 18
        weights.release()
        weights.reload(same=True)
    assert len(uses) == 1
    assert run(folder, cache, prompts, quantization=quantization)[0].tolist() == expected.tolist()


def test_the_next_router_guesses_the_next_experts(tmp_path: Path) -> None:
    """If layers change the residual stream little, the guesses are right."""
    architecture, config = CASES["qwen3-moe"]
    few = {"num_hidden_layers": 4, "num_experts": 9, "num_experts_per_tok": 2}
    few |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    hf_model = make_hf(architecture, **config | few)
    for name, parameter in hf_model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data *= 1e-3
        elif "post_attention_layernorm" in name:
            parameter.data.fill_(1)
    hf_model.save_pretrained(tmp_path)
    cache, prompts = WeightCache(tmp_path / "cache", 2**30), make_prompts(VOCAB, (1, 1))
    expected, _ = run(tmp_path, cache, prompts)
    logits, weights = run(tmp_path, cache, prompts, expert_slots=8)
    assert (logits == expected).all()
    assert weights.experts is not None
    *_, fetched, used = weights.experts.counts.tolist()
    assert fetched > 10
    assert used >= 0.9 * fetched


class Steps:
    """The experts of both layers, used by steps of one token."""

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
        self._nbytes = self.experts.memory.nbytes // slots
        self._layers = [self._build(loaded, block) for block in self.experts.layers]

    def _build(self, loaded: Any, block: str) -> list[StackedWeight]:
        """Return the weights up and down of a layer."""
        parts = Parts(
            loaded, self._ops, dtype="float32", max_model_len=8, cached=self.experts.layers
        ).of(block[:-1])
        return [
            self._ops.stack(
                [parts.of(f"experts.{i}.{name}").linear("weight") for i in range(9)],
                None,
                parts.cached_experts,
            )
            for name in ("up", "down")
        ]

    def use(self, *steps: list[int], layer: int = 0) -> list[list[float]]:
        """Compute steps, each with the experts of its token; return the first number of each."""
        up, down = self._layers[layer]
        x, activation = np.ones((1, up.first.k), np.float32), ExpertActivation("silu")
        result = []
        for step in steps:
            ids = from_numpy(np.array([step], np.int32))
            rows, _ = self._ops.experts(from_numpy(x), ids, up, down, activation)
            result.append(rows.numpy()[:, 0].tolist())
        return result

    def expect(self, *experts: int) -> None:
        """Guess which experts the second layer will use."""
        ids = np.array(experts, np.int32)
        self.layer(1).expect(ids=ids.ctypes.data, tokens=1, top_k=len(experts))

    def layer(self, index: int) -> ExpertLayer:
        """Return a layer of the native cache."""
        return list(self.experts.layers.values())[index]

    def counts(self) -> list[int]:
        """Return the hits, misses and failures since the last call."""
        counts = self.experts.counts.tolist()
        self.experts.counts[:] = 0
        return [int(counts[i]) for i in (0, 1, 3)]

    def ahead(self) -> list[int]:
        """Return the numbers of experts read, fetched ahead and used since the last call."""
        _, _, nbytes, _, fetched, used = self.experts.counts.tolist()
        self.experts.counts[:] = 0
        return [nbytes // self._nbytes, fetched, used]

    def place(self, expert: int) -> slice:
        """Return the bytes of the weight up of an expert of the second layer, in the file."""
        block = list(self.experts.layers)[1]
        return self.experts._places[f"{block}experts.{expert}.up.weight"]


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


def test_experts_fetched_ahead_are_read_once(folder: Path, tmp_path: Path) -> None:
    """Those that the next layer uses are kept, or waited for; the others are given up."""
    steps = Steps(folder, WeightCache(tmp_path, 2**30), 6)
    (expected,) = steps.use([3, 4], layer=1)
    steps.experts.release()
    steps.ahead()
    steps.expect(4, 3)
    steps.use([0])
    assert steps.use([3, 4], layer=1) == [expected]
    assert steps.ahead() == [3, 2, 2]
    steps.expect(5, 3)  # one of them is in memory
    steps.use([0])
    steps.use([6], layer=1)
    read, *guesses = steps.ahead()
    assert guesses == [1, 0]
    assert 1 <= read <= 2
    assert steps.use([3, 4], layer=1) == [expected]
    assert steps.counts() == [2, 0, 0]
    steps.ahead()
    steps.expect(7)
    steps.use([0], [0])  # the guess is over with the second step
    steps.use([7], layer=1)
    assert steps.ahead()[1:] == [1, 0]


def test_what_is_fetched_ahead_arrives_before_it_is_needed(folder: Path, tmp_path: Path) -> None:
    steps = Steps(folder, WeightCache(tmp_path, 2**30), 6)
    for _ in range(1000):
        steps.experts.release()
        steps.expect(3, 4)
        steps.use([0])
        time.sleep(0.01)  # as long as the mixer of the next layer may take
        steps.counts()
        steps.use([3, 4], layer=1)
        if steps.counts() == [2, 0, 0]:
            return
    pytest.fail("all guesses were late")


def test_a_guess_takes_no_slot_of_what_is_used_more(folder: Path, tmp_path: Path) -> None:
    """Two slots: the layer's own experts keep them until they are computed, or if they are hot."""
    steps = Steps(folder, WeightCache(tmp_path, 2**30), 2)
    (expected,) = steps.use([3, 4], layer=1)
    steps.use([0, 1])
    steps.ahead()
    steps.expect(3, 4)
    steps.use([0, 1])
    assert steps.use([3, 4], layer=1) == [expected]
    assert steps.ahead() == [2, 2, 2]
    steps.use(*[[0, 1]] * 300)
    steps.ahead()
    steps.expect(3, 4)
    steps.use(*[[0, 1]] * 3)
    assert steps.ahead() == [0, 0, 0], "hot experts gave up their slots for a guess"
    assert steps.use([3, 4], layer=1) == [expected]


def test_nothing_is_fetched_while_guesses_are_wrong(folder: Path, tmp_path: Path) -> None:
    steps = Steps(folder, WeightCache(tmp_path, 2**30), 6)

    def guess(expert: int, times: int) -> list[int]:
        """Guess an expert while the layer uses another; return the numbers fetched and used."""
        steps.ahead()
        for _ in range(times):
            steps.experts.release()
            steps.expect(expert)
            steps.use([0])
            steps.use([3], layer=1)
        return steps.ahead()[1:]

    assert guess(3, 10) == [10, 10]
    fetched, used = guess(4, 100)
    assert 0 < fetched < 50
    assert used == 0
    assert guess(4, 10) == [0, 0]
    assert guess(3, 1) == [0, 0]
    fetched, used = guess(3, 200)
    assert 0 < fetched == used < 200


def test_a_guess_that_cannot_be_read_harms_no_one(folder: Path, tmp_path: Path) -> None:
    steps = Steps(folder, WeightCache(tmp_path, 2**30), 4)
    expected = steps.use([3], [4], layer=1)
    (file,) = tmp_path.glob("*.weights")
    good, place = file.read_bytes(), steps.place(3)
    file.write_bytes(good[: place.start] + bytes(8) + good[place.start + 8 :])
    steps.experts.release()
    steps.counts()
    steps.expect(3, 4)
    own = steps.use([0])
    deadline = time.monotonic() + 100
    while (error := steps.experts.take_error()) is None:
        assert time.monotonic() < deadline, "the expert is not fetched"
        time.sleep(0.001)
    assert "has changed" in error
    assert steps.use([4], layer=1) == expected[1:]
    assert steps.use([0]) == own
    assert steps.counts()[2] == 0
    assert np.isnan(steps.use([3], layer=1)).all()
    assert steps.counts()[2] == 1
    file.write_bytes(good)
    steps.expect(3)
    steps.use([0])
    assert steps.use([3], [4], layer=1) == expected


def test_memory_outlives_the_threads_that_read_into_it(folder: Path, tmp_path: Path) -> None:
    """Experts may be on their way when the cache is emptied, or when the engine ends."""
    cache = WeightCache(tmp_path, 2**30)
    for _ in range(10):
        steps = Steps(folder, cache, 18)
        for _ in range(20):
            steps.expect(*range(9))
            steps.use([0])
            steps.experts.release()
        expected = steps.use([3], layer=1)
        steps.expect(*range(9))
        steps.use([0])
        memory, layer = steps.experts.memory, steps.layer(1)
        del steps
        gc.collect()
        assert sys.getrefcount(memory) == 3, "the native cache does not keep it"
        del layer  # waits for the threads
        gc.collect()
        assert sys.getrefcount(memory) == 2
    assert Steps(folder, cache, 2).use([3], layer=1) == expected


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
        patched.setattr(loader, "read_parts", fail)
        with pytest.raises(OSError, match="Input/output error"):
            load(folder, cache=cache, expert_slots=3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        with pytest.raises(ConfigError, match=r"expert_cache cannot write .*Input/output error"):
            load(folder, cache=cache, expert_slots=3)
    assert cache.files() == []
