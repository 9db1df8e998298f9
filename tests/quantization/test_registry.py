import subprocess
import sys

import pytest
import torch
from torch import Tensor

from octavo.config import EngineConfig, config_fields
from octavo.errors import ConfigError
from octavo.kernels.base import Ops
from octavo.kernels.torch_tensors import from_torch
from octavo.quantization.base import PackedShape
from octavo.quantization.methods import METHODS
from octavo.quantization.registry import FORMS
from tests.torch_ops import native_ops, reference_ops

NAMES = next(f for f in config_fields() if f.name == "quantization").choices or ()


def weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n))


def test_imports_no_torch() -> None:
    code = (
        "import sys; from octavo.quantization.registry import FORMS;"
        "from octavo.quantization.base import PackedShape;"
        "[form.nbytes(PackedShape(64, 64, 'float32')) for form in FORMS.values()];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_form_and_every_method_is_a_value_of_the_setting() -> None:
    assert [form.name for form in FORMS.values()] == ["plain", "int8", "int4", "fp8"]
    assert {None, *NAMES} >= FORMS.keys() | METHODS.keys() - {"intel/auto-round"}


def test_the_setting() -> None:
    assert EngineConfig().model.quantization is None
    assert EngineConfig.from_kwargs(quantization=None).model.quantization is None
    assert EngineConfig.from_kwargs(quantization="int4").model.quantization == "int4"
    with pytest.raises(ConfigError, match=r"quantization='int3' is not allowed; .*int8, int4"):
        EngineConfig.from_kwargs(quantization="int3")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ops", [native_ops(), reference_ops()], ids=lambda ops: ops.name)
@pytest.mark.parametrize("rows", [(7,), (64,), (96, 32, 32), (700, 700)])
@pytest.mark.parametrize("k", [48, 172, 256])
def test_pack(name: str | None, ops: Ops, rows: tuple[int, ...], k: int) -> None:
    """Any shape, in parts of any type: a product has a small error, and the size is as planned."""
    form = FORMS[name]
    parts = [weight(n, k) for n in rows]
    shape = PackedShape(sum(rows), k, "float32")
    packed = form.pack(ops, [(from_torch(part.to(torch.bfloat16)),) for part in parts], shape)
    assert (packed.n, packed.k) == (sum(rows), k)
    if ops.name == "native":
        assert packed.nbytes == form.nbytes(shape)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(0))
    got, want = ops.linear(x, packed), x @ torch.cat(parts).T
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    format = getattr(packed, "format", None)  # of a quantized weight
    assert error < {None: 0.005, "int8": 0.02, "int4_levels": 0.09, "fp8": 0.03}[format]
