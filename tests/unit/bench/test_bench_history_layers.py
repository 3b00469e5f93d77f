"""bench history_layers: sets and choices against an eager model's, what a set of everything is worth, seeds, figures, and what is refused.

Legend: W verifications, C rows of each, N tokens.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target
from transformers import DynamicCache

from longdraft import cli
from longdraft.bench import history_layers as hl
from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.serve.views.token_set import SparseBudget, choose_tokens
from longdraft.train.calibration.reading import Reading
from longdraft.train.calibration.recovery import RECENT, SINKS
from longdraft.train.calibration.retrieval_heads import own_answer
from longdraft.train.calibration.traces import Tracer, Windows
from longdraft.train.positions import seeded

HEADS = [[0, 1], [2, 3], [1, 2], [0, 3]]
WINDOWS = Windows(60, 4, 3)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_target("llama", num_hidden_layers=4).model


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    """60 random tokens and the model's 13 greedy ones."""
    prompt = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    return [*prompt, *own_answer(Reading(model), prompt, 13, [])]


@pytest.fixture
def given(tmp_path: Path) -> dict[str, str]:
    """Files and options of a small measurement."""
    provenance = {"retrieval_heads": {"target": HEADS, "draft": []}}
    target = LayerHeads(layer=2, heads=[1, 2])
    SparseRecipe(target=target, lookahead=0, provenance=provenance).save(tmp_path / "recipe.json")
    texts = ["".join(random.Random(seed).choices("abcdefghij ", k=200)) for seed in (2, 3, 4)]  # no answer loops
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {
        "target": "tiny-random:llama:4", "recipe": str(tmp_path / "recipe.json"), "documents": str(tmp_path / "texts.jsonl"),
        "record": str(tmp_path / "record.json"), "plot": str(tmp_path / "new" / "plot.png"), "count": "2", "tokens": "150",
        "new-tokens": "12", "window": "3", "seed": "0",
    }  # fmt: skip


def run(given: dict[str, str], *more: str) -> int:
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    return cli.main(["bench", "history_layers", *words, "--budgets", "40", "80", *more])


def members(set_N: torch.Tensor) -> set[int]:
    return set(set_N.nonzero().flatten().tolist())


def test_sets_are_those_that_serving_would_read_by_an_eager_models_attention(text: list[int]) -> None:
    """History at the last committed row, over all that it sees, of the layer's own heads (equation 5)."""
    target = tiny_target("llama", num_hidden_layers=4)
    trace = Tracer(target.model, None, HEADS, []).trace(text, WINDOWS)
    sets = hl.sets_of(trace, 40, seeded(1))
    target.model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = target.model(torch.tensor([text]), output_attentions=True).attentions
    length_W, budget = torch.tensor(WINDOWS.starts), SparseBudget(40, SINKS, RECENT, 0)
    last = torch.stack([eager[layer][0, heads][:, length_W - 1].sum(0) for layer, heads in enumerate(HEADS)])
    histories = {f"layer{layer}": last[layer][:, : WINDOWS.starts[-1]] for layer in range(4)}
    histories["all_layers"] = last.sum(0)[:, : WINDOWS.starts[-1]]
    for name, history_WN in histories.items():
        served = choose_tokens(history_WN, history_WN, length_W, budget)
        for w, start in enumerate(WINDOWS.starts):
            listed = served.column_BV[w, : int(served.count_B[w])].tolist()
            assert members(sets[name][w]) == {*listed, *range(int(served.start_B[w]), start)}, name
    for w, start in enumerate(WINDOWS.starts):
        assert members(sets["recent"][w]) == {*range(4), *range(start - 36, start)}
        assert {*range(4), *range(start - 16, start)} < members(sets["random"][w]) <= set(range(start))
        rows = torch.stack([eager[layer][0, heads, start : start + 3, :start] for layer, heads in enumerate(HEADS)])
        mass_N = (rows / rows.sum(-1, keepdim=True)).mean((0, 1, 2))
        assert members(sets["oracle"][w]) == set(mass_N.topk(40).indices.tolist())
    assert all((found.sum(-1) == 40).all() for found in sets.values())


