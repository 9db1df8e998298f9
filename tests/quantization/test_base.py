import subprocess
import sys

import pytest
import torch
from torch import Tensor

from octavo.config import EngineConfig, config_fields
from octavo.errors import ConfigError
from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from octavo.quantization.base import get_quantization

CPU = torch.device("cpu")
NAMES = next(f for f in config_fields() if f.name == "quantization").choices or ()


def weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n))


def test_imports_no_torch() -> None:
    code = (
        "import sys; from octavo.quantization.base import get_quantization as get;"
        "get('int8').nbytes(64, 64), get('int4').nbytes(64, 64); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_name_of_the_setting_has_a_form() -> None:
    assert get_quantization(None) is None
    assert NAMES == ("int8", "int4")
    for name in NAMES:
        form = get_quantization(name)
        assert form is not None
        assert form.name == name


def test_the_setting() -> None:
    assert EngineConfig().model.quantization is None
    assert EngineConfig.from_kwargs(quantization=None).model.quantization is None
    assert EngineConfig.from_kwargs(quantization="int4").model.quantization == "int4"
    with pytest.raises(ConfigError, match=r"quantization='int3' is not allowed; .*int8, int4"):
        EngineConfig.from_kwargs(quantization="int3")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ops", [NativeOps(), ReferenceOps()], ids=lambda ops: ops.name)
@pytest.mark.parametrize("rows", [(7,), (64,), (96, 32, 32), (700, 700)])
@pytest.mark.parametrize("k", [48, 172, 256])
def test_pack(name: str, ops: ReferenceOps, rows: tuple[int, ...], k: int) -> None:
    """Any shape, in parts of any type: a product has a small error, and the size is as planned."""
    form = get_quantization(name)
    assert form is not None
    parts = [weight(n, k) for n in rows]
    packed = form.pack(ops, [part.to(torch.bfloat16) for part in parts])
    assert (packed.n, packed.k) == (sum(rows), k)
    if ops.name == "native":
        assert packed.nbytes == form.nbytes(packed.n, k)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(0))
    got, want = ops.linear(x, packed), x @ torch.cat(parts).T
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < (0.02 if packed.format == "int8" else 0.09)
