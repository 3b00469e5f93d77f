"""bench arr: policies and their recoveries, what the record answers for, its pictures, and recovery against distortion.

Legend: S layers, W verifications, N tokens, P prompt tokens, G rows.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import tiny_draft, tiny_target
from transformers import DynamicCache

from longdraft import cli
from longdraft.bench.arr import Recoveries, checks_of, policies, recent_sets, shared_split
from longdraft.bench.arr_figures import FIGURES, draw
from longdraft.bench.arr_kl import kl_divergence, kl_points, pearson, sampled_set, sparse_mask
from longdraft.draft_models.attention_rows import run_looking
from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.serve.views.token_set import SparseBudget, choose_tokens
from longdraft.train.calibration.recovery import RECENT, SINKS, Split, choose_sets
from longdraft.train.calibration.traces import Trace, Tracer, Windows

LAGS = [1, 3]
HEADS = {"target": [[0, 1], [2, 3], [1, 2], [0, 3]], "draft": [[0, 1], [2, 3]]}


def recipe_of(lookahead: int = 8, **provenance: Any) -> SparseRecipe:
    draft = [LayerHeads(layer=1, heads=[0, 1]), LayerHeads(layer=3, heads=[2, 3])]
    target = LayerHeads(layer=2, heads=[1, 2])
    return SparseRecipe(target=target, draft=draft, lookahead=lookahead, budget=40, provenance=provenance)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, str]:
    """A target, a draft for it, a recipe and documents, as the command takes them."""
    save_draft(
        tiny_draft(tiny_target("llama", num_hidden_layers=4), window=16, cross_layers=[1, 3]),
        tmp_path / "draft",
        "tiny",
    )
    recipe_of(retrieval_heads=HEADS).save(tmp_path / "recipe.json")
    texts = [
        f"Number {n} " + "of all the days of the year it was the driest. " * (2 if n == 1 else 5) for n in range(4)
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {
        "target": "tiny-random:llama:4", "draft": str(tmp_path / "draft"), "recipe": str(tmp_path / "recipe.json"),
        "documents": str(tmp_path / "texts.jsonl"), "record": str(tmp_path / "record.json"), "plots": str(tmp_path / "plots"),
    }  # fmt: skip


def words_of(pair: dict[str, str]) -> list[str]:
    found = [word for name, value in pair.items() for word in (f"--{name}", value)]
    found += ["--count", "2", "--tokens", "150", "--windows", "3", "--window", "3", "--budgets", "40", "80", "24"]
    return [*found, "--lags", "1", "3", "--split-step", "4", "--kl-points", "5", "--kl-budget", "40", "--kl-rows", "6"]


def test_a_record_has_every_policy_and_pictures(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "arr", *words_of(pair)]) == 0
    record = json.loads(Path(pair["record"]).read_text())
    kinds = ("oracle", "oracle_by_layer", "recent", "history_lag1", "history_lag3", "lookahead", "hybrid")
    assert {f"arr_{kind}_k{k}" for kind in kinds for k in (24, 40, 80)} < record["figures"].keys()
    assert record["figures"]["texts"] == 2 and all(record["checks"].values())
    for name, row in record["layers"].items():
        assert len(row) == 4 and sum(row) / 4 == pytest.approx(record["figures"][f"arr_{name}"], abs=1e-4)
    assert [m for m, _ in record["splits"]["40"]] == [0, 4, 8, 12, 16, 20]
    splits = dict(map(tuple, record["splits"]["40"]))
    assert splits[8] == pytest.approx(record["figures"]["arr_hybrid_k40"], abs=1e-4)
    assert splits[0] == pytest.approx(record["figures"]["arr_history_lag1_k40"], abs=1e-4)
    assert splits[20] == pytest.approx(record["figures"]["arr_lookahead_k40"], abs=1e-4)
    assert len(record["kl"]) == 5 and -1 <= record["figures"]["kl_pearson"] <= 1
    assert record["settings"]["draft"] == "draft" and record["settings"]["target_layer"] == 2
    assert sorted(path.name for path in Path(pair["plots"]).iterdir()) == sorted(f"arr_{name}.png" for name in FIGURES)
    assert "arr_hybrid_k40" in capsys.readouterr().out


def test_a_file_is_measured_once(pair: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, own = (
        tmp_path / "arr.yaml",
        {"count": 1, "tokens": 150, "windows": 3, "window": 3, "budgets": [40], "lags": [1]},
    )
    file.write_text(yaml.safe_dump({**pair, **own}))
    assert cli.main(["bench", "arr", str(file)]) == 0
    record = json.loads(Path(pair["record"]).read_text())
    assert all(record["checks"].values()) and "arr_hybrid_k40" in record["figures"] and record["settings"]["count"] == 1
    assert cli.main(["bench", "arr", str(file)]) == 0 and "is there and of these settings" in capsys.readouterr().out


def test_figures_are_drawn_from_records_alone(pair: dict[str, str], tmp_path: Path) -> None:
    """Of two pairs, the second without a draft: it has no lookahead to show."""
    words, alone = words_of(pair), tmp_path / "alone.json"
    assert cli.main(["bench", "arr", *words]) == 0
    recipe = recipe_of(lookahead=0, retrieval_heads={"target": HEADS["target"]})
    recipe.model_copy(update={"draft": []}).save(pair["recipe"])
    words = [word for word in words if word not in ("--draft", pair["draft"])]
    assert cli.main(["bench", "arr", *words, "--kl-points", "0", "--record", str(alone)]) == 0
    assert "arr_lookahead_k40" not in json.loads(alone.read_text())["figures"]
    assert cli.main(["bench", "arr_figures", pair["record"], str(alone), "--out", str(tmp_path / "shown")]) == 0
    assert len(list((tmp_path / "shown").glob("*.png"))) == len(FIGURES)


def test_looping_continuations_are_left_out_and_counted(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Along the target's own continuations, of which the first is taken to loop, then all."""
    answers = iter([None, list(range(159)), None, None])
    monkeypatch.setattr("longdraft.bench.arr.own_text", lambda model, ids, new: next(answers))
    assert cli.main(["bench", "arr", *words_of(pair), "--own"]) == 0
    figures = json.loads(Path(pair["record"]).read_text())["figures"]
    assert (figures["texts"], figures["looping"]) == (1, 1)
    assert cli.main(["bench", "arr", *words_of(pair), "--own"]) == 2
    assert "all 2 continuations loop" in capsys.readouterr().err


