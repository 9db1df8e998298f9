import ctypes
import mmap
import os
import threading

import pytest

from octavo import LLM, _native
from octavo.errors import ConfigError
from octavo.system import device


def test_cores_and_memory_are_plausible():
    assert 1 <= device.num_cpus() <= 4096
    total, available = device.cpu_memory()
    assert 2**27 < available <= total


def test_a_cgroup_limits_cores_and_memory(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    (tmp_path / "memory.current").write_text(f"{2**27 + 4096}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 4096\n")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    assert device.num_cpus() == 1
    assert device.cpu_memory() == (2**28, 2**27)


NODE_MEMINFO = """\
Node 1 MemTotal:       65536 kB
Node 1 MemFree:        1000 kB
Node 1 Inactive(file): 200 kB
Node 1 SReclaimable:   30 kB
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Make two NUMA nodes, 0 and 2, and one without cores; the first has all usable cores."""
    mine = sorted(os.sched_getaffinity(0))
    lists = {0: ",".join(map(str, mine)) + "\n", 2: f"{mine[-1] + 1}-{mine[-1] + 4}\n", 3: "\n"}
    for number, cpus in lists.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
        (tmp_path / f"node{number}" / "meminfo").write_text(NODE_MEMINFO)
    (tmp_path / "online").write_text("0,2-3\n")
    monkeypatch.setattr(device, "_NODES", tmp_path)
    return tmp_path


def in_thread(work):
    """Run `work` on a dedicated thread, with which bindings end; return or raise its result."""
    result = []

    def run():
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("3", {3}), ("0-2,8", {0, 1, 2, 8}), ("4,6-7", {4, 6, 7})]
)
def test_lists_of_cores(text, cpus):
    assert device._parse_list(text) == cpus


def test_cores_and_memory_of_a_node(nodes):
    assert device.numa_cpus(0) == os.sched_getaffinity(0)
    assert device.cpu_memory(0) == (64 * 2**20, 1230 * 2**10)


def test_nodes_that_cannot_be_used(nodes, monkeypatch):
    for call in (device.numa_cpus, device.cpu_memory, device.bind_to_numa_node):
        with pytest.raises(ConfigError, match="numa_node=1 does not exist; this machine has 0, 2"):
            call(1)
    with pytest.raises(ConfigError, match="may not use any of its cores"):
        device.bind_to_numa_node(2)
    with pytest.raises(ConfigError, match=r"its cores \(none\)"):
        device.bind_to_numa_node(3)
    monkeypatch.setattr(device.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match=r"riscv64.*numactl"):
        in_thread(lambda: device.bind_to_numa_node(0))
    monkeypatch.setattr(device.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux only"):
        device.numa_cpus(0)


def test_a_system_that_forbids_binding(nodes, monkeypatch):
    monkeypatch.setattr(device, "_MPOL_BIND", 99)
    with pytest.raises(ConfigError, match="CAP_SYS_NICE"):
        in_thread(lambda: device.bind_to_numa_node(0))


@pytest.mark.skipif(not device._NODES.is_dir(), reason="this machine shows no NUMA nodes")
def test_a_thread_and_those_it_starts_are_bound():
    node = min(int(p.name[4:]) for p in device._NODES.glob("node[0-9]*"))
    number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]

    def policy():
        mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 64)()
        libc = ctypes.CDLL(None)
        assert libc.syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(4096), None, 0) == 0
        nodes = {64 * i + b for i, word in enumerate(mask) for b in range(64) if word >> b & 1}
        return mode.value, nodes, os.sched_getaffinity(0)

    def bind():
        try:
            device.bind_to_numa_node(node)
        except ConfigError as error:
            pytest.skip(str(error))
        return policy(), in_thread(policy)

    before = policy()
    mine, started = in_thread(bind)
    assert mine == started
    assert mine[:2] == (2, {node})
    assert mine[2] <= device.numa_cpus(node)
    assert policy() == before  # other threads are unaffected


def test_an_engine_on_a_node_that_does_not_exist(nodes):
    with pytest.raises(ConfigError, match="numa_node=7 does not exist"):
        LLM(numa_node=7, max_model_len=64)


@pytest.mark.skipif(not device._NODES.is_dir(), reason="this machine shows no NUMA nodes")
def test_an_engine_on_a_node():
    node = min(int(p.name[4:]) for p in device._NODES.glob("node[0-9]*"))
    before = os.sched_getaffinity(0)
    try:
        llm = LLM(numa_node=node, max_model_len=64, kv_cache_memory_bytes="8M", max_num_seqs=4)
    except ConfigError as error:
        pytest.skip(str(error))
    with llm:
        (output,) = llm.generate("Once", use_tqdm=False)
    assert output.outputs[0].token_ids
    assert os.sched_getaffinity(0) == before


def test_threads():
    before = _native.num_threads()
    try:
        assert device.set_num_threads(1) == 1
        assert _native.num_threads() == 1
        with pytest.raises(ConfigError, match="num_threads=5000"):
            device.set_num_threads(5000)
        assert device.set_num_threads(None) == device.num_cpus() == _native.num_threads()
    finally:
        _native.set_num_threads(before)


def test_resident_memory_grows_with_what_is_touched():
    before = device.resident_memory()
    touched = mmap.mmap(-1, 64 * 2**20)  # not from the heap, which may have resident pages left
    assert device.resident_memory() - before < 10 * 2**20
    touched.write(b"x" * len(touched))
    grown = device.resident_memory() - before
    assert 60 * 2**20 < grown < 80 * 2**20
    touched.close()