def test_choices_are_those_of_a_cache_that_holds_the_set_alone(model: Any, text: list[int]) -> None:
    """Each verification on its own, behind a cache from which all other tokens were taken away."""
    trace = Tracer(model, None, HEADS, []).trace(text, WINDOWS)
    reading = Reading(model)
    reading.read(text[: WINDOWS.starts[-1]])
    changed = 0
    for name, set_WN in hl.sets_of(trace, 24, seeded(3)).items():
        got_WC = hl.choices(reading, text, WINDOWS, set_WN)
        for w, start in enumerate(WINDOWS.starts):
            cut, whole = DynamicCache(), DynamicCache()
            with torch.no_grad():
                model(torch.tensor([text[:start]]), past_key_values=whole)
                for number, layer in enumerate(whole.layers):
                    kept_N = set_WN[w, :start]
                    cut.update(layer.keys[:, :, kept_N], layer.values[:, :, kept_N], number)
                at = torch.arange(start, start + 3)[None]
                want = model(torch.tensor([text[start : start + 3]]), past_key_values=cut, position_ids=at).logits[0]
            assert got_WC[w].tolist() == want.argmax(-1).tolist(), name
            changed += got_WC[w].tolist() != text[start + 1 : start + 4]
    assert changed and reading.cache.get_seq_length() == len(reading) == WINDOWS.starts[-1]


def test_a_set_of_everything_agrees_always_and_recovers_everything(model: Any, text: list[int]) -> None:
    tracer = Tracer(model, None, HEADS, [])
    found = hl.measure(tracer, text, WINDOWS, [24, 100], 2, (0,))
    assert found["whole"].shape == (3, 4) and found["layer3_k24"][0].mean() < 1 and found["layer3_k24"][1].max() < 0.99
    for name in ("whole", "layer0_k100", "layer3_k100", "all_layers_k100", "recent_k100", "random_k100", "oracle_k100"):
        assert found[name][0].tolist() == [1.0] * 4
        torch.testing.assert_close(found[name][1:], torch.ones(2, 4, dtype=torch.float64), rtol=0, atol=1e-5)


def test_deeper_recovery_is_that_of_the_layers_from_the_first_on(model: Any, text: list[int]) -> None:
    tracer = Tracer(model, None, HEADS, [])
    attention_SWN = tracer.trace(text, WINDOWS).attention_SWN
    for first in (0, 3):
        found = hl.measure(tracer, text, WINDOWS, [24], first, (0,))["recent_k24"]
        for w, start in enumerate(WINDOWS.starts):
            kept = [*range(4), *range(start - 20, start)]
            by_layer_S = attention_SWN[:, w, kept].sum(-1).double()
            assert found[1, w] == pytest.approx(float(by_layer_S.mean()), rel=1e-5)
            assert found[2, w] == pytest.approx(float(by_layer_S[first:].mean()), rel=1e-5)


