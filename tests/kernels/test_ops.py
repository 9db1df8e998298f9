import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import get_ops
from tests.triton import needs_triton

CPU = torch.device("cpu")


def test_a_cpu_gets_the_native_operations() -> None:
    assert isinstance(get_ops(CPU), NativeOps)
    assert get_ops(CPU) is get_ops(CPU)


@needs_triton
def test_triton_where_it_is_asked_for() -> None:
    assert get_ops(CPU, "triton").name == "triton"


def test_no_triton_on_a_cpu_without_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="triton"):
        get_ops.__wrapped__(CPU, "triton")