def small_trace() -> Trace:
    target = tiny_target("llama", num_hidden_layers=4)
    ids = torch.randint(0, 256, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    return Tracer(target.model, None, HEADS["target"], [], LAGS).trace(ids, Windows(60, 3, 4))


def test_traces_are_eager_attention_of_the_chosen_heads() -> None:
    """Rows of a verification over the committed tokens only, history over all that its row sees (U3)."""
    trace, target = small_trace(), tiny_target("llama", num_hidden_layers=4)
    ids = torch.randint(0, 256, (80,), generator=torch.Generator().manual_seed(2))
    target.model.set_attn_implementation("eager")
    with torch.no_grad():
        full = target.model(ids[None, :72], output_attentions=True).attentions
    assert trace.length_W.tolist() == [60, 64, 68]
    for layer, heads in enumerate(HEADS["target"]):
        for w, start in enumerate((60, 64, 68)):
            rows = full[layer][0, heads, start : start + 4, :start]
            want_N = (rows / rows.sum(-1, keepdim=True)).mean((0, 1))
            torch.testing.assert_close(trace.attention_SWN[layer, w, :start], want_N, rtol=1e-4, atol=1e-6)
            assert not trace.attention_SWN[layer, w, start:].any()
            for g, lag in enumerate(LAGS):
                want_N = full[layer][0, heads, start - lag, :68].sum(0)
                torch.testing.assert_close(trace.history_GSWN[g, layer, w], want_N, rtol=1e-4, atol=1e-6)


def test_policies_are_those_of_their_names() -> None:
    trace = small_trace()
    look_SWN = torch.rand(2, 3, 68, generator=torch.Generator().manual_seed(1))
    trace = Trace(trace.length_W, trace.attention_SWN, trace.history_GSWN, look_SWN)
    sets = policies(trace, LAGS, 2, [0, 1], Split(40, 8))
    for w, length in enumerate((60, 64, 68)):
        members = {name: set(x[..., w, :].reshape(-1, 68)[0].nonzero().flatten().tolist()) for name, x in sets.items()}
        assert all(len(found) == 40 and max(found) < length for found in members.values())
        assert members["recent"] == {*range(4), *range(length - 36, length)}
        protected = {*range(4), *range(length - 16, length)}
        for name in ("history_lag1", "history_lag3", "lookahead", "hybrid"):
            assert protected < members[name]
        ahead = look_SWN.sum(0)[w].tolist()
        rest = sorted(set(range(length)) - protected, key=lambda n: -ahead[n])
        assert members["lookahead"] == protected | set(rest[:20]) and set(rest[:8]) < members["hybrid"]
    assert not torch.equal(sets["history_lag1"], sets["history_lag3"])
    assert torch.equal(recent_sets(torch.tensor([10, 50]), 60, 40)[0], torch.arange(60) < 10)


@pytest.mark.parametrize("ties", [True, False])
def test_sets_are_those_that_serving_reads(ties: bool) -> None:
    """Recovery is measured of what a server would choose from the same scores (U1)."""
    g = torch.Generator().manual_seed(0)
    for tokens, budget, lookahead in ((60, 40, 8), (200, 40, 0), (200, 90, 70), (30, 40, 20)):
        history_WN, look_WN = (
            torch.rand(2, 4, tokens, generator=g)
            if not ties
            else torch.randint(1, 5, (2, 4, tokens), generator=g).float()
        )
        length_W = torch.randint(1, tokens + 1, (4,), generator=g)
        got_WN = choose_sets(history_WN, look_WN, length_W, Split(budget, lookahead))
        served = choose_tokens(look_WN, history_WN, length_W, SparseBudget(budget, SINKS, RECENT, lookahead))
        for w, length in enumerate(length_W.tolist()):
            listed = served.column_BV[w, : int(served.count_B[w])].tolist()
            assert set(got_WN[w].nonzero().flatten().tolist()) == {*listed, *range(int(served.start_B[w]), length)}


def test_a_split_is_shared_in_proportion() -> None:
    assert shared_split(recipe_of(8), 80) == Split(80, 24) and shared_split(recipe_of(20), 24) == Split(24, 4)


def test_checks_fail_where_no_recovery_could_be() -> None:
    good = {"oracle_k32": [0.5, 0.7], "oracle_by_layer_k32": [0.6, 0.8], "hybrid_k32": [0.4, 0.6]}
    assert all(checks_of(good, [32]).values())
    for name, row in (("hybrid_k32", [0.9, 0.9]), ("oracle_by_layer_k32", [0.1, 0.1]), ("hybrid_k32", [-0.1, 0.2])):
        assert not all(checks_of({**good, name: row}, [32]).values())
    wider = {name.replace("32", "64"): [x - 0.1 for x in row] for name, row in good.items()}
    assert not checks_of({**good, **wider}, [64, 32])["oracle_grows_with_the_budget"]


def test_texts_are_averaged() -> None:
    found = Recoveries(recipe_of(), [], LAGS, [40])
    found.add(small_trace(), 4)
    once = found.figures()
    found.add(small_trace(), 4)
    assert found.figures() == once and found.split_rows() == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--tokens": "9000"}, "no document of 9,009 tokens: lower --tokens"),
        ({"--target": "tiny-random:llama:2"}, "target"),
        ({"--recipe": "nowhere.json"}, "make it with longdraft calibrate"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, str], message: str, pair: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(pair)
    for name, value in change.items():
        words[words.index(name) + 1] = value
    assert cli.main(["bench", "arr", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (None, "cannot be read (No such file"),
        ("a text", "texts.jsonl:2: not valid JSON"),
        ("[1]", "texts.jsonl:2: holds a list"),
        ('{"words": "a"}', "texts.jsonl:2: text is NoneType"),
        ('{"input_ids": [1, 2], "supervised_from": 1}', "texts.jsonl:2: has no text"),
    ],
)
def test_documents_that_hold_no_text_are_named(
    line: str | None, message: str, pair: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(pair["documents"])
    if line is None:
        path.unlink()
    else:
        first, _, *rest = path.read_text().splitlines()
        path.write_text("\n".join([first, line, *rest]))
    assert cli.main(["bench", "arr", *words_of(pair)]) == 2
    assert message in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_said_first(
    pair: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for record, told in (
        (f"{pair['recipe']}/r.json", "cannot be written"),
        (pair["draft"], "is a folder: give a file"),
    ):
        assert cli.main(["bench", "arr", *words_of({**pair, "record": record, "target": "nowhere"})]) == 2
        assert f"error: record {record!r} {told}" in capsys.readouterr().err


def test_a_recipe_without_the_heads_of_all_layers_is_refused(
    pair: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_of().save(pair["recipe"])
    assert cli.main(["bench", "arr", *words_of(pair)]) == 2
    assert "heads of 0 and 0 layers, target and draft have 4 and 2" in capsys.readouterr().err


def test_a_recipe_of_another_drafts_layers_is_refused(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(retrieval_heads=HEADS)
    recipe.draft[1].layer = 0
    recipe.save(pair["recipe"])
    assert cli.main(["bench", "arr", *words_of(pair)]) == 2
    assert "the recipe looks at the draft's layers [0], it has [1, 3]" in capsys.readouterr().err


def test_a_set_of_everything_distorts_nothing_and_less_attention_distorts_more() -> None:
    model = tiny_target("llama", num_hidden_layers=4).model
    prompt = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    (whole,) = kl_points(model, prompt, 5, 60, 1, 0)
    assert whole["arr"] == pytest.approx(1, abs=1e-5) and whole["kl"] == pytest.approx(0, abs=1e-6)
    points = kl_points(model, prompt, 5, 30, 8, 0)
    assert points == kl_points(model, prompt, 5, 30, 8, 0) and [p["share"] for p in points][::7] == [0, 1]
    assert points[-1]["arr"] == max(p["arr"] for p in points) < 1 and min(p["kl"] for p in points) > 0
    assert pearson([{"arr": a, "kl": 1 - 2 * a} for a in (0.1, 0.5, 0.7)]) == pytest.approx(-1)


def test_a_sparse_pass_reads_the_set_and_what_stands_behind_the_prompt() -> None:
    """As if the other tokens' keys were not there: their values may be anything (P2)."""
    model = tiny_target("llama", num_hidden_layers=4).model
    id_L = torch.randint(0, 256, (50,), generator=torch.Generator().manual_seed(6))
    set_P = sampled_set(torch.rand(40, generator=torch.Generator().manual_seed(7)), 25, 0.5, 3)
    assert int(set_P.sum()) == 25 and set_P[:4].all() and set_P[-16:].all()
    found = []
    for spoiled in (False, True):
        cache = DynamicCache()
        run_looking(model, id_L[:40], cache, None)
        for layer in cache.layers if spoiled else ():
            layer.keys[:, :, :40][:, :, ~set_P] = 3.0
            layer.values[:, :, :40][:, :, ~set_P] = -50.0
        found.append(run_looking(model, id_L[40:], cache, None, attention_mask=sparse_mask(set_P, 10)))
    torch.testing.assert_close(found[0], found[1])
    cache = DynamicCache()
    run_looking(model, id_L[:40], cache, None)
    assert kl_divergence(run_looking(model, id_L[40:], cache, None), found[0]) > 1e-4


def test_divergence_is_its_formula() -> None:
    full, sparse = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]])
    p, q = full.softmax(-1), sparse.softmax(-1)
    assert kl_divergence(full, sparse) == pytest.approx(float((p * (p / q).log()).sum() / 2), rel=1e-5)


def test_nothing_to_draw_draws_nothing(tmp_path: Path) -> None:
    settings = {"budgets": [32], "lags": [1], "target": "t", "draft": None, "budget": 32, "target_layer": 0}
    figures = {"arr_oracle_k32": 0.5, "arr_history_lag1_k32": 0.4}
    layers = {"oracle_by_layer_k32": [0.5], "history_lag1_k32": [0.4]}
    record = {"settings": settings, "figures": figures, "layers": layers, "splits": {}, "kl": []}
    assert [path.name for path in draw([record], tmp_path)] == ["arr_history.png", "arr_layers.png"]


@pytest.mark.parametrize(
    "more",
    [
        ["--lags", "2"], ["--budgets", "20"], ["--kl-points", "1"], ["--kl-points", "-2"], ["--kl-budget", "20"],
        ["--count", "0"], ["--windows", "0"], ["--window", "0"], ["--split-step", "0"], ["--kl-rows", "0"],
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "arr", "--target", "t", "--recipe", "r", "--documents", "d", "--record", "x", *more])
    assert end.value.code == 2 and "error: " in capsys.readouterr().err
