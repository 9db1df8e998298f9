"""Scheduler's half of a `P2PConnector`: the blocks it offers, and the peers it trusts."""

from dataclasses import replace

import msgspec
import pytest

from octavo.config import CacheConfig, EngineConfig, KVTransferConfig
from octavo.errors import ConfigError, RequestError
from octavo.kv_connector import p2p
from octavo.kv_connector.p2p import P2PScheduler
from octavo.messages import KVConnectorOutput
from octavo.models.state_cache import StateCache
from octavo.request import RequestStatus
from octavo.scheduler.checks import check_transfer
from tests.fakes import STATE, FakeEngine, expected_output, pages
from tests.params import set_options
from tests.transfers import FakeTransfers, make_layout

PROMPT = list(range(30))
PREFILL = {"do_remote_decode": True}


@pytest.fixture(autouse=True)
def own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(p2p.time, "monotonic", lambda: now[0])
    return now


def connector(kv, slots=50, *, key=None, model="model", role="kv_both", ranks=1, **extra):
    layout = replace(make_layout(kv), model=model)
    slots += layout.num_pieces
    extra |= {"cpu_bytes_to_use": slots * layout.copy_nbytes}
    transfer = KVTransferConfig(
        kv_connector="P2PConnector", engine_id="0", kv_role=role, kv_connector_extra_config=extra
    )
    config = EngineConfig(cache=CacheConfig(kv_transfer_config=transfer))
    if key is not None:
        key.chmod(0o600)
        config = EngineConfig(
            cache=config.cache, parallel=type(config.parallel)(cluster_key_file=str(key))
        )
    made = P2PScheduler(config, layout)
    address = {
        "host": "127.0.0.1",
        "port": 1,
        "machine": "m",
        "pid": 1,
        "descriptor": 3,
        "nonce": "00" * 16,
        "part": msgspec.to_builtins(layout.part),
        "states": layout.state_division,
    }
    made.set_xfer_handshake_metadata([address] * ranks)
    return made


def make_engine(caches=None, num_states=0, **options):
    engine = FakeEngine(
        caches=caches or pages(None),
        num_states=num_states,
        make_connector=lambda kv: connector(kv, **options),
    )
    engine.transfers = FakeTransfers(engine.executor)
    engine.on_step = engine.transfers.step
    return engine


def half(engine):
    return engine.scheduler._connector


def prefill(engine, name="a", prompt=PROMPT):
    request = engine.add(name, prompt, max_tokens=1)
    set_options(request, kv_transfer_params=PREFILL)
    engine.run()
    (handed,) = (o.kv_transfer_params for o in engine.outputs[name] if o.kv_transfer_params)
    return handed


def ask(engine, params, name="x"):
    request = engine.add(name, PROMPT)
    set_options(request, kv_transfer_params=params)
    check_transfer(request, engine.scheduler._connector)
    return request


def test_a_prompt_is_handed_over_signed():
    one, two = make_engine(), make_engine()
    handed = prefill(one)
    assert [len(slots) for slots in handed["remote_block_ids"]] == [3]
    assert handed["do_remote_prefill"]
    request = ask(two, handed)
    two.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    output = KVConnectorOutput(finished_recving=["x"], invalid_block_ids=[])
    blocks = half(two)._fetching["x"].blocks
    assert [slot for _, _, slot, _ in blocks] == handed["remote_block_ids"][0]
    for _, block_id, slot, block_hash in blocks:
        found, content = one.transfers.slots[slot]
        assert found == block_hash
        two.executor.memory[block_id] = content.copy()
    two.scheduler.update_connector_output(output)
    two.run()
    assert two.tokens("x") == expected_output(request.sampling_params, PROMPT, 128)
    assert half(two)._fetching == {}


