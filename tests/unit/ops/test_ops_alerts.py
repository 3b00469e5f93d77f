"""Alert rules: as generated, sound, and firing on what they are for and on nothing else, as Prometheus' own promtool sees it."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import read

from longdraft.ops import alerts
from longdraft.ops.alerts import ALERTS, text
from longdraft.ops.panels import EXPORTED

ROOT = Path(__file__).parents[3]
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: package prometheus)")

GAUGES = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")
# Growth a minute of a healthy server's counters, by mode: 10 rounds a second; of gauges the value.
HEALTHY: dict[str, dict[str, float]] = {
    "full": {"rounds": 600, "tokens": 1900, "drafted_tokens": 2400},
    "exact": {
        "rounds": 600, "tokens": 3600, "drafted_tokens": 6000, "proposed_tokens": 3000, "confirmed_tokens": 2600, "fallbacks": 3
    },
    "partial": {"rounds": 600, "tokens": 1900, "drafted_tokens": 2400, "refreshes": 70},
    "off": {"rounds": 600, "tokens": 600},
    "": {"sglang:num_running_reqs": 4, "sglang:num_queue_reqs": 1, "sglang:token_usage": 0.7},
}  # fmt: skip
# What goes wrong, as other growth than the healthy one, and the alerts that this sets off.
FAULTS: dict[str, tuple[dict[str, dict[str, float]], set[str]]] = {
    "nothing": ({}, set()),
    "useless drafts": ({"full": {"tokens": 650}}, {"LongdraftDraftUseless"}),
    "a loop": ({"full": {"tokens": 2950}}, {"LongdraftAnswersLoop"}),
    "few rounds": ({"full": {"rounds": 12, "tokens": 60, "drafted_tokens": 48}}, set()),
    "views that miss": ({"exact": {"confirmed_tokens": 900, "fallbacks": 60}}, {"LongdraftViewsMiss", "LongdraftFallsBack"}),
    "refreshes": ({"partial": {"refreshes": 400}}, {"LongdraftRefreshesTooOften"}),
    "a failing drafter": ({"full": {"draft_failures": 1}}, {"LongdraftDrafterFails"}),
    "no metrics": ({mode: dict.fromkeys(HEALTHY[mode], 0.0) for mode in HEALTHY if mode}, {"LongdraftSilent"}),
    "a full cache": ({"": {"sglang:token_usage": 0.99}}, {"LongdraftCacheFull"}),
}  # fmt: skip


def series(changes: dict[str, dict[str, float]], minutes: int = 60) -> list[dict[str, str]]:
    """promtool's input: every counter from 0 with constant growth, gauges constant."""
    made = []
    for mode, healthy in HEALTHY.items():
        for name, growth in {**healthy, **changes.get(mode, {})}.items():
            if name in GAUGES:
                made.append({"series": f'{name}{{model_name="m"}}', "values": f"{growth}x{minutes}"})
            else:
                labels = f'model_name="m", mode="{mode}", context="<2K"'
                made.append({"series": f"longdraft_{name}_total{{{labels}}}", "values": f"0+{growth:g}x{minutes}"})
    return made


def run_promtool(folder: Path, tests: list[dict[str, Any]]) -> str:
    """promtool's words about the tests; '' where all is as they say."""
    (folder / "alerts.yaml").write_text(text())
    (folder / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": tests}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def firing(input_series: list[dict[str, str]], folder: Path, at: str = "50m", interval: str = "1m") -> set[str]:
    """Names of the alerts that fire at a time: promtool is told that none does, and says what it got."""
    expected = [{"eval_time": at, "alertname": alert.name, "exp_alerts": []} for alert in ALERTS]
    test = {"interval": interval, "input_series": input_series, "alert_rule_test": expected}
    return set(re.findall(r"alertname: (\w+), time", run_promtool(folder, [test])))


def test_the_file_is_the_generated_one(tmp_path: Path) -> None:
    assert alerts.main([str(tmp_path / "made.yaml")]) == 0
    kept = (ROOT / "ops/alerts.yaml").read_text()
    assert (tmp_path / "made.yaml").read_text() == kept, "run python -m longdraft.ops.alerts"


def test_rules_have_the_form_that_prometheus_reads() -> None:
    (group,) = yaml.safe_load(text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(ALERTS)
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+m", rule["for"]) and int(rule["for"][:-1]) >= 5
        assert rule["labels"]["severity"] in ("warning", "critical")
        found = read(rule["expr"])
        assert found.series <= EXPORTED and found.labels <= {"model_name", "mode"}
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= found.labels


@needs_promtool
def test_promtool_takes_the_file() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(ROOT / "ops/alerts.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 0 and f"{len(ALERTS)} rules found" in done.stdout, done.stderr


@needs_promtool
@pytest.mark.parametrize("fault", FAULTS)
def test_alerts_fire_on_their_fault_alone(fault: str, tmp_path: Path) -> None:
    changes, wanted = FAULTS[fault]
    assert firing(series(changes), tmp_path) == wanted


@needs_promtool
def test_a_jump_of_tau_fires_beside_the_last_days(tmp_path: Path) -> None:
    """A day at τ 3, then an hour at 4.3."""
    grown = {"rounds": "0+600x1500", "tokens": "0+1800x1440 2594580+2580x59", "drafted_tokens": "0+2400x1500"}
    labels = 'model_name="m", mode="full", context="<2K"'
    steady = [{"series": f"longdraft_{name}_total{{{labels}}}", "values": values} for name, values in grown.items()]
    assert firing(steady, tmp_path, "1400m") == set()
    assert firing(steady, tmp_path, "1470m") == {"LongdraftTauAboveUsual"}


def test_every_alert_has_a_fault_that_sets_it_off() -> None:
    assert {name for _, names in FAULTS.values() for name in names} | {"LongdraftTauAboveUsual"} == {
        a.name for a in ALERTS
    }
