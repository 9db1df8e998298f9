"""Dashboard and rules: their metrics and labels exist, Prometheus accepts their expressions."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.observability.metrics import EngineMetrics
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.router.metrics import RouterMetrics

FOLDER = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((FOLDER / "grafana" / "octavo.json").read_text())
RULES_FILE = FOLDER / "prometheus" / "octavo.rules.yaml"
RULES = [
    rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]
]
# Labels that Prometheus adds.
TARGET = {"instance", "job"}

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


def sample_labels():
    """Return the labels of each sample in /metrics of servers and routers, by its name."""
    engine = EngineMetrics("m", 1000)
    engine.set_cache_config_info({"block_size": 16})
    engine.record_rejection("queue_full")
    engine.watch_processes(lambda: [os.getpid()])
    engine.record_scheduler_stats(
        SchedulerStats(
            num_steps=1,
            num_drafts=1,
            num_accepted_tokens_per_pos=[1],
            num_experts=4,
            expert_tokens=[8],
            most_expert_tokens=[4],
        )
    )
    upstream = SimpleNamespace(name="s", ready=True, leaving=False, num_requests=1)
    router = RouterMetrics(
        [SimpleNamespace(upstreams=[upstream], num_pieces=1, num_known=1)], lambda: 0
    )
    router.retries.labels("lost").inc()
    router.prefills.labels("local").inc()
    router.note_usage(1, 1)
    return {
        sample.name: set(sample.labels) | TARGET
        for page in (engine.render(), router.render())
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


LABELS = sample_labels()
RECORDED = {rule["record"]: {"model_name"} for rule in RULES if "record" in rule}
KNOWN = LABELS | RECORDED | {"up": TARGET}

_METRIC = re.compile(r"\b((?:octavo:|octavo_)\w+(?::\w+)?|up)\b(?:\{([^}]*)\})?")
_VALUES = {"finished_reason": {"error"}, "reason": {"capacity", "lost"}}


def check_expression(expression, legend=""):
    """Check the names of an expression, its selectors, its groups and its legend."""
    found = _METRIC.findall(re.sub(r"\$\w+", "", expression))
    assert found, expression
    for name, selector in found:
        assert name in KNOWN, name
        for label, value in re.findall(r"(\w+)\s*=~?\s*\"([^\"]*)\"", selector):
            assert label in KNOWN[name], (name, label)
            assert label in TARGET | {"model_name"} or value in _VALUES[label]
    all_labels = set().union(*(KNOWN[name] for name, _ in found))
    for group in re.findall(r"(?:by|ignoring|on) \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", group)) <= all_labels, group
    # What the outermost aggregation leaves is what the legend may show.
    for label in re.findall(r"\{\{(\w+)\}\}", legend):
        groups = re.findall(r"by \(([^)]*)\)", expression)
        assert any(label in re.split(r",\s*", group) for group in groups), (label, expression)


@pytest.mark.parametrize(("expression", "legend"), EXPRESSIONS)
def test_panels_show_metrics_that_exist(expression, legend):
    check_expression(expression, legend)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_metrics_that_exist(rule):
    check_expression(rule["expr"])
    if "alert" in rule:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        by = re.findall(r"by \(([^)]*)\)", rule["expr"])
        if by:
            kept = set(re.split(r",\s*", by[0]))
        else:
            kept = set.union(*(KNOWN[name] for name, _ in _METRIC.findall(rule["expr"])))
        shown = re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
        assert set(shown) <= kept


def test_the_check_finds_what_is_wrong():
    for wrong in (
        "octavo:no_such_total",
        'octavo:num_requests_running{color="red"}',
        'octavo:request_success_total{finished_reason="failed"}',
        "sum by (color) (octavo:num_requests_running)",
        "octavo:request_success",
        "1 + 1",
    ):
        with pytest.raises((AssertionError, KeyError)):
            check_expression(wrong)
    with pytest.raises(AssertionError):
        check_expression("sum (octavo:num_requests_running)", "{{engine}}")


def test_every_metric_has_a_panel_or_a_reason():
    """A new metric needs a panel, or a place here."""
    shown = " ".join(p.values[0] for p in EXPRESSIONS)
    others = {
        "cache_config_info",
        "prompt_tokens_cached",  # prompt_tokens_by_source and the hit rate show it
        "prompt_tokens_cached_by_source",
        "request_inference_time_seconds",  # the sum of two others
        "request_max_num_generation_tokens",
        "request_num_preemptions",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_kv_computed_tokens",
    }
    families = {
        re.sub(r"_(total|bucket|sum|count|created)$", "", name.removeprefix("octavo:"))
        for name in LABELS
        if name.startswith("octavo:")
    }
    families -= {"iteration_tokens"}  # the histogram iteration_tokens_total
    missing = {name for name in families if not re.search(rf"octavo:{name}(_|\b)", shown)}
    assert missing == others


def test_the_dashboard_can_be_imported():
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "model", "instance", "router"]
    for variable in DASHBOARD["templating"]["list"][1:]:
        check_expression(variable["definition"].replace("label_values", ""))
        label = variable["definition"].rpartition(", ")[2].rstrip(")")
        metric = re.search(r"octavo:\w+", variable["definition"])[0]
        assert label in LABELS[metric]
    check_expression(DASHBOARD["annotations"]["list"][0]["expr"])
    assert [p["title"] for p in DASHBOARD["panels"] if p["type"] == "row"] == [
        *("Traffic", "Latency", "Queue and batch", "KV cache", "Speculation", "Experts"),
        *("Engines: deaths and revivals", "Router"),
    ]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        source = {"type": "prometheus", "uid": "${datasource}"}
        assert panel["datasource"] == source
        assert all(target["datasource"] == source for target in panel["targets"])
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_scrape_configurations():
    for name in ("prometheus.yaml", "kubernetes.yaml"):
        config = yaml.safe_load((FOLDER / "prometheus" / name).read_text())
        assert config["rule_files"] == [RULES_FILE.name]
        [job] = config["scrape_configs"]
        assert re.fullmatch("octavo.*", job["job_name"])  # as OctavoDown selects it
    keep = next(item for item in job["relabel_configs"] if item.get("action") == "keep")
    pods = {
        f"{spec['metadata']['labels']['app']};{port['name']}"
        for path in (FOLDER / "kubernetes").glob("*.yaml")
        for found in yaml.safe_load_all(path.read_text())
        if (spec := found.get("spec", {}).get("template")) is not None
        for port in spec["spec"]["containers"][0]["ports"]
    }
    assert {pod for pod in pods if re.fullmatch(keep["regex"], pod)} == {
        "octavo-decode;http",
        "octavo-prefill;http",
        "octavo-router;http",
    }


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")


def promtool(*args):
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_accepts_rules_and_configuration():
    promtool("check", "rules", str(RULES_FILE))
    promtool("check", "config", str(FOLDER / "prometheus" / "prometheus.yaml"))


@needs_promtool
def test_prometheus_accepts_the_expressions_of_panels(tmp_path):
    expressions = [p.values[0].replace("$__rate_interval", "5m") for p in EXPRESSIONS]
    rules = [{"record": f"x{i}", "expr": expr} for i, expr in enumerate(expressions)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))


ALERT_TESTS = Path(__file__).with_name("alerts.yaml")


@needs_promtool
def test_alerts():
    promtool("test", "rules", str(ALERT_TESTS))


def test_every_alert_has_a_test():
    tests = ALERT_TESTS.read_text()
    for rule in RULES:
        assert "alert" not in rule or f'alertname="{rule["alert"]}"' in tests
