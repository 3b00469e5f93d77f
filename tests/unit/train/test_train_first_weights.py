"""What a run starts from: a fit to the target, heads at the newest key, a ranked head, another run's draft."""

from pathlib import Path

import pytest
import torch
from train_case import final_state, recipe, rows, train

from longdraft.draft_models.checkpoint import load_draft
from longdraft.train.config import TargetSettings
from longdraft.train.long_draft import main
from longdraft.train.target import load_target, load_tokenizer

__all__ = ["recipe"]  # a fixture


def test_a_fit_before_the_first_step_lowers_its_loss_and_a_resumed_run_keeps_its_weights(recipe: Path) -> None:
    settings = ("draft.init=target", "objective.name=greedy", "objective.rows=all", "schedule.max_steps=2")
    without = rows(train(recipe, "without", *settings))[0]["loss"]
    whole = train(recipe, "whole", *settings, "draft.fit_tokens=1500")
    assert rows(whole)[0]["loss"] < 0.9 * without
    train(recipe, "parts", *settings, "draft.fit_tokens=1500", "schedule.max_steps=1")
    parts = train(recipe, "parts", *settings, "draft.fit_tokens=1500")
    want, got = final_state(whole), final_state(parts)
    assert all(torch.equal(want[key], got[key]) for key in want)


NEWEST = ("draft.newest_heads=1", "draft.qkv_bias=true", "draft.fit_tokens=1500", "draft.init=target")


def test_newest_heads_start_as_biases_and_a_resumed_run_keeps_its_weights(recipe: Path) -> None:
    still = ("optim.lr=1e-12", "optim.warmup_ratio=0", "schedule.max_steps=2", "objective.name=greedy")
    whole = train(recipe, "whole", *NEWEST, *still)
    train(recipe, "parts", *NEWEST, *still, "schedule.max_steps=1")
    parts = train(recipe, "parts", *NEWEST, *still)
    want, got = final_state(whole), final_state(parts)
    assert all(torch.equal(want[key], got[key]) for key in want)
    target = load_target(TargetSettings(path="tiny-random:llama"), torch.device("cpu"))
    bias = load_draft(whole / "checkpoints" / "latest" / "draft", target.spec).cross_attn.q_proj.bias
    by_head = bias.view(target.spec.num_kv_heads, -1, target.spec.head_dim).norm(dim=-1)
    assert (by_head[:, 0] > 1).all()
    assert (by_head[:, 1:] < 1e-3).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("draft.newest_heads=1", "draft.fit_tokens=100"), "draft.qkv_bias=true"),
        (("draft.newest_heads=1", "draft.qkv_bias=true"), "draft.fit_tokens=200000"),
        ((*NEWEST, "draft.newest_heads=9"), "or less"),
        ((*NEWEST, "draft.cross_q_norm=true"), "draft.cross_q_norm=false"),
        ((*NEWEST, "draft.init_from=folder"), "leave one out"),
    ],
)
def test_newest_heads_that_cannot_start_are_refused(
    recipe: Path, settings: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(recipe), *settings]) == 2
    assert words in capsys.readouterr().err


COPYING = ("draft.copy_queries=true", "draft.newest_lags=2", "draft.fit_tokens=1500", "draft.init=target")


def test_a_run_starts_with_the_targets_queries_and_a_resumed_one_keeps_them(recipe: Path) -> None:
    still = ("optim.lr=1e-12", "optim.warmup_ratio=0", "schedule.max_steps=2", "objective.name=greedy")
    plain = train(recipe, "plain", *COPYING, *still, "draft.copy_queries=false")
    whole = train(recipe, "whole", *COPYING, *still)
    train(recipe, "parts", *COPYING, *still, "schedule.max_steps=1")
    want, got = final_state(whole), final_state(train(recipe, "parts", *COPYING, *still))
    assert all(torch.equal(want[key], got[key]) for key in want)
    target = load_target(TargetSettings(path="tiny-random:llama"), torch.device("cpu"))
    started, before = (load_draft(run / "checkpoints" / "latest" / "draft", target.spec) for run in (whole, plain))
    assert not torch.equal(started.cross_attn.q_proj.weight, before.cross_attn.q_proj.weight)
    assert started.cross_attn.o_proj.weight.norm() > 1e-3 and before.cross_attn.o_proj.weight.norm() < 1e-3
    assert rows(whole)[0]["loss"] <= 1.05 * rows(plain)[0]["loss"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("draft.copy_queries=true",), "draft.fit_tokens: set it, such as 200000"),
        ((*COPYING, "draft.cross_q_norm=true"), "draft.cross_q_norm=false"),
        ((*COPYING, "draft.init_from=folder"), "draft.init_from brings: leave one out"),
        ((*COPYING, "draft.newest_heads=1", "draft.qkv_bias=true"), "draft.newest_heads brings: leave one out"),
        ((*COPYING, "draft.cross_group=9"), "query heads a key head to copy"),
        ((*COPYING, "target.path=tiny-random:qwen3"), "this draft norms them: set draft.cross_q_norm=false"),
    ],
)
def test_queries_that_cannot_be_copied_are_refused(
    recipe: Path, settings: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(recipe), *settings]) == 2
    assert words in capsys.readouterr().err


def test_a_ranked_head_holds_the_training_texts_tokens_and_the_ends(recipe: Path) -> None:
    run = train(recipe, "r", "draft.head_tokens=25", "schedule.max_steps=1")
    target = load_target(TargetSettings(path="tiny-random:llama"), torch.device("cpu"))
    draft = load_draft(run / "checkpoints" / "latest" / "draft", target.spec)
    tokenizer = load_tokenizer(TargetSettings(path="tiny-random:llama"))
    assert draft.head_ids is not None
    held = set(draft.head_ids.tolist())
    assert held >= set(tokenizer.all_special_ids)
    assert held >= {tokenizer(" ").input_ids[0], tokenizer("x").input_ids[0], tokenizer("o").input_ids[0]}


def test_init_from_starts_at_another_runs_draft(recipe: Path) -> None:
    first = train(recipe, "first")
    second = train(
        recipe, "second", f"draft.init_from={first}/checkpoints/latest/draft", "optim.lr=1e-12", "schedule.max_steps=1"
    )
    want, got = final_state(first), final_state(second)
    assert all(torch.allclose(want[key], got[key], atol=1e-6) for key in want if key.startswith("master."))
