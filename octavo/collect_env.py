"""`octavo collect-env`: facts about the machine for a bug report."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from octavo import __version__
from octavo.config import HIDDEN
from octavo.system.device import cpu_memory, cpu_model, num_cpus, num_cuda_devices

_PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "xgrammar",
    "llguidance",
    "fastapi",
    "uvicorn",
    "pydantic",
    "triton",
    "flashinfer-python",
)
_VARIABLES = ("OCTAVO_", "VLLM_", "HF_", "CUDA_", "OMP_", "TRITON_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def collect_env() -> dict[str, str]:
    """Return facts about the machine and the installed packages, by name; secrets are hidden."""
    total, available = cpu_memory()
    found = {
        "octavo": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": cpu_model(),
        "cores": str(num_cpus()),
        "memory": f"{total / 2**30:.1f} GiB, {available / 2**30:.1f} GiB available",
        "kernels": _kernels(),
        "NVIDIA GPUs": ", ".join(_gpus()) or "none",
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            found[name] = HIDDEN if any(word in name.upper() for word in _SECRET) else value
    return found


def _kernels() -> str:
    """Return this processor's variant of the kernels, and the available ones."""
    try:
        from octavo.kernels import native
    except ImportError as error:
        return f"not built ({error})"
    try:
        return f"{native.isa()} (of {', '.join(native.available_isas())})"
    except ValueError as error:  # OCTAVO_ISA has an unknown name
        return str(error)


def _gpus() -> list[str]:
    count = num_cuda_devices()
    if count == 0:
        return []
    try:
        import torch
    except ImportError:
        return [f"{count}, but PyTorch is not installed"]
    if not torch.cuda.is_available():
        return [f"{count} that PyTorch cannot use"]
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
