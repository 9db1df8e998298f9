"""Registry of forms: those of the setting."""

from __future__ import annotations

from octavo.quantization.base import WeightForm
from octavo.quantization.fp8 import OnlineFP8
from octavo.quantization.int4 import Int4
from octavo.quantization.int8 import Int8
from octavo.quantization.plain import PLAIN

FORMS: dict[str | None, WeightForm] = {
    None: PLAIN,
    "int8": Int8(),
    "int4": Int4(),
    "fp8": OnlineFP8(),
}
"""Forms by the value of the `quantization` setting; None keeps the model's type."""
