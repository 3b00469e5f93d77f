"""Shipping a draft: bfloat16, the published target in its config, no path of the machine in its log."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

from longdraft.bench.ship_drafts import generations, main, portable, published_spec
from longdraft.draft_models.checkpoint import load_draft, save_draft
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings, TrainingFacts, vars_of
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError

SHAPES = Path(__file__).parents[3] / "recipes/shapes/smollm2-135m-instruct"
PUBLISHED = TargetSpec.from_config(AutoConfig.from_pretrained(SHAPES))
FROM_GGUF = replace(PUBLISHED, rms_norm_eps=9.999999747378752e-06)


def write_run(folder: Path, draft: torch.nn.Module, steps: int) -> Path:
    """A run's folder as training leaves it."""
    save_draft(draft, folder / "checkpoints/step-1/draft", "/tmp/somewhere/model", TrainingFacts(steps=steps))  # type: ignore[arg-type]
    (folder / "checkpoints/latest").symlink_to("step-1")
    told = {
        "command": "/tmp/x/long_draft.py --config recipes/r.yaml target.path=/tmp/x/m data.train=/tmp/x/data/own.jsonl",
        "settings": {
            "run": {"name": folder.name, "seed": 5}, "target": {"path": "/tmp/x/m"},
            "draft": {"init_from": "/tmp/x/runs/a/checkpoints/latest/draft"},
        },
        "facts": {"ranks": 1, "device": "H200", "data": {"train": [{"source": "/tmp/x/data/own.jsonl", "sha256": "0"}]}},
        "date": "2026-01-01", "commit": "c", "versions": {"torch": "2"},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(told))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    (folder / "evaluations.jsonl").write_text('{"step": 1, "buckets": {}}\n')
    return folder


def test_a_longspec_draft_of_two_stages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    draft = LongSpecDraft(LongSpecConfig(FROM_GGUF, LongSpecSettings(final_norm=True)))
    runs = [write_run(tmp_path / "runs" / name, draft, steps) for name, steps in (("one", 1), ("two", 2))]
    train = [{"name": f"{x}.py", "kind": "code", "characters": 9, "sha256": x * 64} for x in "ab"]
    (tmp_path / "sources.json").write_text(json.dumps({"seed": 0, "train": train, "heldout": []}))
    out = tmp_path / "out"
    assert main(["--runs", *map(str, runs), "--data", str(tmp_path / "sources.json"), "--out", str(out)]) == 0
    got = load_draft(out / "longspec", PUBLISHED)
    assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in zip(got.parameters(), draft.parameters(), strict=True))
    config = json.loads((out / "longspec/config.json").read_text())
    assert config["longdraft"]["target"]["hash"] == PUBLISHED.hash and config["rms_norm_eps"] == 1e-05
    assert (config["dtype"], config["longdraft"]["training"]["steps"]) == ("bfloat16", 2)
    log = [json.loads(line) for line in (out / "longspec.log.jsonl").read_text().splitlines()]
    assert [row.get("run", row.get("step")) for row in log] == [
        "one",
        1,
        1,
        "two",
        1,
        1,
        2,
    ]  # one's checkpoint is of step 1
    named = "target.path=HuggingFaceTB/SmolLM2-135M-Instruct"
    assert log[0]["command"] == f"longdraft train --config recipes/r.yaml {named} data.train=data/own.jsonl"
    assert log[0]["settings"]["target"]["path"] == config["longdraft"]["target"]["name"] == named.split("=")[1]
    assert log[0]["settings"]["draft"]["init_from"] == "runs/a/checkpoints/latest/draft" and log[0]["seed"] == 5
    text = "".join(path.read_text() for path in out.rglob("*.json*"))
    assert "/tmp/" not in text
    listed = json.loads((out / "data.json").read_text())
    assert listed["train"] == {"code": ["aaaaaaaaaaaaaaaa a.py", "bbbbbbbbbbbbbbbb b.py"]} and listed["heldout"] == {}


def test_the_making_of_own_answers_is_told_without_paths(tmp_path: Path) -> None:
    told = {"command": "longdraft generate --target.path /tmp/m --out /tmp/m2", "target": {"name": "m", "weights": "0"}}
    told["settings"] = {"target": {"path": "/tmp/m"}, "prompts": {"sources": "/tmp/own_greedy/p.jsonl"}}
    (tmp_path / "p.json").write_text(json.dumps(told))
    found = json.loads(generations({"greedy": tmp_path / "p.json", "sampled": tmp_path / "p.json"}))
    assert list(found) == ["greedy", "sampled"]
    assert found["greedy"]["target"] == {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "weights": "0"}
    assert found["greedy"]["settings"]["prompts"]["sources"] == "own_greedy/p.jsonl"
    assert found["greedy"]["command"] == "longdraft generate --target.path HuggingFaceTB/SmolLM2-135M-Instruct --out m2"


