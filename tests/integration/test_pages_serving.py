"""The serving page's own commands against a real server, and the series that its metrics hold: what dashboard and alerts read."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_commands import blocks, words_of
from promql import read
from server_process import WarmServer
from warm_python import CPU

from longdraft.bench.server import Server
from longdraft.ops.alerts import ALERTS
from longdraft.ops.panels import EXPORTED, PANELS, SGLANG
from longdraft.ops.picture import filled
from longdraft.serve.metrics import SERIES

ASKED = [line for block in blocks() if block.how == "asks the server" for line in block.lines]
(STARTED,) = (line for block in blocks() if block.how == "starts the server" for line in block.lines)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def server(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What the page starts, with a tiny target and its draft for TARGET and DRAFT, on a free port."""
    target = tmp_path_factory.mktemp("page") / "target"
    shutil.copytree(tiny_target, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    program, *words = words_of(STARTED.replace("TARGET", str(target)).replace("DRAFT", str(tiny_draft)))
    assert program == "longdraft" and words[-2:] == ["--port", "30000"]
    command = [sys.executable, "-m", "longdraft.cli", *words[:-2]]
    with WarmServer(
        "page's", command, tmp_path_factory.mktemp("page") / "log", {**CPU, "OMP_NUM_THREADS": "1"}
    ) as server:
        yield server


def asked(line: str, server: Server) -> str:
    """What a page's curl prints."""
    words = words_of(line.replace("http://127.0.0.1:30000", server.address))
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("line", ASKED)
def test_a_command_of_the_page_is_answered(line: str, server: Server) -> None:
    text = asked(line, server)
    if "/v1/chat/completions" in line:
        assert json.loads(text)["choices"][0]["message"]["content"]
    elif "/generate" in line:
        answer, body = json.loads(text), json.loads(words_of(line)[-1])["sampling_params"]
        wanted = body.get("custom_params", {}).get("longdraft", {}).get("mode", "exact")
        assert answer["meta_info"]["longdraft"][-1]["mode"] == wanted
        assert answer["meta_info"]["completion_tokens"] == body["max_new_tokens"]
    elif line.endswith("/metrics"):
        assert "longdraft_rounds_total{" in text
    else:
        assert line.endswith("/health") and text == ""


def scraped(server: Server, accept: str) -> dict[str, set[str]]:
    """Names of the samples on ``/metrics``, with their labels."""
    request = urllib.request.Request(f"{server.address}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines = re.findall(r"^([a-zA-Z_:][\w:]*)(?:{(.*)})? ", reply.read().decode(), re.MULTILINE)
    found: dict[str, set[str]] = {}
    for name, labels in lines:
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text;version=1.0.0"])
def test_every_series_of_dashboard_and_alerts_is_exported(server: Server, accept: str) -> None:
    """With their labels, under the names that each kind of scraper gets; gauges of SGLang's come a while behind."""
    until = time.monotonic() + 90
    while True:
        server.generate([1, 2, 3] * 20, 60)  # streamed, as SGLang's time between tokens needs
        found = scraped(server, accept)
        names = {name: re.compile(name.replace(":", "[:_]")) for name in EXPORTED}
        there = {name: {own for own in found if form.fullmatch(own)} for name, form in names.items()}
        if all(there.values()) or time.monotonic() > until:
            break
    assert {name for name, own in there.items() if not own} == set()
    for expr in [query.expr for panel in PANELS for query in panel.queries] + [alert.expr for alert in ALERTS]:
        used = read(expr)
        labels = set().union(*(found[own] for name in used.series for own in there[name]))
        assert used.labels <= labels, filled(expr)
    for series in SERIES:
        assert found[series.exported] == set(series.labels)
    assert all(own.startswith("sglang") for name in SGLANG for own in there[name])
