"""Cache of the rows that encoders have computed, as the scheduler plans it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from octavo.messages import Modality, MultiModalFeatureSpec, SchedulerOutput
from octavo.observability.profiler import span
from octavo.system.tensor import Tensor


class Encoder(Protocol):
    """Part of an `EncoderRunner` that the cache uses."""

    def run(self, items: Sequence[MultiModalFeatureSpec]) -> list[Tensor]:
        """Return the rows of each item: [rows, size]."""


class EncoderCache:
    """Rows of the items of live requests, and of others that may come again.

    Args:
        encoders: the encoder of each modality.
    """

    def __init__(self, encoders: Mapping[Modality, Encoder]) -> None:
        self._encoders = encoders
        self.rows: dict[str, Tensor] = {}
        """Rows of each item, [rows, size], by identifier."""

    def update(
        self, work: SchedulerOutput, features: Mapping[str, list[MultiModalFeatureSpec]]
    ) -> None:
        """Forget and compute the items that a step names.

        Args:
            work: the step.
            features: items of the requests by id. Computed ones lose their data here, since a
                request that starts again brings it again.
        """
        for identifier in work.free_encoder_mm_hashes:
            self.rows.pop(identifier, None)  # absent if its step failed
        items: dict[Modality, list[MultiModalFeatureSpec]] = {}
        for req_id, indices in work.scheduled_encoder_inputs.items():
            for index in indices:
                feature = features[req_id][index]
                features[req_id][index] = msgspec.structs.replace(feature, data={})
                items.setdefault(feature.modality, []).append(feature)
        for modality, group in items.items():
            with span("encode") as note:
                note(rows=sum(feature.num_encoder_tokens for feature in group))
                results = self._encoders[modality].run(group)
            for feature, rows in zip(group, results, strict=True):
                assert len(rows) == feature.num_rows, (feature.identifier, len(rows))
                self.rows[feature.identifier] = rows
