"""longdraft calibrate on tiny random models: its result, stops and resumes, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_case import small_words, write_documents, write_drafts

from longdraft import cli
from longdraft.draft_models.sparse_recipe import SparseRecipe
from longdraft.train.calibrate import Calibration, main
from longdraft.train.calibration.settings import CalibrateSettings
from longdraft.train.calibration.state import State
from longdraft.train.calibration.traces import Trace
from longdraft.train.config import TargetSettings

DIFFERS = ("command", "date", "seconds")  # of two runs: their times, and the names of their files


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents.jsonl")


@pytest.fixture
def words(tmp_path: Path, documents: Path) -> list[str]:
    return small_words(documents, tmp_path / "recipe.json")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_drafts(tmp_path_factory.mktemp("drafts"))


def told(path: Path) -> dict[str, Any]:
    """A recipe without what differs between two runs."""
    recipe = SparseRecipe.load(path).model_dump()
    return {**recipe, "provenance": {k: v for k, v in recipe["provenance"].items() if k not in DIFFERS}}


@pytest.mark.parametrize(
    ("kind", "target", "layers"),
    [("longspec", "llama:3", [0, 2]), ("eagle3", "llama:4", [0]), ("model", "llama:3", [0, 1])],
)
def test_a_recipe_is_found_for_every_kind_of_draft(
    kind: str,
    target: str,
    layers: list[int],
    words: list[str],
    drafts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["calibrate", *words, "--target.path", f"tiny-random:{target}", "--draft", drafts[kind]]) == 0
    recipe = SparseRecipe.load(tmp_path / "recipe.json")
    assert recipe.budget == 40 and recipe.lookahead in {0, 4, 8, 12, 16, 20}
    assert recipe.target.layer < int(target[-1]) and len(recipe.target.heads) == 2
    assert recipe.draft and {each.layer for each in recipe.draft} <= set(layers)
    facts = recipe.provenance
    assert facts["answers"]["how"] == "given" and facts["answers"]["counted"] == facts["answers"]["asked"] == 4
    assert facts["answers"]["why"] == "no own answer of 4 recalled its needle"
    assert facts["traces"] == 3 and facts["documents"] == {"names": ["documents.jsonl"], "count": 5}
    heads = facts["retrieval_heads"]
    assert recipe.target.heads == heads["target"][recipe.target.layer] and len(heads["draft"]) == len(layers)
    assert facts["recovery"]["found"] == max(
        v for k, v in facts["recovery"]["tried"].items() if k.startswith("lookahead")
    )
    assert facts["models"]["draft"]["name"] == kind and facts["models"]["draft"]["layers"] == layers
    assert str(tmp_path) not in json.dumps(facts), "no folder of this machine"
    assert list(tmp_path.glob("*.work")) == [], "nothing is left beside the recipe"
    progress = capsys.readouterr().err.splitlines()
    for start in ("needle 4 of 4, own answers", "no answer of 4 recalls its needle", "needle 4 of 4, given answers", "trace 3 of 3", "target layer", "draft layer", "lookahead"):  # fmt: skip
        assert any(line.startswith(start) for line in progress), start


def test_without_a_draft_the_history_chooses_alone(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--traces.continuation", "own", "--needles.answers", "given"]) == 0
    recipe = SparseRecipe.load(tmp_path / "recipe.json")
    assert recipe.draft == [] and recipe.lookahead == 0 and recipe.provenance["models"]["draft"] is None
    assert "why" not in recipe.provenance["answers"]


def test_the_same_seed_gives_the_same_recipe_and_another_one_other_documents(
    words: list[str], drafts: dict[str, str], tmp_path: Path
) -> None:
    found = []
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert main([*words, "--draft", drafts["longspec"], "--out", str(tmp_path / name), "--seed", seed]) == 0
        found.append(told(tmp_path / name))
    assert found[0] == found[1]
    assert found[0]["provenance"]["head_scores"] != found[2]["provenance"]["head_scores"]


class Killed(BaseException):
    """What no handler of the program takes for its own."""


def run_until(words: list[str], saves: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a calibration that is killed in the place of its save of that number; whether it was."""
    left, save = [saves], State.save

    def dying(self: State) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        save(self)

    with monkeypatch.context() as patch:
        patch.setattr(State, "save", dying)
        try:
            main(words)
        except Killed:
            return True
    return False


def test_a_run_killed_at_any_step_resumes_to_the_same_recipe(
    words: list[str],
    drafts: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*words, "--draft", drafts["longspec"]]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    want, stopped, out = told(tmp_path / "whole"), 0, tmp_path / "again"
    capsys.readouterr()
    while run_until([*words, "--out", str(out)], 2, monkeypatch):  # two steps at a time
        stopped += 1
        assert not out.exists()
    assert stopped >= 8 and told(out) == want
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("needle ")]
    assert len(lines) < 2 * 8 + stopped, "what was saved is not done again"


