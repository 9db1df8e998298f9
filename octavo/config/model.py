"""Settings of the model and of how its weights are read."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta

from octavo.config.pooler import PoolerConfig
from octavo.config.section import PositiveInt, Section
from octavo.errors import ConfigError

BUILTIN_MODEL = "octavo/stories"


BUILTIN_DRAFT_MODEL = "octavo/stories-draft"


BUILTIN_EAGLE_HEAD = "octavo/stories-eagle"


BUILTIN_MEDUSA_HEADS = "octavo/stories-medusa"


BUILTIN_ENCODER = "octavo/stories-encoder"


BUILTIN_RERANKER = "octavo/stories-reranker"


BUILTIN_EYES = "octavo/stories-eyes"


BUILTIN_SPEECH = "octavo/spoken-words"


Dtype = Literal["auto", "float32", "float16", "bfloat16"]


class ModelConfig(Section, frozen=True):
    """Model, tokenizer and treatment of the weights and prompts."""

    model: Annotated[
        str, Meta(description="Model folder, hub id, or octavo/stories (built in).", min_length=1)
    ] = BUILTIN_MODEL
    tokenizer: Annotated[
        str | None, Meta(description="Folder or hub id of the tokenizer; default: the model's.")
    ] = None
    tokenizer_mode: Annotated[
        Literal["auto", "mistral"],
        Meta(
            description="auto: tokenizer.json, or else tekken.json or another file; mistral:"
            " tekken.json and Mistral's own chat template, whatever files are beside it."
        ),
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool,
        Meta(
            description="Do not load a tokenizer; prompts must be token ids, answers have no text."
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        Meta(description="Accept models that contain their own code; Octavo never runs that code."),
    ] = False
    dtype: Annotated[
        Dtype,
        Meta(description="Data type of weights and activations; auto: the checkpoint's type."),
    ] = "auto"
    quantization: Annotated[
        Literal[
            "int8",
            "int4",
            "fp8",
            "awq",
            "gptq",
            "auto-round",
            "compressed-tensors",
            "modelopt",
            "mxfp4",
            "fbgemm_fp8",
            "bitsandbytes",
            "bitnet",
            "gguf",
        ]
        | None,
        Meta(
            description="int8, int4, fp8: quantize the linear layers while loading. Any name may"
            " state the method of a quantized checkpoint, which is used in any case. Default: keep"
            " the checkpoint's weights."
        ),
    ] = None
    dequantize: Annotated[
        bool,
        Meta(
            description="Load the weights of a quantized checkpoint as numbers of the data type:"
            " activations are not quantized, and the model takes the memory and time of an"
            " unquantized one."
        ),
    ] = False
    seed: Annotated[int, Meta(description="Random seed.", ge=0)] = 0
    max_model_len: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="Maximum length of prompt plus answer, in tokens; default: the model's"
            " limit; -1: the maximum that fits in memory."
        ),
    ] = None
    revision: Annotated[str | None, Meta(description="Branch, tag or commit on the hub.")] = None
    served_model_name: Annotated[
        list[str], Meta(description="Names of the model in requests and answers.")
    ] = []
    max_logprobs: Annotated[
        int,
        Meta(
            description="Maximum number of logprobs per token in a request; -1: no limit.",
            ge=-1,
        ),
    ] = 20
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(
            description="Kind of results. generate: answers; pooling: vectors or scores, without"
            " the LM head; auto: pooling for models that are published for it, and both answers and"
            " vectors for all other decoders."
        ),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        Meta(
            description="Use of a decoder as a pooling model. embed: vectors; classify: scores of"
            " its module score; none: only what its architecture names; auto: by the architecture."
        ),
    ] = "auto"
    pooler_config: Annotated[
        PoolerConfig | None,
        Meta(
            description='Changes of a pooling model\'s results, as JSON: {"pooling_type": "MEAN",'
            ' "use_activation": false, "dimensions": 256}.'
        ),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any],
        Meta(description="Fields that override those in the model's config.json."),
    ] = {}
    logits_processors: Annotated[
        list[str],
        Meta(
            description="Classes of logits processors, each as module:Class, with Octavo's"
            " interface or vLLM's (vllm.v1.sample.logits_processor)."
        ),
    ] = []
    guided_decoding_backend: Annotated[
        Literal["auto", "xgrammar", "llguidance"],
        Meta(
            description="Backend of structured outputs for requests that name none; auto: the "
            "first one that is installed and supports the request. xgrammar needs the extra "
            "octavo[xgrammar]."
        ),
    ] = "auto"
    allow_additional_properties: Annotated[
        bool,
        Meta(
            description="Allow JSON properties and items that the schema neither names nor"
            " forbids, as JSON Schema does; default: only those that it names, as in vLLM."
        ),
    ] = False
    enable_prompt_embeds: Annotated[
        bool, Meta(description="Accept embeddings as prompts (prompt_embeds).")
    ] = False
    enable_mm_embeds: Annotated[
        bool,
        Meta(
            description="Accept the rows of the model's encoders in place of pictures and sounds"
            " (image_embeds, audio_embeds)."
        ),
    ] = False
    allowed_media_domains: Annotated[
        list[str],
        Meta(
            description="Hosts of the pictures that requests may name by URL."
            " Default: none. The server connects to public addresses only."
        ),
    ] = []
    allowed_local_media_path: Annotated[
        str,
        Meta(
            description="Folder below which pictures may be read that requests name as file: URLs."
            " Default: none."
        ),
    ] = ""
    language_model_only: Annotated[
        bool,
        Meta(
            description="Run a model of pictures and texts as a text model: its towers are not"
            " loaded."
        ),
    ] = False
    limit_mm_per_prompt: Annotated[
        dict[str, Annotated[int, Meta(ge=0)]],
        Meta(
            description='Maximum number of items of each kind in a prompt, as JSON: {"image": 4};'
            " default: 999. 0: none, as with language_model_only."
        ),
    ] = {}
    mm_processor_kwargs: Annotated[
        dict[str, Any],
        Meta(
            description="Settings of the processors of media that replace those of the model, as"
            ' JSON: {"max_pixels": 1003520}.'
        ),
    ] = {}
    media_io_kwargs: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="Choice of the frames of videos, as JSON:"
            ' {"video": {"num_frames": 64, "fps": 2}}. num_frames: at most; -1: all. fps: at most,'
            " in a second."
        ),
    ] = {}
    mm_processor_cache_gb: Annotated[
        float,
        Meta(
            description="Memory in GiB for processed media that are kept: a file that comes again"
            " is not decoded again, and media with a uuid need not be sent again. Several front"
            " ends divide it, and each engine may use as much. 0: none are kept.",
            ge=0,
            le=2**20,
        ),
    ] = 0.25
    enable_sleep_mode: Annotated[
        bool,
        Meta(
            description="Allow sleep and wake_up and their routes; a sleeping engine releases the"
            " memory of its weights and KV cache. On device=cpu only."
        ),
    ] = False
    enforce_eager: Annotated[
        bool,
        Meta(
            description="Run each step operation by operation instead of replaying a captured plan."
        ),
    ] = False

    def limit(self, modality: str) -> int:
        """Return the most items of a modality in a prompt."""
        return 0 if self.language_model_only else self.limit_mm_per_prompt.get(modality, 999)


class LoadConfig(Section, frozen=True):
    """Format, download folder and cache of the weights."""

    load_format: Annotated[
        Literal["auto", "safetensors", "pt", "gguf", "mistral", "sharded_state", "dummy"],
        Meta(
            description="auto: safetensors, PyTorch .bin files if there are none, or the GGUF file"
            " that is named; safetensors; pt: .bin files; gguf: a GGUF file; mistral: params.json"
            " and consolidated*.safetensors, which auto reads if there is no config.json;"
            " sharded_state: vLLM's saved file of each rank; dummy: random weights."
        ),
    ] = "auto"
    mmproj: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="GGUF file with the tower of a GGUF model of pictures; default: the"
            " mmproj*.gguf beside the model's file, or in its hub repository. off, or --no-mmproj:"
            " none, the text model alone."
        ),
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="Folder for downloads; default: the hub client's cache.")
    ] = None
    weight_cache: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Folder for packed weights, which speed up the next start; default:"
            " octavo/weights in the user's cache folder; off: no folder."
        ),
    ] = None
    weight_cache_bytes: Annotated[
        PositiveInt | None,
        Meta(
            description="Maximum size of the weight_cache folder (16G ...); default: a quarter of"
            " the free disk space."
        ),
    ] = None
    expert_cache: Annotated[
        PositiveInt | None,
        Meta(
            description="Memory for the experts of a mixture (16G ...); all experts stay in the"
            " weight_cache folder, and are read when tokens need them. Default: all are in memory."
        ),
    ] = None


def read_hub_address(model: str) -> tuple[str, str | None]:
    """Return the hub id and the revision that the URL of a model's page names.

    Any other name of a model is returned unchanged, with None for the revision.

    Raises:
        ConfigError: `model` is a URL, but not the URL of a model on the hub.
    """
    _, separator, rest = model.rpartition("://")
    if not separator and not re.match(r"[\w-]+(\.[\w-]+)+(:\d+)?/[^/]+/", rest):
        return model, None
    from huggingface_hub import constants  # contains the hub's address

    hub = constants.ENDPOINT.rpartition("://")[2].rstrip("/")
    page = re.fullmatch(
        rf"{re.escape(hub)}/([\w.-]+/[\w.-]+?)(?:/(?:tree|blob|resolve)/([^/?#]+).*)?/?([?#].*)?",
        rest,
    )
    if page is not None and page[1].partition("/")[0] not in ("datasets", "spaces"):
        return page[1], page[2]
    if separator:
        raise ConfigError(
            f"model={model!r} is not the address of a model on the hub; give a hub id (org/name) "
            "or a folder."
        )
    return model, None
