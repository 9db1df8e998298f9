"""POST /classify and /v1/classify, as in vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.abilities import find_pooler
from octavo.server.pooling import Floats, InputCall, encode
from octavo.server.pooling_schema import ClassifyBody


async def create_classification(request: Request) -> Response:
    """Return the probabilities of the classes for each text."""
    return await Classification.read(request, ClassifyBody)


class Classification(InputCall[ClassifyBody]):
    """Request for the classes of texts."""

    id_prefix = "classify"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        labels = find_pooler(engine.spec, "classify").labels

        def write(index: int, x: Floats) -> bytes:
            best = int(x.argmax())
            return encode(
                {
                    "index": index,
                    "label": labels[best] if labels else None,
                    "probs": x.tolist(),
                    "num_classes": x.size,
                }
            )

        return await self.run(engine, "classify", write)
