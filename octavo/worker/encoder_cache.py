"""Cache of the rows that encoders have computed, as the scheduler plans it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from octavo.messages import EncoderSlice, Modality, MultiModalFeatureSpec, SchedulerOutput
from octavo.observability.profiler import span
from octavo.system.tensor import Tensor


class Encoder(Protocol):
    """Part of an `EncoderRunner` that the cache uses."""

    def rows_of(self, item: MultiModalFeatureSpec) -> Tensor:
        """Return the rows that an item has in place of an input (`EMBEDS`)."""

    def run_apart(
        self, items: Sequence[MultiModalFeatureSpec]
    ) -> tuple[list[Tensor], dict[int, str]]:
        """Return the rows of each item, [rows, size], and the errors of those that fail."""

    def advance(self, part: EncoderSlice) -> Tensor | None:
        """Compute a part of an item's run; return its rows if the run has ended."""

    def run_largest(self) -> list[Tensor]:
        """Run the longest item, for a measurement of memory; return its rows."""


class EncoderCache:
    """Rows of the items of live requests, and of others that may come again.

    Args:
        encoders: the encoder of each modality.
    """

    def __init__(self, encoders: Mapping[Modality, Encoder]) -> None:
        self._encoders = encoders
        self.rows: dict[str, Tensor] = {}
        """Rows of each item, [rows, size], by identifier."""
        self.failed: dict[str, str] = {}
        """Errors of the items whose rows could not be computed, by identifier."""
        self._begun: MultiModalFeatureSpec | None = None
        """Item of the last run that began in a slice. Requests that come before its run has ended
        have it without its data."""

    def run_largest(self) -> None:
        """Run each encoder with its longest item, for a measurement of memory."""
        for encoder in set(self._encoders.values()):
            encoder.run_largest()

    def update(
        self, work: SchedulerOutput, features: Mapping[str, list[MultiModalFeatureSpec]]
    ) -> None:
        """Forget and compute the items that a step names.

        Args:
            work: the step.
            features: items of the requests by id. Those of new requests get the data that the
                message lacks. Computed ones lose their data here, since a request that starts again
                brings it again.
        """
        for identifier in work.free_encoder_mm_hashes:
            self.rows.pop(identifier, None)  # absent if its step failed
            self.failed.pop(identifier, None)
        part = work.encoder_slice
        if self._begun is not None:
            for request in work.scheduled_reqs:
                if request.new is not None:
                    _give(self._begun, features.get(request.req_id, []))
        if part is not None and not part.begin:
            part = self._begin(part, features)
        computed: dict[str, Tensor] = {}
        if part is not None and part.item.modality in self._encoders:
            with span("encode") as note:
                note(rows=part.item.num_encoder_tokens)
                rows = self._encoders[part.item.modality].advance(part)
            if rows is not None:
                computed[part.item.identifier] = rows
        items: dict[Modality, list[MultiModalFeatureSpec]] = {}
        for req_id, indices in work.scheduled_encoder_inputs.items():
            for index in indices:
                feature = features[req_id][index]
                features[req_id][index] = msgspec.structs.replace(feature, data={})
                if feature.identifier not in computed:
                    items.setdefault(feature.modality, []).append(feature)
                if self._begun is not None and feature.identifier == self._begun.identifier:
                    self._begun = None  # later requests have its rows, or bring it again
        self.rows |= computed
        for modality, group in items.items():
            if modality not in self._encoders:  # another stage reads its rows
                continue
            for feature in group:
                if feature.is_embeds:
                    self.rows[feature.identifier] = self._encoders[modality].rows_of(feature)
            group = [feature for feature in group if not feature.is_embeds]
            if not group:
                continue
            with span("encode") as note:
                note(rows=sum(feature.num_encoder_tokens for feature in group))
                results, errors = self._encoders[modality].run_apart(group)
            self.failed |= {group[index].identifier: error for index, error in errors.items()}
            for feature, rows in zip(group, results, strict=True):
                assert len(rows) == feature.num_rows, (feature.identifier, len(rows))
                self.rows[feature.identifier] = rows

    def _begin(
        self, part: EncoderSlice, features: Mapping[str, list[MultiModalFeatureSpec]]
    ) -> EncoderSlice:
        """Return the first part of a run with the data of its item."""
        item = part.item
        if not item.data:
            same = (it for own in features.values() for it in own if it.data)
            item = next(it for it in same if it.identifier == part.item.identifier)
        self._begun = item
        return msgspec.structs.replace(part, item=item)


def _give(begun: MultiModalFeatureSpec, items: list[MultiModalFeatureSpec]) -> None:
    """Give the data of an item to the items of a request that are the same."""
    for i, item in enumerate(items):
        if item.identifier == begun.identifier and not item.data:
            items[i] = msgspec.structs.replace(item, data=begun.data)
