"""Methods of quantized checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.autoround import read_autoround
from octavo.quantization.awq import read_awq
from octavo.quantization.base import Groups, WeightForm
from octavo.quantization.bitnet import read_bitnet
from octavo.quantization.bitsandbytes import read_bitsandbytes
from octavo.quantization.compressed_tensors import read_compressed_tensors
from octavo.quantization.fp4 import read_mxfp4
from octavo.quantization.fp8 import read_fp8
from octavo.quantization.gguf import read_gguf
from octavo.quantization.gptq import read_gptq
from octavo.quantization.modelopt import read_modelopt

Reader = Callable[[ConfigJson], Groups | Mapping[str, WeightForm]]
METHODS: dict[str, Reader] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_autoround,
    "intel/auto-round": read_autoround,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "bitnet": read_bitnet,
    "gguf": read_gguf,
}
"""Readers of config.json's quantization_config, by `quant_method`. A mapping has the forms of
modules by their names, the embedding among them; other modules are plain."""
PLAIN_ROUTERS: tuple[Reader, ...] = (read_awq, read_gptq, read_fp8)
"""Readers of methods whose tools leave routers plain without saying so."""
