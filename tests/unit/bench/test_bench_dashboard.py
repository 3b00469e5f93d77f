"""The dashboard: one list of panels as a W&B view, an HTML report and a picture, with the logs' own figures."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from longdraft import cli
from longdraft.bench.dashboard import command, workspace
from longdraft.bench.dashboard.command import write_report
from longdraft.bench.dashboard.logs import read_run, read_runs
from longdraft.bench.dashboard.page import page
from longdraft.bench.dashboard.panels import PANELS, SERVED, Panel, Series, sections
from longdraft.bench.dashboard.picture import COLOURS, draw, png, svg
from longdraft.errors import UserError
from longdraft.train.wandb_log import evaluation_metrics, step_metrics

TRAINING = [panel for panel in PANELS if panel.section != SERVED]
EVIL = "<script>alert('x')</script> & $x$"


def metric_row(step: int, loss: float) -> dict[str, Any]:
    """As the loop writes it, with every figure that a panel shows."""
    return {
        "step": step, "loss": loss, "accuracy": 0.3, "accuracy_by_depth": [0.4 if step > 1 else None, 0.2],
        "tokens_per_s": 1500.0 * step, "mfu": 0.4, "data_wait_share": 0.01, "memory_gib": 2.5, "lr": 1e-3, "grad_norm": 0.7,
    }  # fmt: skip


def evaluation_row(step: int, tau: float | None) -> dict[str, Any]:
    without = None if tau is None else tau - 1
    figures = {
        "prompts": 4, "looping": 1, "looping_share": 0.25, "verifications": 9, "tau": tau, "tau_without_bonus": without,
        "reached_depth": [0.5, 0.25],
    }  # fmt: skip
    return {
        "step": step,
        "draft_steps": 2,
        "buckets": dict.fromkeys(("<2K", "2K-8K", "8K-32K", ">32K", "all"), figures),
    }


def write_run(folder: Path, loss: float = 2.0, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    metrics = [metric_row(step, loss / step) for step in (1, 2, 3)]
    evaluations = [evaluation_row(2, 2.345), evaluation_row(3, 2.125)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    record = {
        "command": "longdraft train", "commit": "c0ffee", "facts": {"documents": 7, "data": {"train": [{"sha256": "ab12"}]}},
        "settings": {"optim": {"lr": 0.001, "clip": 1.0}, **settings},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(record, sort_keys=False))
    return folder


class Reader(HTMLParser):
    """The page's tags, and its tables as rows of cells' texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        self.cell = tag in ("td", "th") or (self.cell and tag not in ("tr", "table"))
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.cell = False

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.rows[-1][-1] += data


def test_every_panel_shows_what_training_logs(tmp_path: Path) -> None:
    """Each series' name at W&B is one that the tracker sends, and its path finds the figure in the log."""
    run = read_run(write_run(tmp_path / "r"), "r")
    sent = {**step_metrics(metric_row(2, 1.0)), **evaluation_metrics(evaluation_row(2, 2.345))}
    for panel in TRAINING:
        for series in panel.series:
            (label, points), *more = run.lines(series).items()
            name = f"{series.metric}/1" if series.deep else series.metric
            assert dict(points)[2] == sent[name], name
            assert bool(more) == series.deep
            assert label == (f"{series.label} 1" if series.deep else series.label)
    assert len({panel.title for panel in PANELS}) == len(PANELS)


def test_the_loop_logs_the_figures_that_the_panels_read(tmp_path: Path) -> None:
    from longdraft.train.long_draft import main

    (tmp_path / "d.jsonl").write_text('{"text": "some words of a line that is long enough for a prompt"}\n' * 3)
    words = ["target.path=tiny-random:llama", f"data.train={tmp_path}/d.jsonl", f"data.eval={tmp_path}/d.jsonl"]
    words += ["data.max_length=32", "draft.window=16", "schedule.max_steps=1", "lag.max=1", "evaluation.new_tokens=8"]
    assert main([*words, f"run.output_dir={tmp_path}", "run.name=r"]) == 0
    run = read_run(tmp_path / "r", "r")
    missing = [s.metric for p in PANELS for s in p.series if not run.lines(s) and s.log == "metrics"]
    assert set(missing) <= {"train/mfu", "train/data_wait_share"}  # neither is known on every machine
    assert run.lines(Series("evaluations", ("buckets", "<2K", "looping_share")))


def test_the_workspace_has_the_sections_panels_and_metrics_in_order() -> None:
    built = workspace.build("me", "p")
    spec = built._to_model().spec.section.panel_bank_config.sections  # what save() would send
    assert (built.entity, built.project) == ("me", "p")
    assert [section.name for section in spec] == list(sections())
    shown = [panel.config for section in spec for panel in section.panels]
    assert [config.chart_title for config in shown] == [panel.title for panel in PANELS]
    for config, panel in zip(shown, PANELS, strict=True):
        if any(series.deep for series in panel.series):
            assert config.use_metric_regex
            assert re.search(config.metric_regex, f"{panel.series[0].metric}/12")
            assert not re.search(config.metric_regex, f"{panel.series[0].metric}_other")
        else:
            assert config.metrics == [series.metric for series in panel.series]
        assert bool(config.y_log_scale) == panel.log_scale
    taus = next(config for config in shown if config.chart_title.startswith("τ with the bonus"))
    assert taus.metrics[:2] == ["eval/under_2K/tau", "eval/2K_to_8K/tau"]


