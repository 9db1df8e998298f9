"""Folders of model names, and messages for failures of the hub."""

import errno
import json
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from octavo.checkpoints.registry import open_checkpoint
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
)
from octavo.errors import (
    AdapterDownloadError,
    AdapterError,
    HubError,
    ModelError,
    UnknownAdapterError,
)
from octavo.models import hub
from octavo.models.hub import resolve_adapter, resolve_model
from octavo.models.media_adapters import MEDIA_ADAPTERS


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.mark.usefixtures("no_network")
class TestLocal:
    def test_builtin(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        names = (BUILTIN_MODEL, BUILTIN_DRAFT_MODEL, BUILTIN_EAGLE_HEAD, BUILTIN_MEDUSA_HEADS)
        names += (BUILTIN_ENCODER, BUILTIN_RERANKER, BUILTIN_EYES, BUILTIN_SPEECH)
        assert set(names) == hub._BUILTIN.keys()
        for name in names:
            folder = hub._BUILTIN[name]
            assert folder.parts[-3:] == ("octavo", "builtin", name.split("/")[1])
            assert (folder / "model.safetensors").exists()
            (tmp_path / "config.json").write_text("{}")
            monkeypatch.setitem(hub._BUILTIN, name, tmp_path)
            assert resolve_model(name) == tmp_path

    def test_builtin_that_is_not_installed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(hub._BUILTIN, BUILTIN_MODEL, tmp_path)
        with pytest.raises(ModelError, match="not part of this installation"):
            resolve_model(BUILTIN_MODEL)

    def test_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert resolve_model(str(tmp_path)) == tmp_path
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model").mkdir()
        assert resolve_model("~/model") == tmp_path / "model"
        monkeypatch.chdir(tmp_path)
        assert resolve_model("model") == Path("model")

    @pytest.mark.parametrize("name", ["/no/such/folder", "./model", "~/model", "a/b/c", ".."])
    def test_no_folder(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        if name == "..":
            assert resolve_model(name) == Path("..")
            return
        with pytest.raises(ModelError, match="There is no folder"):
            resolve_model(name)

    def test_file(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.touch()
        with pytest.raises(ModelError, match="is a file; name the model's folder"):
            resolve_model(str(file))

    def test_gguf_file(self, tmp_path: Path) -> None:
        file = tmp_path / "model-00001-of-00002.gguf"
        for name in (file.name, "model-00002-of-00002.gguf", "mmproj-model.gguf"):
            (tmp_path / name).touch()
        assert resolve_model(str(file)) == resolve_model(str(tmp_path)) == file

    def test_file_that_is_not_there(self) -> None:
        with pytest.raises(ModelError, match=r"model\.gguf does not exist; name a GGUF file"):
            resolve_model("model.gguf")


class FakeHub:
    """Stand-in for `snapshot_download`: keeps its arguments, then raises or answers."""

    def __init__(self, result: Exception | Path) -> None:
        self.result = result

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.repo_id, self.options = repo_id, options
        if isinstance(self.result, Exception):
            raise self.result
        return str(self.result)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    request = httpx.Request("GET", "http://hub.invalid/api")
    response: Any = httpx.Response(status, request=request)
    return kind(f"{status} Client Error.\n\nDetails.", response=response)


def test_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    folder = resolve_model("org/name", revision="v2", download_dir="somewhere")
    assert folder == tmp_path
    assert fake.repo_id == "org/name"
    assert fake.options["revision"] == "v2"
    assert fake.options["cache_dir"] == "somewhere"
    assert fake.options["local_files_only"] is False


@pytest.mark.usefixtures("no_network")
def test_local_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora.gguf").touch()
    for name in ("lora", "lora.gguf"):
        assert resolve_adapter(str(tmp_path / name)) == tmp_path / name
        assert resolve_adapter(f"~/{name}") == tmp_path / name
    for name in ("/no/such/folder", "./lora2", "a/b/c", "other.gguf"):
        with pytest.raises(AdapterError, match="There is no adapter"):
            resolve_adapter(name)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", BUILTIN_ADAPTERS)
def test_builtin_adapters(name: str) -> None:
    folder = resolve_adapter(name)
    assert folder.parts[-3:] == ("octavo", "builtin", name.split("/")[1])
    assert (folder / "adapter_model.safetensors").exists()
    with pytest.raises(ModelError, match="is an adapter for octavo/stories, not a model"):
        _ = open_checkpoint(resolve_model(name)).config


@pytest.mark.parametrize("stored", ["adapter_model.safetensors", "adapter_model.bin"])
def test_adapters_of_the_hub(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the adapter's own files are downloaded, in the newer form if there is one."""
    wanted = []

    def download(repo_id: str, **options: Any) -> str:
        assert (repo_id, options["revision"], options["cache_dir"]) == ("org/lora", "v2", "cache")
        wanted.extend(options["allow_patterns"])
        if stored in options["allow_patterns"]:
            (tmp_path / stored).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_adapter("org/lora", revision="v2", download_dir="cache") == tmp_path
    assert set(wanted) == {"adapter_config.json", "adapter_model.safetensors", stored}


@pytest.mark.parametrize(
    ("error", "offline", "kind"),
    [
        (http_error(errors.RepositoryNotFoundError, 404), "0", UnknownAdapterError),
        (errors.HFValidationError("bad"), "0", UnknownAdapterError),
        (errors.LocalEntryNotFoundError("?"), "1", UnknownAdapterError),
        (errors.LocalEntryNotFoundError("?"), "0", AdapterDownloadError),
        (http_error(errors.HfHubHTTPError, 503), "0", AdapterDownloadError),
        (http_error(errors.HfHubHTTPError, 403), "0", AdapterError),
        (OSError("broken"), "0", AdapterDownloadError),
        (http_error(errors.GatedRepoError, 403), "0", AdapterError),
    ],
)
def test_adapters_that_the_hub_does_not_have(
    error: Exception, offline: str, kind: type[AdapterError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that cannot be reached, or does not show the files, may have them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", FakeHub(error))
    with pytest.raises(AdapterError, match="org/lora") as caught:
        resolve_adapter("org/lora")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("load_format", "wanted"),
    [
        ("auto", {"model-00001-of-00002.safetensors", "model.safetensors"}),
        ("pt", {"pytorch_model.bin", "pytorch_model-00001-of-00002.bin"}),
        # The folder has no safetensors after the first download.
        ("auto or pt", {"pytorch_model.bin", "pytorch_model-00001-of-00002.bin"}),
        ("dummy", set()),
    ],
)
def test_only_needed_files(
    load_format: str, wanted: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    if load_format == "auto":
        (tmp_path / "model.safetensors").touch()
    resolve_model("org/name", load_format=load_format.removesuffix(" or pt"))
    always = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"}
    always |= {"chat_template.jinja", "merges.txt", "vocab.json", "model.safetensors.index.json"}
    repo = always | {"model.safetensors", "model-00001-of-00002.safetensors", "README.md"}
    repo |= {"pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "training_args.bin"}
    repo |= {"consolidated.safetensors", "original/params.json", "onnx/model.onnx", "tf_model.h5"}
    chosen = huggingface_hub.utils.filter_repo_objects(
        sorted(repo),
        allow_patterns=fake.options["allow_patterns"],
        ignore_patterns=fake.options["ignore_patterns"],
    )
    assert set(chosen) == always | wanted


@pytest.mark.parametrize("load_format", ["auto", "mistral"])
def test_mistrals_own_form(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consolidated files are loaded if the form is named, or is the only one."""
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    (tmp_path / "params.json").write_text("{}")
    files = {"consolidated.safetensors", "consolidated.safetensors.index.json", "params.json"}
    others = {"model-00001-of-00002.safetensors", "original/consolidated.safetensors"}
    others |= {"consolidated.00.pth", "README.md"}

    def chosen() -> set[str]:
        resolve_model("org/name", load_format=load_format)
        names = huggingface_hub.utils.filter_repo_objects(
            sorted(files | others | {"tekken.json"}),
            allow_patterns=fake.options["allow_patterns"],
            ignore_patterns=fake.options["ignore_patterns"],
        )
        return set(names)

    assert chosen() == files | {"tekken.json"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert ("consolidated.safetensors" in chosen()) == (load_format == "mistral")


def test_folders_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of vectors has small files in folders of its own; other folders stay on the hub."""
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    (tmp_path / "model.safetensors").touch()
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": 5}, "x"]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    resolve_model("org/name")
    wanted = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    others = {"onnx/model.onnx", "openvino/config.json", "2_Dense/README.md", "model.safetensors"}
    chosen = huggingface_hub.utils.filter_repo_objects(
        sorted(wanted | others),
        allow_patterns=fake.options["allow_patterns"],
        ignore_patterns=fake.options["ignore_patterns"],
    )
    assert set(chosen) == wanted
    for damaged in ("{", "5", "[" * 100_000):
        (tmp_path / "modules.json").write_text(damaged)
        resolve_model("org/name")
        assert "*.json" in fake.options["allow_patterns"]


@pytest.mark.parametrize("name", MEDIA_ADAPTERS)
def test_folders_of_adapters_of_media(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phi-4 multimodal comes with the adapters in its folder; other folders stay on the hub."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    (tmp_path / "model.safetensors").touch()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": [5, ["x"], name]}))
    assert resolve_model("org/name", revision="v2") == tmp_path
    assert fake.options["revision"] == "v2"
    files = ("adapter_config.json", "adapter_model.safetensors")
    wanted = {f"{folder}/{file}" for folder in ("vision-lora", "speech-lora") for file in files}
    others = {"vision-lora/README.md", "figures/adapter_config.json", "onnx/model.safetensors"}
    chosen = huggingface_hub.utils.filter_repo_objects(
        sorted(wanted | others),
        allow_patterns=fake.options["allow_patterns"],
        ignore_patterns=fake.options["ignore_patterns"],
    )
    assert set(chosen) == wanted
    resolve_model("org/name", load_format="dummy")
    assert "*.json" in fake.options["allow_patterns"]
    for other in ('{"architectures": 5}', '{"architectures": ["LlamaForCausalLM"]}', "5", "{"):
        config.write_text(other)
        resolve_model("org/name")
        assert "*.json" in fake.options["allow_patterns"]


@pytest.mark.parametrize("offline", [False, True])
def test_adapters_of_media_that_were_not_downloaded(
    offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, a model without its adapters can be used; the engine warns if it needs them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", str(int(offline)))
    config = {"architectures": ["Phi4MMForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    error = errors.IncompleteSnapshotError("", str(tmp_path))

    def download(repo_id: str, **options: Any) -> str:
        if "vision-lora/adapter_config.json" in options["allow_patterns"]:
            raise error
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if offline:
        assert resolve_model("org/name") == tmp_path
    else:
        with pytest.raises(HubError, match="Go online and start again"):
            resolve_model("org/name")


def test_gguf_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    for load_format in ("auto", "gguf", "dummy"):
        with pytest.raises(
            HubError, match=r"org/name has no GGUF file whose name ends with Q4_K_M"
        ):
            resolve_model("org/name:Q4_K_M", load_format=load_format)
    repo = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_K_M.gguf", "config.json", "mmproj-f16.gguf"]
    for name in (*repo, "l.q8_0-00001-of-00002.gguf", "l.q8_0-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    assert resolve_model("org/name:Q4_K_M") == tmp_path / "m-Q4_K_M.gguf"
    assert resolve_model("org/name:Q8_0") == tmp_path / "l.q8_0-00001-of-00002.gguf"
    wanted = fake.options["allow_patterns"]
    assert not [*huggingface_hub.utils.filter_repo_objects(repo, allow_patterns=wanted)]
    assert fake.repo_id == "org/name"
    with pytest.raises(HubError, match=r"'\*' is not the end of a file's name"):
        resolve_model("org/name:*")
    with pytest.raises(HubError, match="such as org/name:Q4_K_M"):
        resolve_model("org/name", load_format="gguf")
    with pytest.raises(HubError, match="is a GGUF file, and load_format=pt; leave it out"):
        resolve_model("org/name:Q4_K_M", load_format="pt")


def test_tower_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file comes with its tower; without a network, an earlier download is used."""
    fake = FakeHub(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    repo = ["m-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf", "README.md"]
    listed: list[str] | Exception = repo

    def list_files(self: Any, repo_id: str, revision: str | None) -> list[str]:
        if isinstance(listed, Exception):
            raise listed
        return listed

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_files)
    for name in repo:
        (tmp_path / name).touch()
    for mmproj, tower in ((None, "mmproj-Q8_0.gguf"), ("off", ""), ("own.gguf", "")):
        assert resolve_model("org/name:Q8_0", mmproj=mmproj) == tmp_path / "m-Q8_0.gguf"
        assert (tower in fake.options["allow_patterns"]) == bool(tower)
    listed = httpx.ConnectError("no route")
    assert resolve_model("org/name:Q8_0", mmproj=None) == tmp_path / "m-Q8_0.gguf"
    assert "mmproj-Q8_0.gguf" in fake.options["allow_patterns"]
    # A plan reads headers, unless both files were downloaded earlier.
    listed = [*repo, "m-Q4_K_M.gguf"]
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "m-Q4_K_M.gguf").touch()
    monkeypatch.setattr("octavo.models.hub_headers.fetch_headers", lambda *args: headers)
    for form, place in (("Q8_0", tmp_path), ("Q4_K_M", headers)):
        found = resolve_model(f"org/name:{form}", mmproj=None, header_only=True)
        assert found == place / f"m-{form}.gguf"
    (tmp_path / "mmproj-Q8_0.gguf").unlink()
    (headers / "m-Q8_0.gguf").touch()
    found = resolve_model("org/name:Q8_0", mmproj=None, header_only=True)
    assert found == headers / "m-Q8_0.gguf"
    listed = ["m-Q8_0.gguf", "mmproj-a.gguf", "mmproj-b.gguf"]
    with pytest.raises(HubError, match=r"org/name: there are several mmproj files.*--mmproj"):
        resolve_model("org/name:Q8_0", mmproj=None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.RepositoryNotFoundError, 401), r"neither a folder .*nor a model"),
        (http_error(errors.GatedRepoError, 403), r"is gated.*HF_TOKEN"),
        (http_error(errors.RevisionNotFoundError, 404), r"has no revision 'v9'"),
        (http_error(errors.DisabledRepoError, 403), r"hub rejected .*403 Client Error\.$"),
        (http_error(errors.HfHubHTTPError, 503), r"hub rejected .*503 Client Error\.$"),
        (errors.HFValidationError("bad"), r"neither a folder here nor a hub id"),
        (errors.LocalEntryNotFoundError("?"), r"not been downloaded before.*cannot be reached"),
        (errors.IncompleteSnapshotError("?", "/cache"), r"in /cache is incomplete"),
        (OSError(errno.ENOSPC, "No space left on device"), r"disk is full.*download_dir"),
        (OSError(errno.EACCES, "Permission denied"), r"failed: .*Permission denied"),
        (httpx.ConnectError("no route"), r"ConnectError: no route\. Check the network"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", FakeHub(error))
    with pytest.raises(HubError, match=message):
        resolve_model("org/name", revision="v9")


def test_offline_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, which finds nothing and must not connect."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        resolve_model("org/name", download_dir=str(tmp_path))


def test_offline_with_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commit = "0" * 40
    folder = tmp_path / "models--org--name" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    assert resolve_model("org/name", download_dir=str(tmp_path)) == folder


def test_invalid_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match="neither a folder here nor a hub id"):
        resolve_model("not a name", download_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("octavo/storys", BUILTIN_MODEL), ("storys-draft", BUILTIN_DRAFT_MODEL), ("org/name", None)],
)
def test_a_built_in_model_is_suggested(
    name: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError) as error:
        resolve_model(name, download_dir=str(tmp_path))
    assert ("Did you mean" in str(error.value)) == (meant is not None)
    assert meant is None or f"Did you mean {meant}?" in str(error.value)
