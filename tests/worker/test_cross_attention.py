from types import SimpleNamespace
from unittest.mock import Mock

from octavo.messages import SchedulerOutput
from octavo.worker.cross_attention import CrossAttentionRows
from tests.fakes import picture


def test_errors_are_kept_while_a_request_has_the_item():
    encoder, item = Mock(), picture("a", 0, 4)
    encoder.run_apart.return_value = [[None] * 4], {0: "bad"}
    rows = CrossAttentionRows(encoder, [], [], SimpleNamespace(block_size=8), None, None)
    batch = SimpleNamespace(features={"1": [item]}, row_of={"1": 0})
    new = SimpleNamespace(req_id="1", new=SimpleNamespace(mm_features=[item]))
    rows.compute(SchedulerOutput([new], scheduled_encoder_inputs={"1": [0]}), batch)
    batch.features = {"2": [item]}
    rows.compute(SchedulerOutput(), batch)
    assert rows.failed == {"a": "bad"}
    batch.features = {"3": [picture("b", 0, 4)]}
    rows.compute(SchedulerOutput(), batch)
    assert rows.failed == {}
