"""A config.json of transformers 4 reads like one of transformers 5."""

import json
from pathlib import Path

import pytest

from tests.models.cases import CASES
from tests.models.harness import make_hf, spec_of


def old_form(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] == "default":
        rope = None
    else:
        rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config.pop("layer_types", None)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("case", ["llama", "llama-llama3", "llama-yarn", "gemma3", "gemma2"])
def test_old_and_new_config_read_alike(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    new = spec_of(tmp_path)
    old_form(tmp_path)
    if case == "gemma3":
        data = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(data | {"sliding_window_pattern": 2}))
    assert spec_of(tmp_path) == new
