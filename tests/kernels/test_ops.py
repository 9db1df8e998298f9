import torch

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import get_ops
from octavo.kernels.reference import ReferenceOps


def test_cpu_is_native_and_the_rest_plain_torch() -> None:
    assert isinstance(get_ops(torch.device("cpu")), NativeOps)
    assert isinstance(get_ops(torch.device("meta")), ReferenceOps)
    assert get_ops(torch.device("cpu")) is get_ops(torch.device("cpu"))