def test_an_eagle3_draft_keeps_its_vocabulary(tmp_path: Path) -> None:
    draft = Eagle3Draft(Eagle3Config(FROM_GGUF, Eagle3Settings(draft_vocab_size=100)))
    draft.choose_vocabulary(torch.arange(0, 1000, 10))
    assert main(["--runs", str(write_run(tmp_path / "run", draft, 3)), "--out", str(tmp_path / "out")]) == 0
    got = load_draft(tmp_path / "out/eagle3", PUBLISHED)
    assert isinstance(got, Eagle3Draft) and torch.equal(got.target_ids, torch.arange(0, 1000, 10))
    assert got.lm_head.weight.dtype == torch.bfloat16
    assert not (tmp_path / "out/data.json").exists()


def test_a_copy_of_a_run_without_its_checkpoints_is_shipped_up_to_the_draft_that_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = LongSpecDraft(LongSpecConfig(PUBLISHED, LongSpecSettings()))
    run, out = write_run(tmp_path / "run", draft, 1), tmp_path / "out"
    (run / "checkpoints/step-1/draft").rename(run / "draft")
    told = yaml.safe_load((run / "run.yaml").read_text())
    later = {**told, "date": "2026-01-02", "command": "/tmp/x/long_draft.py --config recipes/r.yaml optim.lr=1"}
    (run / "run-from-1.yaml").write_text(yaml.safe_dump(later))
    (run / "run.yaml").write_text(yaml.safe_dump({**told, "commit": None}))
    monkeypatch.delenv("LONGDRAFT_COMMIT", raising=False)
    with pytest.raises(UserError, match="set LONGDRAFT_COMMIT"):
        main(["--runs", str(run), "--out", str(out)])
    assert not out.exists()
    monkeypatch.setenv("LONGDRAFT_COMMIT", "abc")
    assert main(["--runs", str(run), "--out", str(out)]) == 0
    first, *rows = [json.loads(line) for line in (out / "longspec.log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 1] and first["commit"] == "abc"
    assert first["resumed"] == [{"date": "2026-01-02", "command": "longdraft train --config recipes/r.yaml optim.lr=1"}]
    (run / "draft/config.json").unlink()
    with pytest.raises(UserError, match="no checkpoint and no draft"):
        main(["--runs", str(run), "--out", str(out)])


def test_a_draft_for_another_target_and_a_folder_without_a_run_are_refused(tmp_path: Path) -> None:
    assert published_spec(vars_of(PUBLISHED)) == published_spec(vars_of(FROM_GGUF)) == PUBLISHED
    with pytest.raises(UserError, match="not HuggingFaceTB/SmolLM2-135M-Instruct"):
        published_spec(vars_of(replace(PUBLISHED, num_layers=29)))
    draft = LongSpecDraft(LongSpecConfig(PUBLISHED, LongSpecSettings()))
    run = write_run(tmp_path / "run", draft, 3)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics.jsonl is missing"):
        main(["--runs", str(run), "--out", str(tmp_path / "out")])


def test_only_absolute_paths_are_cut() -> None:
    assert portable(["a/b/c", "/x/y/runs/z", "--f=/x/model", "https://h/p", 3, "1/2"]) == [
        "a/b/c", "runs/z", "--f=model", "https://h/p", 3, "1/2",
    ]  # fmt: skip


def test_no_spelling_of_a_path_leaves_a_persons_name() -> None:
    home = "/" + "home"  # in two words: no file names a folder of some machine
    given = [f"{home}/ann/x.json", f"file://{home}/ann/x.json", "~/secret/x", f"a:{home}/ann/d/key.pem"]
    assert portable(given) == ["x.json", "x.json", "x", "a:d/key.pem"]


def test_files_of_one_name_keep_the_folders_that_tell_them_apart() -> None:
    given = ["data.train=[/x/own/generated.jsonl,/x/other/generated.jsonl,/x/ids.jsonl]", "/x/y/model"]
    assert portable(given) == ["data.train=[own/generated.jsonl,other/generated.jsonl,ids.jsonl]", "model"]
