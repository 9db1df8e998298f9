from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.layers.mrope import MRopeArray, mrope_positions, sections_of_pairs
from octavo.layers.rope_spec import RopeSpec
from octavo.layers.rotary import build_cos_sin_cache
from octavo.messages import (
    CoreSamplingParams,
    MultiModalFeatureSpec,
    NewRequestData,
    PlaceholderRange,
)

ROPE = RopeSpec("default", 10000.0, 16, 512)
SECTIONS = (4, 2, 2)


def item(offset, grid):
    place = PlaceholderRange(offset, int(np.prod(grid)))
    return MultiModalFeatureSpec("image", "a", place, {}, place.length, grid)


def row(num_tokens, *items):
    params = CoreSamplingParams(temperature=0.0, max_tokens=1)
    return NewRequestData([0] * num_tokens, num_tokens, params, 0, mm_features=list(items))


def test_positions_are_those_of_transformers():
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    config = Qwen2VLConfig(
        text_config={
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "intermediate_size": 8,
            "vocab_size": 50,
        },
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 1},
        image_token_id=1,
        vision_start_token_id=2,
        video_token_id=3,
    )
    model = Qwen2VLModel(config)
    grids = [(1, 4, 6), (1, 2, 2), (1, 6, 2)]
    ids, items = [5, 6], []
    for _, height, width in grids:
        ids.append(2)
        items.append(item(len(ids), (1, height // 2, width // 2)))
        ids += [1] * (height * width // 4) + [7, 8]
    kinds = torch.tensor([[int(token == 1) for token in ids]])
    expected, delta = model.get_rope_index(
        torch.tensor([ids]), image_grid_thw=torch.tensor(grids), mm_token_type_ids=kinds
    )
    positions, shift = mrope_positions(items, len(ids))
    assert positions.tolist() == expected[:, 0].tolist()
    assert shift == int(delta)


def test_interleaved_sections_are_those_of_transformers():
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    freqs = torch.arange(3)[:, None, None, None].expand(3, 1, 1, 8).clone()
    for sections in [(4, 2, 2), (2, 3, 3), (3, 3, 2)]:
        rotary = SimpleNamespace(mrope_section=sections)
        found = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(rotary, freqs.clone())
        expected = found[0, 0, :8]
        assert sections_of_pairs(ROPE, sections, True).tolist() == expected.tolist()
    assert sections_of_pairs(ROPE, SECTIONS, False).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_step_has_the_rows_of_its_tokens(interleaved):
    array = MRopeArray(ROPE, SECTIONS, interleaved)
    filler = array.make_filler(4)
    picture = item(3, (1, 2, 4))
    filler.add_row(2, row(20, picture))
    filler.add_row(0, row(9))
    table = build_cos_sin_cache(ROPE, 64).numpy()
    places, _ = mrope_positions([picture], 30)
    kinds = np.tile(sections_of_pairs(ROPE, SECTIONS, interleaved), 2)

    def expect(start, count):
        at = places[:, start : start + count][kinds].T
        return np.take_along_axis(table, at, axis=0)

    # Chunks that end and begin within the picture, and tokens of an answer.
    for start, count in [(0, 2), (0, 5), (5, 3), (5, 10), (11, 4), (25, 1)]:
        out = np.zeros((count + 2, 16), np.float32)
        filler.fill(out, np.array([0, 2]), np.array([7, start]), np.array([2, count]))
        assert (out[:2] == table[7:9]).all()
        assert (out[2:] == expect(start, count)).all()
    filler.add_row(2, row(20))
    out = np.zeros((5, 16), np.float32)
    filler.fill(out, np.array([2]), np.array([3]), np.array([5]))
    assert (out == table[3:8]).all()


def part(offset, grid, follows, time):
    place = PlaceholderRange(offset, int(np.prod(grid)))
    return MultiModalFeatureSpec("video", "a", place, {}, place.length, grid, follows, time)


def test_parts_of_a_video_have_the_positions_of_one_grid():
    """The text behind a video has the position after the largest one (arXiv:2409.12191, 2.1)."""
    whole, shift = mrope_positions([item(3, (4, 2, 3)), item(30, (1, 1, 2))], 40)
    parts = [part(3 + 6 * i, (1, 2, 3), 6 * i, i) for i in range(4)]
    found, other = mrope_positions([*parts, item(30, (1, 1, 2))], 40)
    np.testing.assert_array_equal(found, whole)
    assert other == shift
    # Times with gaps: the last part has the largest position.
    late = [part(3 + 6 * i, (1, 2, 3), 6 * i, 5 * i) for i in range(4)]
    positions, _ = mrope_positions(late, 30)
    assert positions[0, 3:27:6].tolist() == [3, 8, 13, 18]
    assert positions[:, 27].tolist() == [19, 19, 19]
