import threading

from octavo.kv_connector.inbox import TransferInbox
from octavo.messages import KVConnectorOutput


def received(*ids, invalid=()):
    return KVConnectorOutput(finished_recving=list(ids), invalid_block_ids=list(invalid))


def test_all_ranks_must_have_finished():
    woken = []
    inbox = TransferInbox(2, lambda: woken.append(1))
    inbox.put(received("a", invalid=[3]))
    assert not inbox.has_finished
    assert not woken
    inbox.put(received("b"))
    inbox.put(received("b", invalid=[9]))
    assert woken == [1]
    assert inbox.take() == received("b", invalid=[9])
    inbox.put(received("a", invalid=[4]))
    output = inbox.take()
    assert output.finished_recving == ["a"]
    assert sorted(output.invalid_block_ids) == [3, 4]
    assert not inbox.has_finished


def test_sending_is_counted_by_itself():
    inbox = TransferInbox(2)
    inbox.put(KVConnectorOutput(finished_sending=["a"], finished_recving=["a"]))
    inbox.put(KVConnectorOutput(finished_sending=["a"]))
    assert inbox.take() == KVConnectorOutput(finished_sending=["a"])


def test_waiting():
    inbox = TransferInbox(1)
    inbox.wait(0.01)
    thread = threading.Timer(0.05, inbox.put, [received("a")])
    thread.start()
    inbox.wait(60)
    assert inbox.has_finished
    thread.join()
