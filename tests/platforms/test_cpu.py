"""Parts of an engine on a processor."""

from pathlib import Path

import pytest

from octavo import _native
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.errors import ConfigError
from octavo.kernels import tuning
from octavo.kernels.native import NativeOps, set_num_threads
from octavo.kernels.tuning import Tuning
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.plan.setup import WorkerSetup
from octavo.platforms.cpu import CPUPlatform
from tests.triton import needs_triton

PATH = resolve_model(BUILTIN_MODEL)


def setup(**settings: object) -> WorkerSetup:
    config = EngineConfig.from_kwargs(**settings)
    return WorkerSetup(config, read_spec(open_checkpoint(PATH)), Path(PATH), "bfloat16", 64, 32)


@pytest.mark.parametrize(
    ("name", "ops", "chosen"),
    [
        ("auto", "native", "cpu"),
        ("cpu", "native", "cpu"),
        ("reference", "native", "reference"),
        pytest.param("triton", "triton", "triton", marks=needs_triton),
    ],
)
def test_choice(name: str, ops: str, chosen: str) -> None:
    asked, platform = setup(attention_backend=name), CPUPlatform()
    assert platform.make_ops(asked.config.device, "cpu").name == ops
    assert platform.make_attention_backend(asked, "cpu").name == chosen


def test_no_triton_without_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked, platform = setup(attention_backend="triton"), CPUPlatform()
    with pytest.raises(ConfigError, match="triton"):
        platform.make_ops(asked.config.device, "cpu")
    with pytest.raises(ConfigError, match="triton"):
        platform.make_attention_backend(asked, "cpu")


def test_what_needs_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="flashinfer does not work on device=cpu; use auto"):
        CPUPlatform().make_attention_backend(setup(attention_backend="flashinfer"), "cpu")


def test_the_estimate_is_of_the_largest_step() -> None:
    budget = CPUPlatform().estimate_memory(setup(max_num_seqs=2))
    assert budget is not None
    (scratch,) = budget.scratches
    assert budget.nbytes("activations") == scratch.activations + scratch.kernels
    assert isinstance(CPUPlatform().make_ops(EngineConfig().device, "cpu"), NativeOps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_threads": 100_000}, "num_threads=100000 is more than the .* Use .* or fewer"),
        ({"numa_node": 100_000}, "numa_node=100000 does not exist"),
    ],
)
def test_settings_that_do_not_fit_the_machine(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CPUPlatform().check_settings(setup(**settings).config.device)


def test_settings_that_fit_the_machine() -> None:
    CPUPlatform().check_settings(setup(num_threads=1).config.device)


def test_a_device_that_is_opened_goes_by_what_suits_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "measure", lambda: Tuning(False, 200, 2500))
    try:
        assert CPUPlatform().open_device(setup(num_threads=1)) == "cpu"
        assert _native.tuning() == (False, 200, 2500)
        assert list((tmp_path / "octavo" / "tuning").glob("*.json"))
    finally:
        tuning.DEFAULT.apply()
        set_num_threads(0)
