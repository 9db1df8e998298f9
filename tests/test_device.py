import pytest
import torch

from octavo import _native, device
from octavo.errors import ConfigError


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


def test_threads():
    before = torch.get_num_threads()
    try:
        assert device.set_num_threads(1) == 1
        assert _native.num_threads() == 1
        assert torch.get_num_threads() == 1
        with pytest.raises(ConfigError, match="num_threads=5000"):
            device.set_num_threads(5000)
        assert device.set_num_threads(None) == device.num_cpus() == _native.num_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_devices():
    assert device.select_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="device=cpu"):
        device.select_device("cuda")
