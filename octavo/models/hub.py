"""Folder of a model or an adapter by its name: built in, local, or downloaded from the hub."""

from __future__ import annotations

import contextlib
import difflib
import errno
import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.checkpoints.gguf.folder import choose_mmproj, find_gguf, is_mmproj
from octavo.checkpoints.mistral.files import PARAMS, WEIGHTS, has_params_only
from octavo.checkpoints.model_files import require_file
from octavo.checkpoints.tasks import TASKS
from octavo.config import (
    BUILTIN_ADAPTERS,
    BUILTIN_DRAFT_MODEL,
    BUILTIN_EAGLE_HEAD,
    BUILTIN_ENCODER,
    BUILTIN_EYES,
    BUILTIN_MEDUSA_HEADS,
    BUILTIN_MODEL,
    BUILTIN_RERANKER,
    BUILTIN_SPEECH,
    EngineConfig,
    hub_offline,
)
from octavo.errors import (
    AdapterDownloadError,
    AdapterError,
    DownloadError,
    HubError,
    ModelError,
    UnknownAdapterError,
    UnknownRepoError,
    reason_of,
)
from octavo.models.media_adapters import MEDIA_ADAPTERS

_BUILTIN_FOLDER = Path(__file__).parent.parent / "builtin"
_BUILTIN = {
    name: _BUILTIN_FOLDER / name.split("/")[1]
    for name in (
        BUILTIN_MODEL,
        BUILTIN_DRAFT_MODEL,
        BUILTIN_EAGLE_HEAD,
        BUILTIN_MEDUSA_HEADS,
        BUILTIN_ENCODER,
        BUILTIN_RERANKER,
        BUILTIN_EYES,
        BUILTIN_SPEECH,
    )
}
_ADAPTERS = {name: _BUILTIN_FOLDER / name.split("/")[1] for name in BUILTIN_ADAPTERS}
_LISTED = (
    BUILTIN_MODEL,
    BUILTIN_DRAFT_MODEL,
    BUILTIN_ENCODER,
    BUILTIN_RERANKER,
    BUILTIN_EYES,
    BUILTIN_SPEECH,
)
"""Built-in models that are complete; heads are parts of a model."""
# Configuration, tokenizer, chat template, and some heads; weights are added by load format.
_FILES = ["*.json", "*.jinja", "*.model", "*.spm", "merges.txt", "vocab.txt", "*.tiktoken"]
_FILES += ["artifact.metadata", "sparse_linear.pt", "colbert_linear.pt"]
_WEIGHTS = {
    "auto": ["*.safetensors"],
    "safetensors": ["*.safetensors"],
    "pt": ["pytorch_model*.bin"],
    "sharded_state": ["model-*-part-*.safetensors"],
    "mistral": [WEIGHTS],
    "dummy": [],
}
# Files of a module of sentence-transformers, in its own folder.
_MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
# Files of an adapter of media, in its own folder.
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Model files that users pass instead of the model's folder.
_WEIGHT_FILES = (".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".onnx")
_FOLDERS = ["*/*"]  # with other formats of the same weights: onnx/, original/ ...
_IGNORED = [*_FOLDERS, "consolidated*"]  # ... and Mistral's own files


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    header_only: bool = False,
    mmproj: str | None = "off",
) -> Path:
    """Return the folder of a model, or its GGUF file; download it if necessary.

    A built-in name or a local path never causes network traffic. With HF_HUB_OFFLINE set, or
    without a network, an earlier download is used.

    Args:
        model: octavo/stories (or -draft, -eagle, -medusa, -encoder, -reranker, -eyes), a folder, a
            GGUF file, a hub id such as org/name, or org/name:Q4_K_M, the GGUF file of org/name
            whose name ends so.
        revision: branch, tag or commit on the hub.
        download_dir: folder for downloads; default: the hub client's cache.
        load_format: format of the weight files, as in `open_checkpoint`.
        header_only: True: of a GGUF file on the hub, the header suffices; see `fetch_headers`.
        mmproj: None: with a GGUF file on the hub, download the tower's file beside it, if any.

    Raises:
        ModelError: a local path is not a folder, or contains pipes or devices.
        HubError: the download fails; the message names the reason and the solution.
    """
    path = local_folder(model)
    if path is not None:
        return path
    repo_id, _, form = model.partition(":")
    if not form:
        if load_format == "gguf":
            raise HubError(
                f"load_format=gguf: name the file's quantization, such as {model}:Q4_K_M."
            )
        patterns = _FILES + _WEIGHTS[load_format]
        if load_format == "mistral":
            return _download(repo_id, revision, download_dir, patterns, _FOLDERS)
        folder = _download(repo_id, revision, download_dir, patterns)
        if load_format == "auto" and has_params_only(folder):
            patterns = _FILES + _WEIGHTS["mistral"]
            return _download(repo_id, revision, download_dir, patterns, _FOLDERS)
        if load_format == "auto" and not any(folder.glob("*.safetensors")):
            folder = _download(repo_id, revision, download_dir, _FILES + _WEIGHTS["pt"])
        if modules := _module_files(folder):
            _download(repo_id, revision, download_dir, modules, ignored=[])
        if load_format != "dummy" and (adapters := _adapter_files(folder)):
            try:
                _download(repo_id, revision, download_dir, adapters, ignored=[])
            except HubError:
                if not hub_offline():
                    raise
                # An earlier download without them: the engine warns if it needs them.
        return folder
    if not re.fullmatch(r"[\w.-]+", form):
        raise HubError(f"{model}: {form!r} is not the end of a file's name, such as Q4_K_M.")
    if load_format not in ("auto", "gguf", "dummy"):
        raise HubError(f"{model} is a GGUF file, and load_format={load_format}; leave it out.")
    models = [
        f"*[-._]{name}{part}.gguf"
        for name in dict.fromkeys((form, form.upper(), form.lower()))
        for part in ("", "-?????-of-?????")
    ]
    beside = None if mmproj is not None else _mmproj_of(repo_id, revision, download_dir)
    patterns = [*models, *([] if beside is None else [glob.escape(beside)])]
    files = []
    if header_only and not hub_offline():
        with contextlib.suppress(HubError):  # an earlier download
            folder = _download(repo_id, revision, download_dir, patterns, offline=True)
            if beside is None or (folder / beside).exists():
                files = _find_models(folder, models)
        if not files:
            from octavo.models.hub_headers import fetch_headers

            with _hub_errors(repo_id, revision):
                files = _find_models(fetch_headers(repo_id, revision, tuple(patterns)), models)
    else:
        files = _find_models(_download(repo_id, revision, download_dir, patterns), models)
    if not files:
        raise HubError(
            f"{repo_id} has no GGUF file whose name ends with {form}.gguf; look at its list of "
            "files on the hub."
        )
    return files[0]


