import octavo
from octavo import cli
from octavo.collect_env import collect_env


def test_what_a_report_needs(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "sesame")
    monkeypatch.setenv("HF_TOKEN", "sesame")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    found = collect_env()
    assert found["octavo"] == octavo.__version__
    assert "not installed" not in found["torch"]
    assert int(found["cores"]) > 0
    assert "GiB" in found["memory"]
    assert found["VLLM_USE_V1"] == "1"
    assert "sesame" not in str(found)
    assert {"OCTAVO_API_KEY", "HF_TOKEN", "kernels", "NVIDIA GPUs"} <= found.keys()


def test_it_is_printed(capsys):
    assert cli.main(["collect-env"]) == 0
    assert f"octavo {' ' * 10}" in capsys.readouterr().out
