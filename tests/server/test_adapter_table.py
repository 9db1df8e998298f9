"""Table of adapters that several processes share."""

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.config import LoRAConfig
from octavo.messages import AdapterRef
from octavo.server import adapter_table
from octavo.server.adapter_table import (
    FILE_VARIABLE,
    AdapterTable,
    ServedAdapter,
    given_file,
    make_table,
)
from octavo.server.errors import UnavailableError

ADD = """
import sys
from pathlib import Path
from octavo.server.adapter_table import AdapterTable, ServedAdapter
table, number = AdapterTable(Path(sys.argv[1])), sys.argv[2]
for i in range(100):
    table.add(ServedAdapter(name=f"{number}-{i}", path="/x", parent="m"))
    table.add(ServedAdapter(name="same", path=f"/{number}", parent="m"), replace=True)
    table.remove(f"{number}-{i - 10}")
print(sum(table.add(ServedAdapter(name=f"once {i}", path="", parent="")) for i in range(100)))
"""


@pytest.fixture(params=["memory", "file"])
def table(request, tmp_path):
    made = AdapterTable(None if request.param == "memory" else tmp_path / "adapters")
    yield made
    made.close()


def adapter(name, path="/x"):
    return ServedAdapter(name=name, path=path, parent="m")


def test_additions_and_replacements(table):
    assert [table.add(adapter(name)) for name in "aba"] == [True, True, False]
    assert table.add(adapter("a", "/y"), replace=True)
    assert table.add(adapter("c"), replace=True)
    assert [(it.name, it.path) for it in table] == [("a", "/y"), ("b", "/x"), ("c", "/x")]
    assert (table.names(), table.names(2), len(table)) == (["a", "b", "c"], ["a", "b"], 3)
    assert [table.remove("b"), table.remove("b")] == [True, False]
    for name in ("b", "", "A", "\ud800", "a\0", "%", "a' OR '1'='1"):
        assert table.find(name) is None
    found = table.find("a")
    new = ServedAdapter(name="a", path="/z", parent="m", ref=AdapterRef("a", "/z", "content"))
    assert table.exchange(found, new)
    assert not table.exchange(found, adapter("a"))
    assert table.find("a") == new
    table.remove("a")
    assert not table.exchange(new, adapter("a"))


def test_a_full_table(table, monkeypatch):
    monkeypatch.setattr(adapter_table, "MAX_ADAPTERS", 2)
    assert [table.add(adapter(name), replace=True) for name in "abca"] == [True, True, False, True]
    assert not table.add(adapter("d"))


def test_the_adapters_of_the_settings(tmp_path):
    modules = ["a=/a", '{"name": "b", "path": "/b", "base_model_name": "other"}']
    config = LoRAConfig(enable_lora=True, lora_modules=modules)
    found = [(it.name, it.path, it.parent, it.ref) for it in make_table(config, "m")]
    assert found == [("a", "/a", "m", None), ("b", "/b", "other", None)]


def test_several_processes_change_it_at_the_same_time(tmp_path):
    path = tmp_path / "adapters"
    table = AdapterTable(path)
    processes = [
        subprocess.Popen([sys.executable, "-c", ADD, path, str(i)], stdout=subprocess.PIPE)
        for i in range(3)
    ]
    added = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(added) == 100
    assert len(table) == 3 * 10 + 1 + 100
    table.close()
    assert [it.name for it in tmp_path.iterdir()] == ["adapters"]


def test_a_damaged_file(tmp_path):
    path = tmp_path / "adapters"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(UnavailableError, match="file is not a database"):
        AdapterTable(path)


def test_the_file_of_a_process_above(monkeypatch):
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    assert given_file() is None
    monkeypatch.setenv(FILE_VARIABLE, "/x/y")
    assert given_file() == Path("/x/y")