def _mmproj_of(repo_id: str, revision: str | None, download_dir: str | None) -> str | None:
    """Return the name of the tower's file of a repository with GGUF files, or None.

    Raises:
        HubError: there are several, or the hub rejects the name.
    """
    from huggingface_hub import HfApi

    names: list[str] = []
    try:
        if hub_offline():
            raise DownloadError("")
        with _hub_errors(repo_id, revision):
            names = HfApi().list_repo_files(repo_id, revision=revision)
    except DownloadError:
        with contextlib.suppress(HubError):  # an earlier download, or the caller's error
            folder = _download(repo_id, revision, download_dir, ["*.gguf"], offline=True)
            names = [file.name for file in folder.glob("*.gguf")]
    try:
        return choose_mmproj(names)
    except ModelError as error:
        raise HubError(f"{repo_id}: {error}") from None


def resolve_adapter(
    name: str, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder of an adapter, or its GGUF file; download it if necessary.

    A built-in name or a local path never causes network traffic. With HF_HUB_OFFLINE set, or
    without a network, an earlier download is used.

    Args:
        name: octavo/stories-letters or -llama-calls, a folder, a GGUF file, a task of a model
            (`TaskAdapter`), or a hub id such as org/name.
        revision: branch, tag or commit on the hub.
        download_dir: folder for downloads; default: the hub client's cache.

    Raises:
        AdapterError: there is no such folder or file, or the download fails.
    """
    if (path := local_adapter(name)) is not None:
        return path
    from octavo.checkpoints.adapter import CONFIG, WEIGHTS

    try:
        folder = _download(name, revision, download_dir, [CONFIG, WEIGHTS[0]])
        if not (folder / WEIGHTS[0]).exists():
            folder = _download(name, revision, download_dir, [CONFIG, WEIGHTS[1]])
    except UnknownRepoError as error:
        raise UnknownAdapterError(str(error)) from None
    except DownloadError as error:
        raise AdapterDownloadError(str(error)) from None
    except HubError as error:
        raise AdapterError(str(error)) from None
    return folder


def local_adapter(name: str) -> Path | None:
    """Return the place of an adapter that needs no download; None if the name is a hub id.

    Raises:
        AdapterError: the name is a path, and nothing is there.
    """
    path = builtin_adapter(name) or Path(name).expanduser()
    if path.exists() or path.parent.name == TASKS:
        return path
    if path.suffix.lower() in _WEIGHT_FILES or _is_path(name):
        raise AdapterError(
            f"There is no adapter {name}; name its folder, its GGUF file, or a hub id (org/name)."
        )
    return None


def builtin_adapter(name: str) -> Path | None:
    """Return the folder of a built-in adapter; None if the name is another one."""
    return _ADAPTERS.get(name)


def _is_path(name: str) -> bool:
    """Return True for a name that is a path, and no hub id."""
    return name.startswith((".", "/", "~", "\\")) or name.count("/") > 1


def _find_models(folder: Path, patterns: list[str]) -> list[Path]:
    """Return the files of a folder that match one of the patterns, by name, without towers."""
    found = sorted(file for pattern in patterns for file in folder.glob(pattern))
    return [file for file in found if not is_mmproj(file.name)]


def _module_files(folder: Path) -> list[str]:
    """Return the files in the folders of the modules that modules.json names, if there are any."""
    modules = _read_json(folder / "modules.json")
    listed = modules if isinstance(modules, list) else []
    named = [module.get("path") for module in listed if isinstance(module, dict)]
    paths = [path for path in named if isinstance(path, str) and path]
    return [f"{path}/{name}" for path in paths for name in _MODULE_FILES]


def _adapter_files(folder: Path) -> list[str]:
    """Return the files in the folders of the adapters of a model's media, if it has such ones."""
    config = _read_json(folder / "config.json")
    named = config.get("architectures") if isinstance(config, dict) else None
    listed = named if isinstance(named, list) else []
    known = [MEDIA_ADAPTERS[it] for it in listed if isinstance(it, str) and it in MEDIA_ADAPTERS]
    folders = [path for folders in known for path in folders.values()]
    return [f"{path}/{name}" for path in folders for name in _ADAPTER_FILES]


def _read_json(file: Path) -> object:
    """Return the content of a file; None if there is none, or if it is damaged."""
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the reader of the model reports a damaged file


def local_folder(model: str) -> Path | None:
    """Return the folder of a built-in model or of a path; None if the name is a hub id.

    A model in GGUF is a file: the file itself, or the only one of a folder without config.json.

    Raises:
        ModelError: a local path is neither a folder nor a GGUF file, contains pipes or devices, or
            contains several GGUF models.
    """
    if model in _BUILTIN:
        if not (_BUILTIN[model] / "config.json").exists():
            raise ModelError(
                f"The built-in model {model} is not part of this installation: "
                f"{_BUILTIN[model]} has no config.json. Install the package again."
            )
        return _BUILTIN[model]
    if model in _ADAPTERS:
        return _ADAPTERS[model]  # the reader of the model says that it is an adapter
    path = Path(model).expanduser()
    if path.is_dir():
        for file in path.iterdir():
            if not file.is_dir():
                require_file(file)
        return find_gguf(path) or path
    if path.exists():
        require_file(path)
        if path.suffix == ".gguf":
            return path
        raise ModelError(
            f"{model} is a file; name the model's folder (config.json, safetensors, tokenizer), or "
            "a GGUF file."
        )
    if path.suffix.lower() in _WEIGHT_FILES:
        raise ModelError(
            f"The file {model} does not exist; name a GGUF file or the model's folder "
            "(config.json, safetensors, tokenizer)."
        )
    if _is_path(model):
        raise ModelError(f"There is no folder {model}.")
    return None


def resolve_folders(config: EngineConfig, *, header_only: bool = False) -> tuple[Path, Path]:
    """Return the folders of a config's model and of its tokenizer; see `resolve_model`."""
    name, load = config.model, config.load
    path = resolve_model(
        name.model,
        revision=name.revision,
        download_dir=load.download_dir,
        load_format=load.load_format,
        header_only=header_only,
        mmproj=load.mmproj if name.limit("image") else "off",
    )
    if name.tokenizer is None:
        return path, path
    tokenizer = resolve_model(name.tokenizer, download_dir=load.download_dir, load_format="dummy")
    return path, tokenizer


class LocalModel(NamedTuple):
    """Model that needs no download."""

    name: str
    nbytes: int
    """Size on the disk in bytes."""
    path: Path
    is_builtin: bool


def list_models() -> list[LocalModel]:
    """Return the built-in models, then those in the hub client's cache, by name.

    Incomplete downloads without config.json, or Mistral's params.json, are left out.
    """
    import huggingface_hub
    from huggingface_hub import errors

    found = [
        LocalModel(name, _folder_size(_BUILTIN[name]), _BUILTIN[name], True) for name in _LISTED
    ]
    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except (errors.CacheNotFound, ValueError):  # nothing has been downloaded yet
        return found
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        if repo.repo_type == "model" and names & {"config.json", PARAMS}:
            found.append(LocalModel(repo.repo_id, repo.size_on_disk, repo.repo_path, False))
    return found


def _folder_size(folder: Path) -> int:
    """Return the size in bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _download(
    repo_id: str,
    revision: str | None,
    download_dir: str | None,
    patterns: list[str],
    ignored: list[str] = _IGNORED,
    *,
    offline: bool | None = None,
) -> Path:
    """Return the folder of a repository's files that match `patterns`, and none of `ignored`.

    With `offline`, they are those of an earlier download; None: as HF_HUB_OFFLINE says.
    """
    # Imported here: a local model needs no hub client.
    import huggingface_hub

    with _hub_errors(repo_id, revision):
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                local_files_only=hub_offline() if offline is None else offline,
            )
        )


@contextlib.contextmanager
def _hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Raise `HubError` with the reason and the solution for all errors of the hub client."""
    from huggingface_hub import errors

    offline = hub_offline()
    where = f"revision {revision!r} of {repo_id}" if revision else repo_id
    try:
        yield
    except ModelError:
        raise
    except errors.HFValidationError:
        raise UnknownRepoError(
            f"{repo_id!r} is neither a folder here nor a hub id (org/name).{_similar(repo_id)}"
        ) from None
    except errors.GatedRepoError:
        raise HubError(
            f"{repo_id} is gated: its owner must grant you access. Request access on the model's "
            "page, then log in with `hf auth login` or set HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UnknownRepoError(
            f"{repo_id} is neither a folder here nor a model on the hub; check the spelling."
            f"{_similar(repo_id)} If it is private, log in with `hf auth login` or set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{repo_id} has no revision {revision!r}; name a branch, tag or commit of it."
        ) from None
    except errors.IncompleteSnapshotError as error:
        incomplete = HubError if offline else DownloadError
        raise incomplete(
            f"The copy of {where} in {error.snapshot_path} is incomplete, and "
            f"{_unreachable(offline)}. Go online and start again: the download continues."
        ) from None
    except errors.LocalEntryNotFoundError as error:
        cause = "" if error.__cause__ is None else f" ({_first_line(error.__cause__)})"
        kind = UnknownRepoError if offline else DownloadError
        raise kind(
            f"{where} has not been downloaded before, and {_unreachable(offline)}{cause}. "
            f"Go online, or name the folder of a model.{_similar(repo_id)}"
        ) from None
    except errors.HfHubHTTPError as error:
        failed = error.response.status_code >= 500 or error.response.status_code == 429
        hub_error = DownloadError if failed else HubError
        raise hub_error(f"The hub rejected {where}: {_first_line(error)}.") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"The disk is full while downloading {where}: free space, or choose another "
                "folder with download_dir or HF_HOME. Downloaded data is kept."
            ) from None
        raise DownloadError(f"Downloading {where} failed: {_first_line(error)}.") from None
    except Exception as error:
        # The client's network library has its own exception tree, which changes between versions.
        raise DownloadError(
            f"Downloading {where} failed: {type(error).__name__}: {_first_line(error)}. Check the "
            "network and try again: downloaded data is kept."
        ) from error


def _similar(name: str) -> str:
    """Return a hint that names the built-in model with a similar name, or ""."""
    known = {full if "/" in name else full.partition("/")[2]: full for full in _BUILTIN}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f" Did you mean {known[near[0]]}?" if near else ""


def _unreachable(offline: bool) -> str:
    return "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"


def _first_line(error: BaseException) -> str:
    return reason_of(error).strip().splitlines()[0].rstrip(".")
