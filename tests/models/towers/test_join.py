"""Text parts that read the rows of towers."""

import json

import pytest

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError
from octavo.models.blocks.attention import SectionRope
from octavo.models.registry import read_spec
from tests.models.harness import spec_of
from tests.pictures import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    save_model("qwen3_vl", folder)
    return folder


def change(folder, tmp_path, **fields):
    config = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        if value is None:
            del config[name]
        else:
            config[name] = {**config[name], **value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_tower_and_the_sections(folder):
    spec = read_spec(open_checkpoint(folder))
    (array,) = spec.step_arrays
    assert (array.sections, array.interleaved) == ((3, 3, 2), True)
    assert all(isinstance(layer.blocks[0].positions, SectionRope) for layer in spec.layers)
    assert (spec.deepstack, spec.left_out) == (2, "")
    assert spec.encoder("image") is spec.encoder("video") is spec.encoders[0]
    assert spec.encoder("audio") is None


def test_a_text_model_has_none_of_it(folder, tmp_path):
    for spec in (
        spec_of(folder),
        read_spec(open_checkpoint(change(folder, tmp_path, vision_config=None))),
    ):
        assert not spec.encoders
        assert not spec.step_arrays
        assert spec.left_out == "pictures and sound"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mrope_section": [3, 3]}, "list of 3 numbers"),
        ({"mrope_section": [3, 3, -2]}, "list of 3 numbers"),
        ({"mrope_section": [3, 3, 3]}, "sum 8"),
    ],
)
def test_wrong_sections(folder, tmp_path, fields, message):
    config = json.loads((folder / "config.json").read_text())["text_config"]["rope_parameters"]
    path = change(folder, tmp_path, text_config={"rope_parameters": config | fields})
    with pytest.raises(ModelError, match=message):
        read_spec(open_checkpoint(path))


def test_an_unsupported_tower_leaves_a_text_model(folder, tmp_path):
    path = change(folder, tmp_path, vision_config={"num_position_embeddings": 15})
    with pytest.raises(ModelError, match=r"a square.* with language_model_only=True"):
        read_spec(open_checkpoint(path))
    assert not spec_of(path).encoders