class TestStates:
    """The last state of the prompt is handed over with the blocks."""

    def make(self, layers=(None,), **options):
        caches = (*pages(*layers), STATE, StateCache(((33,),)))
        return make_engine(caches, num_states=8, **options)

    def hand_over(self, one, two, handed, prompt=PROMPT):
        """Let the second engine answer; return the number of tokens that it has loaded."""
        request = two.add("x", prompt)
        set_options(request, kv_transfer_params=handed)
        two.step()
        for fetch in half(two)._fetching.values():
            for _, block_id, slot, block_hash in fetch.blocks:
                found, content = one.transfers.slots[slot]
                assert found == block_hash
                two.transfers._write(block_id, content)
            output = KVConnectorOutput(finished_recving=["x"], invalid_block_ids=[])
            two.scheduler.update_connector_output(output)
            break
        two.run()
        assert two.tokens("x") == expected_output(request.sampling_params, prompt, 128)
        assert half(two)._fetching == {}
        return request.num_cached_tokens

    @pytest.mark.parametrize("layers", [(), (None,), (11, None)], ids=str)
    @pytest.mark.parametrize("length", [7, 30, 32])
    def test_with_the_blocks(self, layers, length):
        one, two, prompt = self.make(layers), self.make(layers), list(range(40, 40 + length))
        handed = prefill(one, prompt=prompt)
        assert handed["remote_state_blocks"] == (length - 1) // 8
        num_copies = sum(map(len, handed["remote_block_ids"])) + len(handed["remote_state_ids"])
        if 11 not in layers:  # a window has left the first blocks
            assert len(half(one)._memory._pins) == num_copies
        assert self.hand_over(one, two, handed, prompt) == (length - 1) // 8 * 8
        one.scheduler.update_connector_output(KVConnectorOutput(finished_sending=["a"]))
        assert not half(one)._memory._pins

    def test_of_the_prefix_cache(self):
        """The connector has forgotten the copies, and the prompt begins with a known state."""
        one, prompt = self.make(), list(range(40, 70))
        prefill(one, prompt=prompt)
        half(one)._release("a")
        half(one)._memory.clear()
        handed = prefill(one, "b", prompt)
        assert handed["remote_state_blocks"] == 3
        assert self.hand_over(one, self.make(), handed, prompt) == 24

    def test_of_a_prompt_that_is_longer_here(self):
        """A state at the prompt's end is of no use: its last token must be computed."""
        one, two = self.make(), self.make()
        prefill(one, prompt=list(range(40, 79)))
        handed = prefill(one, "b", list(range(40, 72)))
        assert handed["remote_state_blocks"] == 3
        assert self.hand_over(one, two, handed, list(range(40, 72))) == 24

    def test_not_without_all_of_its_pieces(self):
        one = self.make(slots=2)
        assert prefill(one)["remote_state_blocks"] == 0

    def test_of_another_division(self, caplog):
        handed = prefill(self.make(ranks=2))
        assert self.hand_over(None, self.make(), handed) == 0
        assert "divides recurrent states among its processes in another way" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"signature": ""},
        {"signature": "0" * 64},
        {"remote_request_id": "b"},
        {"remote_block_ids": [[0, 1, 2]] * 2},
        {"remote_layout": "00" * 32},
        {"remote_port": 2},
        {"remote_peers": []},
        {"remote_host": "10.0.0.1"},
        {"remote_state_blocks": 1},
        {"remote_state_ids": [1]},
    ],
    ids=str,
)
def test_what_was_changed_is_refused(change):
    engine = make_engine()
    handed = prefill(engine)
    with pytest.raises(RequestError, match="not signed with this server's key"):
        ask(engine, handed | change)


@pytest.mark.parametrize(
    "params",
    [{"unknown": 1}, {"do_remote_prefill": "yes"}, {"remote_block_ids": 5}, {"remote_peers": [1]}],
    ids=str,
)
def test_what_is_no_such_thing_is_refused(params):
    with pytest.raises(RequestError, match="kv_transfer_params"):
        ask(make_engine(), params)


def test_another_key_is_refused(tmp_path):
    keys = [tmp_path / "one", tmp_path / "two"]
    for key in keys:
        key.write_text(key.name * 32)
    handed = prefill(make_engine(key=keys[0]))
    ask(make_engine(key=keys[0]), handed)
    with pytest.raises(RequestError, match="cluster-key-file"):
        ask(make_engine(key=keys[1]), handed)


def test_blocks_of_another_model_are_computed():
    handed, engine = prefill(make_engine(model="another")), make_engine()
    request = ask(engine, handed)
    engine.run()
    assert engine.tokens("x") == expected_output(request.sampling_params, PROMPT, 128)
    assert request.num_cached_tokens == 0


def test_a_consumer_that_never_comes(clock):
    engine = make_engine(release_timeout=50)
    prefill(engine)
    connector = half(engine)
    assert connector._memory._pins
    clock[0] += 49
    prefill(engine, "b", [*range(50, 80)])
    assert connector.num_expired == 0
    clock[0] += 2
    engine.add("c", [1], max_tokens=1)
    engine.run()
    assert list(connector._kept) == ["b"]
    assert engine.scheduler.make_stats().num_expired_transfers == 1
    clock[0] += 50
    engine.add("d", [1], max_tokens=1)
    engine.run()
    assert connector.num_expired == 2
    assert not connector._memory._pins


def test_a_consumer_that_comes(clock):
    engine = make_engine(release_timeout=50)
    prefill(engine)
    told = KVConnectorOutput(finished_sending=["a"])
    engine.scheduler.update_connector_output(told)
    assert not half(engine)._memory._pins
    engine.scheduler.update_connector_output(told)  # twice, or too late
    engine.scheduler.update_connector_output(KVConnectorOutput(finished_sending=["unknown"]))
    clock[0] += 100
    engine.add("c", [1], max_tokens=1)
    engine.run()
    assert half(engine).num_expired == 0


def test_prompts_of_the_same_beginning_are_kept_until_both_are_fetched():
    engine = make_engine()
    prefill(engine)
    prefill(engine, "b")
    for name, left in (("a", 3), ("b", 0)):
        engine.scheduler.update_connector_output(KVConnectorOutput(finished_sending=[name]))
        assert len(half(engine)._memory._pins) == left


def test_memory_that_is_full_of_prompts_to_be_fetched():
    engine = make_engine(slots=4)
    assert prefill(engine)["remote_block_ids"] == [[0, 1, 2]]
    handed = prefill(engine, "b", [*range(50, 80)])
    assert handed["remote_block_ids"] == [[3, -1, -1]]
    other = make_engine()
    request = other.add("b", [*range(50, 80)])
    set_options(request, kv_transfer_params=handed)
    other.step()
    assert len(half(other)._fetching["b"].blocks) == 1  # in part


def test_a_consumer_hands_nothing_over():
    engine = make_engine(role="kv_consumer")
    request = engine.add("a", PROMPT, max_tokens=1)
    set_options(request, kv_transfer_params=PREFILL)
    engine.run()
    assert not any(output.kv_transfer_params for output in engine.outputs["a"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_an_address_that_is_none(host):
    with pytest.raises(ConfigError, match="no address that others could connect to"):
        make_engine(host=host)