def test_a_record_has_every_layer_and_control_and_a_picture(
    given: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(given) == 0
    record = json.loads(Path(given["record"]).read_text())
    figures, layers = record["figures"], record["layers"]
    assert (figures["texts"], figures["left_out"], figures["tokens"]) == (2, 0, 18)
    assert record["checks"] == dict.fromkeys(("shares", "no_set_beats_the_oracle", "whole_cache_agrees"), True)
    assert layers.keys() == {f"{kind}_k{k}" for kind in hl.KINDS for k in (40, 80)}
    assert all(len(row) == 4 for row in layers.values()) and figures["agreement_whole"] == 1
    for k in (40, 80):
        for kind in hl.KINDS:
            best = figures[f"best_layer_by_{kind}_k{k}"]
            assert layers[f"{kind}_k{k}"][best] == max(layers[f"{kind}_k{k}"])
            assert figures[f"agreement_of_best_layer_by_{kind}_k{k}"] == layers[f"agreement_k{k}"][best]
            assert {f"{kind}_{name}_k{k}" for name in hl.CONTROLS} < figures.keys()
    assert record["settings"]["target_layer"] == 2 and record["settings"]["documents"] == "texts.jsonl"
    assert Path(given["plot"]).read_bytes().startswith(b"\x89PNG")
    assert "best_layer_by_recovery_deeper_k80" in capsys.readouterr().out


def test_the_same_seed_measures_the_same_and_another_one_changes_random_sets_alone(given: dict[str, str]) -> None:
    found = []
    for seed in ("0", "0", "7"):
        assert run({**given, "seed": seed}) == 0
        found.append(json.loads(Path(given["record"]).read_text()))
    same, other = [each["figures"] for each in found[:2]], found[2]["figures"]
    assert same[0] == same[1] and found[0]["layers"] == found[1]["layers"] == found[2]["layers"]
    changed = {name for name in other if other[name] != same[0][name]}
    assert "recovery_random_k40" in changed and all("_random_" in name for name in changed)


def test_answers_that_loop_or_end_at_once_are_left_out(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([[7] * 12, [5, 6, 7], None, [7] * 12, []])

    def answer(reading: Reading, ids: list[int], new_tokens: int, stop_ids: list[int]) -> list[int]:
        return own_answer(reading, ids, new_tokens, []) if (own := next(answers)) is None else own

    monkeypatch.setattr(hl, "own_answer", answer)
    assert run({**given, "count": "3"}) == 0
    figures = json.loads(Path(given["record"]).read_text())["figures"]
    assert (figures["texts"], figures["left_out"], figures["tokens"]) == (1, 2, 9)
    assert run(given) == 2 and "all 2 answers loop or end at once: give other" in capsys.readouterr().err


def means_of(rows: list[tuple[float, float, float]]) -> dict[str, list[float]]:
    controls = {f"{name}_k40": [0.5, 0.4, 0.3] for name in hl.CONTROLS} | {"oracle_k40": [0.9, 0.9, 0.9]}
    layers = {f"layer{i}_k40": list(row) for i, row in enumerate(rows)}
    return {"whole": [1.0, 1.0, 1.0], **controls, **layers}


def test_figures_name_the_layer_that_each_recovery_would_take() -> None:
    means = means_of([(0.5, 0.8, 0.3), (0.7, 0.7, 0.5), (0.9, 0.6, 0.7), (0.6, 0.75, 0.9)])
    rows = hl.by_layer(means, 4, [40])
    figures = hl.figures_of(means, rows, [40])
    assert rows["recovery_deeper_k40"] == [0.3, 0.5, 0.7, 0.9]
    taken = [(figures[f"best_layer_by_{k}_k40"], figures[f"agreement_of_best_layer_by_{k}_k40"]) for k in hl.KINDS]
    assert taken == [(2, 0.9), (0, 0.5), (3, 0.6)]
    assert figures["pearson_recovery_k40"] == pytest.approx(-1) and 0 < figures["pearson_recovery_deeper_k40"] < 1
    assert figures["recovery_deeper_recent_k40"] == 0.3


def test_a_correlation_without_differences_is_left_out(tmp_path: Path) -> None:
    means = means_of([(0.5, 0.8, 0.3), (0.5, 0.7, 0.3)])
    rows = hl.by_layer(means, 2, [40])
    figures = hl.figures_of(means, rows, [40])
    assert not [name for name in figures if "pearson" in name] and figures["best_layer_by_recovery_k40"] == 0
    hl.draw({"settings": {"budgets": [40], "target": "t"}, "layers": rows, "figures": figures}, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_checks_fail_where_no_measurement_could_be() -> None:
    good = means_of([(0.5, 0.8, 0.3)])
    assert all(hl.checks_of(good, [40], True).values()) and "whole_cache_agrees" not in hl.checks_of(good, [40], False)
    assert not hl.checks_of({**good, "layer0_k40": [0.5, 0.95, 0.3]}, [40], True)["no_set_beats_the_oracle"]
    assert not hl.checks_of({**good, "layer0_k40": [1.5, 0.5, 0.3]}, [40], True)["shares"]
    assert not hl.checks_of({**good, "whole": [0.99, 1.0, 1.0]}, [40], True)["whole_cache_agrees"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"recipe": "nowhere.json"}, "make it with longdraft calibrate"),
        ({"target": "tiny-random:llama:2"}, "heads of 4 and 0 layers, target and draft have 2 and 0"),
        ({"tokens": "9000"}, "no document of 9,000 tokens: lower --tokens"),
        ({"new-tokens": "16300"}, "more than the target's 16384 positions: lower --tokens or --new-tokens"),
        ({"documents": "nowhere.jsonl"}, "cannot be read (No such file"),
        ({"record": "."}, "is a folder: give a file"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    change: dict[str, str], told: str, given: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run({**given, **change}) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert told in line and not Path(given["record"]).exists()


def test_a_target_that_cannot_be_asked_is_refused(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("longdraft.train.tiny_random.CHAT_TEMPLATE", None)
    assert run(given) == 2 and "'tiny-random:llama:4' has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        ["--count", "0"], ["--window", "0"], ["--new-tokens", "3"], ["--budgets", "20"], ["--budgets", "150"],
        ["--budgets", "40", "40"], ["--skip", "1"], ["--skip", "-0.1"],
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    more: list[str], given: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(given, *more)
    assert end.value.code == 2 and f"error: {more[0]}" in capsys.readouterr().err
