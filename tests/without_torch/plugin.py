"""Logits processor that needs torch."""

import torch

from octavo.sampling.logits_processors.base import LogitsProcessor


class NeedsTorch(LogitsProcessor):
    """Processor that cannot be imported without torch."""

    device = torch.device("cpu")
