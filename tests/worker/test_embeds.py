import numpy as np

from octavo.kernels.native import NativeOps
from octavo.system.tensor import from_numpy, zeros
from octavo.worker.embeds import EmbedWriter


def rows(count, *values):
    """Return rows with two columns of each value."""
    return from_numpy(np.tile(np.repeat(np.float32(values), 2), (count, 1)))


def test_rows_replace_embeddings_and_go_to_the_first_layers():
    deepstack = [zeros(6, 2, dtype="float32") for _ in range(2)]
    writer = EmbedWriter(NativeOps(), 2, "float32", deepstack)
    x = zeros(6, 2, dtype="float32")
    writer.write(x, [(1, rows(2, 5, 6, 7)), (4, rows(1, 8))])
    assert x.numpy()[:, 0].tolist() == [0, 5, 5, 0, 8, 0]
    assert [level.numpy()[:, 1].tolist() for level in deepstack] == [
        [0, 6, 6, 0, 0, 0],
        [0, 7, 7, 0, 0, 0],
    ]
    # The next step finds zeros where it has no rows.
    writer.write(x, [(2, rows(1, 1, 2, 3))])
    assert [level.numpy()[:, 0].tolist() for level in deepstack] == [
        [0, 0, 2, 0, 0, 0],
        [0, 0, 3, 0, 0, 0],
    ]
    writer.write(x, [])
    assert not deepstack[0].numpy().any()
