"""Small pooling models, their results, and the expected ones."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.pooling_params import PoolingParams
from tests.models.harness import make_prompts

PROMPTS = make_prompts(203, (1, 3, 40, 17, 5, 77))
PARTS = "sentence_transformers.models."


@contextmanager
def open_llm(folder: Path, **settings: Any) -> Iterator[LLM]:
    """Yield a small model in float32, without a tokenizer unless the folder has one."""
    tokenizer = (folder / "tokenizer.json").exists()
    defaults = {"dtype": "float32", "max_model_len": 128, "weight_cache": "off"}
    defaults |= {"skip_tokenizer_init": not tokenizer, "num_gpu_blocks_override": 64}
    with LLM(str(folder), **defaults | settings) as llm:
        yield llm


def results(
    llm: LLM, task: str | None, prompts: Sequence[list[int]] = PROMPTS, **params: Any
) -> list[np.ndarray]:
    """Return the result of each prompt of token ids."""
    asked = PoolingParams(task=task, **params)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    return [output.outputs.data for output in llm.encode(given, asked, use_tqdm=False)]


def pool(folder: Path, task: str | None, **settings: Any) -> list[np.ndarray]:
    """Return the result of each of `PROMPTS`."""
    with open_llm(folder, **settings) as llm:
        return results(llm, task)


def states(model: Any, prompts: Sequence[list[int]] = PROMPTS) -> list[torch.Tensor]:
    """Return the last hidden states of a bare model of transformers, [tokens, size] each."""
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


def logits(model: Any, prompts: Sequence[list[int]] = PROMPTS) -> list[torch.Tensor]:
    """Return the logits of a model of transformers with a head."""
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in prompts]


def assert_near(found: Sequence[np.ndarray], expected: Sequence[torch.Tensor]) -> None:
    """Compare results with those of transformers; they must differ from each other."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=2e-5)
    assert not np.allclose(found[2].ravel()[:1], found[3].ravel()[:1], rtol=1e-3, atol=1e-4)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors with length 1."""
    return torch.nn.functional.normalize(x, dim=-1)


def write_json(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def write_modules(folder: Path, *modules: tuple[str, dict[str, Any] | None]) -> None:
    """Write a sentence-transformers folder: names of modules after the Transformer, and configs."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{PARTS}Transformer"}]
    for i, (name, config) in enumerate(modules, 1):
        path = f"{i}_{name}"
        listed.append({"idx": i, "name": str(i), "path": path, "type": f"{PARTS}{name}"})
        if config is not None:
            write_json(folder / path / "config.json", config)
    write_json(folder / "modules.json", listed)


def pooling(*modes: str) -> tuple[str, dict[str, Any]]:
    """Return a Pooling module with modes such as mean_tokens."""
    known = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    known += ("weightedmean_tokens", "lasttoken")
    return "Pooling", {f"pooling_mode_{mode}": mode in modes for mode in known}


NORMALIZE: tuple[str, None] = ("Normalize", None)


def write_dense(
    folder: Path, index: int, inputs: int, outputs: int, activation: str, *, bias: bool = True
) -> torch.nn.Linear:
    """Write the files of a Dense module, and return it."""
    torch.manual_seed(index)
    linear = torch.nn.Linear(inputs, outputs, bias=bias)
    path = folder / f"{index}_Dense"
    write_json(path / "config.json", dense_config(inputs, outputs, activation, bias=bias))
    tensors = {f"linear.{name}": value.detach() for name, value in linear.state_dict().items()}
    save_file(tensors, path / "model.safetensors")
    return linear


def dense_config(
    inputs: int, outputs: int, activation: str, *, bias: bool = True
) -> dict[str, Any]:
    """Return the config of a Dense module."""
    part = "linear" if activation == "Identity" else "activation"
    function = f"torch.nn.modules.{part}.{activation}"
    fields = {"in_features": inputs, "out_features": outputs, "bias": bias}
    return fields | {"activation_function": function}


def change_config(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | fields
    write_json(folder / "config.json", {k: v for k, v in config.items() if v is not None})


def change_weights(folder: Path, drop: Sequence[str] = (), **added: torch.Tensor) -> None:
    """Change the tensors of a folder; __ in names stands for a point."""
    tensors = load_file(folder / "model.safetensors")
    for name in drop:
        del tensors[name]
    tensors |= {name.replace("__", "."): tensor for name, tensor in added.items()}
    save_file(tensors, folder / "model.safetensors")