def test_the_page_holds_every_panel_and_the_logs_figures(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "one"), write_run(tmp_path / "two", 3.0, lag={"max": 2})])
    text = page(runs)
    reader = Reader(text)
    assert re.findall(r"<figcaption>(.*?)</figcaption>", text) == [panel.title for panel in PANELS]
    assert reader.tags.count("svg") == len(TRAINING)
    assert ["one", "3", "2K-8K", "4", "1", "2.125", "1.125", "50.0%  25.0%", "2.345 (2)"] in reader.rows
    assert ["commit", "c0ffee", "c0ffee"] in reader.rows
    assert ["facts/data/train/1/sha256", "ab12", "ab12"] in reader.rows
    settings = [row for row in reader.rows if row and row[0].startswith(("lag.", "optim."))]
    assert settings == [["lag.max", "-", "2"], ["optim.lr", "0.001", "0.001"], ["optim.clip", "1.0", "1.0"]]
    assert text.count("class=differs") == 1
    for forbidden in ("<script", "<link", 'http-equiv="refresh', "src=", "@import", "url(http"):
        assert forbidden not in text


def test_names_and_settings_are_text_and_secrets_are_hidden(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", data={"train": EVIL}, target={"hf_token": "hf_verysecretindeed"})
    run, other = read_run(folder, EVIL), read_run(folder, "_" + EVIL)
    text = page([run, other])
    assert "<script" not in text and "alert('x')</" not in text
    assert "hf_verysecret" not in text
    reader = Reader(text)
    assert [row for row in reader.rows if row[0] == "data.train"] == [["data.train", EVIL, EVIL]]
    panel = Panel("s", EVIL, EVIL, (Series("metrics", ("accuracy_by_depth", "*"), "_" + EVIL),))
    drawn = ElementTree.fromstring(svg(panel, [run]))
    words = {element.text for element in drawn.iter() if element.tag.endswith("}text")}
    assert {EVIL, f"_{EVIL} 1", f"_{EVIL} 2"} <= words
    assert {element.tag for element in drawn.iter() if "script" in element.tag} == set()


def test_a_picture_draws_the_logs_points(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    runs = read_runs([write_run(tmp_path / "one"), write_run(tmp_path / "two", 90.0)])
    loss, depths = PANELS[0], PANELS[2]
    axes = Figure().subplots(1, 2)
    draw(axes[0], loss, runs)
    draw(axes[1], depths, runs[:1])
    assert [list(line.get_ydata()) for line in axes[0].lines] == [[2.0, 1.0, 2 / 3], [90.0, 45.0, 30.0]]
    assert [line.get_color() for line in axes[0].lines] == list(COLOURS[:2])
    assert axes[0].get_yscale() == "log"
    by_depth = {tuple(line.get_xdata()): list(line.get_ydata()) for line in axes[1].lines}
    assert by_depth == {(2, 3): [40.0, 40.0], (1, 2, 3): [20.0, 20.0, 20.0]}
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == ["depth 1", "depth 2"]
    assert axes[1].get_ylim()[0] == 0
    png(runs, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_a_bucket_looks_alike_in_every_panel(tmp_path: Path) -> None:
    """Also where a bucket before it has no figures."""
    from matplotlib.figure import Figure

    folder = write_run(tmp_path / "r")
    row = evaluation_row(1, 2.0)
    row["buckets"] = {"2K-8K": row["buckets"]["all"] | {"tau": None}, "all": row["buckets"]["all"]}
    (folder / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    looks = []
    for panel in (p for p in PANELS if p.title.startswith(("τ with the bonus", "Looping"))):
        axes = Figure().subplots()
        draw(axes, panel, [read_run(folder, "r")])
        looks.append((axes.lines[-1].get_color(), axes.lines[-1].get_marker(), len(axes.lines)))
    assert looks[0][:2] == looks[1][:2]
    assert [count for *_, count in looks] == [1, 2]


def test_a_report_of_a_run_that_has_just_begun(tmp_path: Path) -> None:
    """One row, no evaluation, no run.yaml, figures that are not there or not finite."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n[1]\n{"loss": 2}\n{"ste')
    run = read_run(tmp_path / "r", "r")
    text = page([run])
    assert text.count("no figures in these logs") == len(PANELS) - 1
    assert "no evaluations in these logs" in text and "no run.yaml" in text
    png([run], tmp_path / "r.png")


def test_a_bucket_that_only_loops_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    (folder / "evaluations.jsonl").write_text(json.dumps(evaluation_row(1, None)) + "\n")
    rows = Reader(page([read_run(folder, "r")])).rows
    assert ["r", "1", ">32K", "4", "1", "none: all loop", "none: all loop", "50.0%  25.0%", "-"] in rows


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / where / "r") for where in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_without_an_account_the_command_writes_the_runs_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "runs" / "two")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["dashboard", "--png", "all.png"]) == 0
    assert capsys.readouterr().out.splitlines() == ["wrote all.png", "wrote dashboard.html"]
    assert "longdraft training: one, two" in (tmp_path / "dashboard.html").read_text()


@pytest.mark.usefixtures("no_key")
def test_without_a_key_the_report_is_written_and_the_remedy_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--run", str(write_run(tmp_path / "r")), "--html", str(tmp_path / "x.html")]
    assert cli.main(["dashboard", "--entity", "me", "--project", "p", *words]) == 0
    assert (tmp_path / "x.html").is_file()
    error = capsys.readouterr().err
    assert "me/p" in error and "wandb login" in error and "WANDB_API_KEY" in error


@pytest.mark.parametrize("by", ["environment", "login"])
@pytest.mark.usefixtures("no_key")
def test_with_a_key_the_view_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "k")
    else:
        monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
        (tmp_path / "netrc").write_text("machine wandb.example.org login user password k\n")
        (tmp_path / "netrc").chmod(0o600)
    saved = []
    monkeypatch.setattr(workspace, "save", lambda built: saved.append(built) or "https://example.org/view")
    monkeypatch.chdir(tmp_path)
    assert command.main(["--entity", "me", "--project", "p"]) == 0
    assert [(built.entity, built.project) for built in saved] == [("me", "p")]
    assert "https://example.org/view" in capsys.readouterr().out


def test_a_refusal_names_the_entity_and_the_reason() -> None:
    def refuse() -> None:
        raise ConnectionError("no such\nentity")

    with pytest.raises(UserError, match=r"'me'.*'p'.*ConnectionError: no such entity"):
        workspace.save(SimpleNamespace(entity="me", project="p", save=refuse))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run", "nowhere"], "run folder 'nowhere' does not exist"),
        (["--run", "."], "holds no logged steps"),
        ([], "runs/ holds no run with logs"),
        (["--run", "r", "--html", "no/such/place.html"], "place.html"),
        (["--run", "r", "--png", "no/such/place.png"], "place.png"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    write_run(tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["dashboard", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1


DAMAGES: list[tuple[str, bytes]] = [
    ("metrics.jsonl", b"\xff\xfe{\x00\n"),
    ("metrics.jsonl", b"3\n[]\n{}\n" + b"[" * 100_000 + b"\n"),
    ("metrics.jsonl", b'{"step": "4", "loss": 1}\n{"step": 1' + b"0" * 400 + b"}\n"),
    ("metrics.jsonl", b'{"step": 4, "loss": 1' + b"0" * 400 + b', "lr": "<b>", "accuracy_by_depth": 3}\n'),
    ("metrics.jsonl", b'{"step": 4, "loss": NaN, "grad_norm": Infinity, "accuracy_by_depth": {"a": 1}}\n'),
    ("evaluations.jsonl", b'{"step": 4, "buckets": [1]}\n{"step": 5, "buckets": null}\n'),
    ("evaluations.jsonl", b'{"step": 4, "buckets": {"all": 3}}\n{"step": 5, "buckets": {"all": {}}}\n'),
    (
        "evaluations.jsonl",
        b'{"step": 4, "buckets": {"all": {"prompts": 1, "tau": "<b>", "reached_depth": null}}}\n',
    ),
    ("evaluations.jsonl", b'{"step": "<b>", "buckets": {"all": {"prompts": 1, "tau": 2}}}\n'),
    ("run.yaml", b"settings: {a: {b: 2001-01-01, c: !!set {x}}}\n"),
    ("run.yaml", b"a: &a [*a]\n"),
]


def test_what_is_damaged_of_a_log_is_left_out(tmp_path: Path) -> None:
    """The rest is shown: a report is most needed where a run ended badly. All in one report, since drawing takes seconds."""
    folders = [write_run(tmp_path / f"r{i}") for i in range(len(DAMAGES))]
    for folder, (file, damage) in zip(folders, DAMAGES, strict=True):
        with (folder / file).open("ab") as log:
            log.write(damage)
        run = read_run(folder, "r")
        assert [row["loss"] for row in run.metrics[:3]] == [2.0, 1.0, pytest.approx(2 / 3)], damage[:80]
    write_report(folders, tmp_path / "o.html", tmp_path / "o.png")
    text = (tmp_path / "o.html").read_text()
    assert text.count("2.125") >= len(folders) and "<b>" not in text


def test_a_report_needs_no_account_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert command.main(["--run", str(write_run(tmp_path / "r")), "--html", str(tmp_path / "x.html")]) == 0