def test_a_run_is_not_resumed_with_other_settings(
    words: list[str],
    documents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_until(["calibrate", *words][1:], 3, monkeypatch)
    capsys.readouterr()

    def refused(*more: str) -> str:
        assert cli.main(["calibrate", *words, *more]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "needles.depths=3, but" in refused("--needles.depths", "3")
    assert "was begun with 2: give the former value or another out, or remove the folder" in refused(
        "--needles.depths", "3"
    )
    with documents.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert "documents.sha256=" in refused()
    (tmp_path / "recipe.json.work" / "state.json").write_text("{")
    assert "is damaged" in refused()


def test_two_processes_do_not_share_a_work_folder(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = State(tmp_path / "recipe.json.work", {})
    assert cli.main(["calibrate", *words]) == 2
    assert "is in use by another process" in capsys.readouterr().err
    state.close()


Change = Callable[[Path, dict[str, str]], list[str]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tmp, _: ["--out", str(tmp / "documents.jsonl")], "is there already: give another out, or remove it"),
        (lambda tmp, _: ["--documents", str(tmp / "none.jsonl")], "cannot be read (No such file"),
        (lambda tmp, _: ["--needles.lengths", "[20000]"], "needles.lengths=[20000]: the target has 16384 positions"),
        (lambda tmp, _: ["--needles.lengths", "[9000]"], "needles.lengths wants 9,000 of each"),
        (lambda tmp, _: ["--needles.lengths", "[0]"], "a prompt has 1 token or more"),
        (lambda tmp, _: ["--traces.tokens", "16380"], "traces.tokens=16380 and its windows reach 16396 of 16384"),
        (lambda tmp, _: ["--traces.tokens", "4000"], "traces.tokens=4000: no document has the 4,016 tokens"),
        (lambda tmp, _: ["--needles.answers", "own"], "none of 4 answers recalls more than 50 % of its needle"),
        (lambda tmp, _: ["--traces.tokens", "40"], "traces.tokens=40 with search.budget=40: a set would hold the whole text"),
        (lambda tmp, _: ["--search.budget", "20"], "search.budget=20"),
        (lambda tmp, _: ["--search.splits", "[0.9]"], "sinks and window take 20 of budget=40, write shares above 0 up to 0.500"),
        (lambda tmp, _: ["--draft", str(tmp / "nowhere")], "draft='" ),
        (lambda tmp, drafts: ["--draft", drafts["eagle3"]], "target"),
        (lambda tmp, _: ["--needels.depths", "1"], "did you mean '--needles.depths'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(
    change: Change,
    message: str,
    words: list[str],
    drafts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["calibrate", *words, *change(tmp_path, drafts)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--traces.tokens", "4000"], "no document has the 4,016 tokens"),
        (["--traces.tokens", "4000", "--traces.continuation", "own"], "no document has the 4,000 tokens"),
        (["--needles.lengths", "[360, 90]"], "needles.lengths=90: question and needle alone take"),
    ],
)
def test_what_does_not_fit_the_documents_is_said_before_any_question(
    change: list[str], message: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run cannot go on with other settings, so what it had found until then would be lost."""
    assert cli.main(["calibrate", *words, *change]) == 2
    error = capsys.readouterr().err
    assert message in error and "needle 1 of" not in error and not (tmp_path / "recipe.json.work").exists()


def test_a_draft_of_fewer_positions_is_refused(
    words: list[str], drafts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(drafts["model"], tmp_path / "short")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 363}))
    assert cli.main(["calibrate", *words, "--draft", str(copy)]) == 2
    assert "has 363 positions, needles and traces reach 364: lower" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", *words, "--device", "cuda"]) == 2
    assert "error: device='cuda', but PyTorch sees no GPU: use auto or cpu" in capsys.readouterr().err


def test_a_model_with_another_vocabulary_is_refused(
    words: list[str], drafts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(drafts["model"], tmp_path / "other")
    path = copy / "tokenizer.json"
    path.write_text(path.read_text().replace("<|reserved_0|>", "<|other|>"))
    assert cli.main(["calibrate", *words, "--draft", str(copy)]) == 2
    assert "has another vocabulary than target.path='tiny-random:llama:3'" in capsys.readouterr().err


def test_traces_are_kept_whole(tmp_path: Path, documents: Path) -> None:
    """A text without a draft has no lookahead layers, which a file must hold too."""
    settings = CalibrateSettings(
        out=str(tmp_path / "r"), target=TargetSettings(path="tiny-random:llama"), documents=str(documents),
        traces={"tokens": 60, "windows": 2}, search={"budget": 50}, needles={"lengths": [240], "haystacks": 1},
    )  # fmt: skip
    calibration = Calibration(settings, [], lambda text: None)
    (trace, *rest) = calibration._traces({"target": [[0], [1, 3]]})
    assert trace.lookahead_SWN.shape == (0, 2, 64) and trace.history_GSWN.shape == (1, 2, 2, 64)
    assert trace.length_W.tolist() == [60, 64] and len(rest) == 4
    again = Trace.load(calibration._trace_file(calibration.state.values["traced texts"][0]))
    assert all((getattr(trace, name) == getattr(again, name)).all() for name in ("attention_SWN", "history_GSWN"))
    calibration.state.close()
