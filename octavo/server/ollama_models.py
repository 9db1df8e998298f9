"""Ollama's descriptions of the served model: GET /api/tags, /api/ps, /api/version, POST /api/show.

The listed names are those of /v1/models, so that a client may use both APIs with the same name.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFoundError, RequestError
from octavo.models.blocks.attention import AttentionSpec
from octavo.plan.memory_plan import resolve_dtype
from octavo.platforms.cpu import CPUPlatform
from octavo.platforms.registry import get_platform
from octavo.quantization.plain import PLAIN
from octavo.server import answers
from octavo.server.body import read_model
from octavo.server.errors import show
from octavo.server.ollama_answers import (
    OllamaDetails,
    OllamaModel,
    OllamaRunning,
    OllamaRunningModel,
    OllamaShown,
    OllamaTags,
    OllamaVersion,
)
from octavo.server.ollama_schema import LATEST, ShowBody
from octavo.server.state import ServerState, state_of
from octavo.system.offload import offload

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.spec import ModelSpec

VERSION = "0.14.2"
"""Version of Ollama that clients see.

Clients for chats and code are known to demand 0.6.4 (VS Code's Copilot) to 0.14.2. Those that
demand 0.34 and more need routes that this server does not have."""
_FOREVER_SECONDS = 100 * 365 * 86400


async def running(request: Request) -> Response:
    """Return 200; Ollama's command looks for a server in this way."""
    return Response()


async def ollama_version(request: Request) -> Response:
    """Return the version of Ollama whose API this server has."""
    return answers.respond(OllamaVersion(version=VERSION))


async def list_tags(request: Request) -> Response:
    """List the names under which the model is served."""
    state = state_of(request)
    model = await _described(state)
    return answers.respond(OllamaTags(models=[_tag(state, model, n) for n in state.model_names]))


async def list_running(request: Request) -> Response:
    """List the names of the model once it is loaded."""
    state = state_of(request)
    model, engine = await _described(state), await state.get_engine()
    expires, names = _date(state.created + _FOREVER_SECONDS), state.model_names
    found = [
        OllamaRunningModel(
            name=name,
            model=name,
            size=model.nbytes,
            digest=_digest(state, name),
            details=model.details,
            expires_at=expires,
            size_vram=model.gpu_nbytes,
            context_length=engine.max_model_len,
        )
        for name in (names if engine.ready else [])
    ]
    return answers.respond(OllamaRunning(models=found))


async def show_model(request: Request) -> Response:
    """Describe the model: its shape, chat template, parameters and capabilities."""
    state = state_of(request)
    body = await read_model(request, ShowBody, state.config.max_request_bytes)
    asked = body.model or body.name
    if not asked:
        raise RequestError("model is missing; it is required.", "model", "missing_parameter")
    name = served_name(state, asked)
    model, engine = await _described(state), await state.get_engine()
    capabilities: list[Literal["completion", "embedding", "tools", "thinking"]] = []
    if engine.spec.generates:
        capabilities.append("completion")
    elif engine.spec.pooler("embed") is not None:
        capabilities.append("embedding")
    template = ""
    if engine.tokenizer is not None and engine.spec.generates:
        template = (await state.chat_template(engine.tokenizer)).source or ""
        found = await state.answer_format(engine.tokenizer)
        if found is not None and found.calls is not None:
            capabilities.append("tools")
        if found is not None and found.thoughts is not None:
            capabilities.append("thinking")
    defaults = engine.spec.generation_config
    return answers.respond(
        OllamaShown(
            modelfile=f"FROM {name}\n",
            parameters="\n".join(f"{key:<30} {value}" for key, value in defaults.items()),
            template=template,
            details=model.details,
            model_info={
                **model.info,
                "general.basename": name,
                f"{model.details['family']}.context_length": engine.max_model_len,
            },
            capabilities=capabilities,
            modified_at=_date(state.created),
        )
    )


def served_name(state: ServerState, asked: str) -> str:
    """Return the served name that a client asks for, which may have the tag `:latest`.

    Raises:
        NotFoundError: the server does not have the model.
    """
    for name in (asked, asked.removesuffix(LATEST)):
        if name in state.model_names:
            return name
    raise NotFoundError(
        f"model {show(asked)} not found; this server has {', '.join(state.model_names)}.", "model"
    )


class _Model(NamedTuple):
    """Description of the model that does not depend on its name."""

    details: OllamaDetails
    info: dict[str, Any]
    nbytes: int
    """Size of the weights in memory."""
    gpu_nbytes: int
    """Size of those in the memory of a GPU."""


_models: WeakKeyDictionary[ServerState, _Model] = WeakKeyDictionary()
"""Descriptions by server; each is made once."""


async def _described(state: ServerState) -> _Model:
    if state not in _models:
        engine = await state.get_engine()
        spec = engine.spec
        _models[state] = await offload(100 * len(spec.layers), _describe, engine.config, spec)
    return _models[state]


def _describe(config: EngineConfig, spec: ModelSpec) -> _Model:
    dtype = resolve_dtype(config, spec)
    sizes: dict[tuple[object, ...], int] = {}
    forms: Counter[str] = Counter()
    for weight in spec.weights():
        key = tuple((source.name, source.parts) for source in weight.sources)
        size = sizes[key] = math.prod(weight.shape)
        forms[dtype if weight.form == PLAIN else weight.form.name] += size
    family = spec.architecture.removesuffix("ForCausalLM").lower()
    count = sum(sizes.values())
    info = {
        "general.architecture": family,
        "general.parameter_count": count,
        f"{family}.block_count": len(spec.layers),
        f"{family}.embedding_length": spec.hidden_size,
        f"{family}.vocab_size": spec.vocab_size,
    }
    blocks = [block for layer in spec.layers for block in layer.blocks]
    attention = next((block for block in blocks if isinstance(block, AttentionSpec)), None)
    if attention is not None:
        info |= {
            f"{family}.attention.head_count": attention.num_heads,
            f"{family}.attention.head_count_kv": attention.num_kv_heads,
            f"{family}.attention.key_length": attention.head_size,
        }
    ((most, _),) = forms.most_common(1)
    details = OllamaDetails(
        parent_model="",
        format="gguf" if config.model.model.lower().endswith(".gguf") else "safetensors",
        family=family,
        families=[family],
        parameter_size=_short(count),
        quantization_level=_LEVELS.get(most, most.upper()),
    )
    nbytes = spec.weight_nbytes(dtype)
    on_cpu = isinstance(get_platform(config.device.device), CPUPlatform)
    return _Model(details, info, nbytes, 0 if on_cpu else nbytes)


_LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _short(count: int) -> str:
    """Return a number such as 7.6B."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _tag(state: ServerState, model: _Model, name: str) -> OllamaModel:
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_date(state.created),
        size=model.nbytes,
        digest=_digest(state, name),
        details=model.details,
    )


def _digest(state: ServerState, name: str) -> str:
    return hashlib.sha256(f"{state.system_fingerprint} {name}".encode()).hexdigest()


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
