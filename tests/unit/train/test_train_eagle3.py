"""EAGLE-3's objective against a loop that says what it means; warm starts, vocabularies and refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import tiny_eagle3, tiny_target

from longdraft.draft_models.checkpoint import load_draft, read_config
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_ttt import reference_ttt
from longdraft.errors import UserError
from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.schema import validate
from longdraft.train.config import TrainSettings
from longdraft.train.long_draft import main
from longdraft.train.methods.eagle3 import Eagle3Method
from longdraft.train.samples import Packed
from longdraft.train.target import FrozenTarget

SMOKE = "recipes/smoke/eagle3.yaml"
SGLANG = Path(__file__).parents[2] / "sglang_eagle3.py"


def settings(**ttt: Any) -> TrainSettings:
    sections = {"target": {"path": "x"}, "data": {"train": "x"}, "draft": {"arch": "eagle3"}, "objective": {"chunk": 7}}
    return validate(TrainSettings, sections | {"ttt": ttt})


def batch(lengths: list[int], share: float = 0.6) -> Packed:
    g = torch.Generator().manual_seed(sum(lengths))
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    ids = torch.randint(0, 256, (cu[-1],), generator=g)
    mask = torch.rand(cu[-1], generator=g) < share
    mask[cu[:-1]] = False
    label = torch.where(mask.roll(-1), ids.roll(-1), IGNORED)
    label[[end - 1 for end in cu[1:]]] = IGNORED
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Packed(ids, positions, label, cu, [str(n) for n in lengths])


def pair(**changes: Any) -> tuple[FrozenTarget, Eagle3Draft]:
    target = tiny_target("llama", num_hidden_layers=4)
    target.model.double()
    draft = tiny_eagle3(target, draft_vocab_size=90, **changes).double()
    return target, draft.bind(target.embedding_VE, target.head_VE)


def expected(
    target: FrozenTarget,
    draft: Eagle3Draft,
    packed: Packed,
    steps: int,
    decay: float,
    keep: bool = False,
    late: int = 1,
) -> tuple[torch.Tensor, list[int], list[int], int]:
    """Loss, hits and rows by depth, and dropped rows, by explicit loops; ``late`` is 0 for SpecForge's unshifted mask."""
    loss, hits, rows, dropped = torch.zeros((), dtype=torch.float64), [0] * steps, [0] * steps, 0
    ids_N = draft.target_ids
    for a, b in zip(packed.cu, packed.cu[1:], strict=False):
        ids = packed.id_T[a:b]
        out = target.model(ids[None], output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer + 1][0] for layer in draft.config.aux_layers], -1)
        mask = [False] + [bool(label != IGNORED) for label in packed.label_T[a : b - 1]]
        normed = reference_ttt(draft, aux, ids, packed.position_T[a:b], steps)
        for t in range(b - a):
            if late and not (t + 1 < b - a and mask[t + 1]):
                continue  # no chain begins outside an answer
            for k in range(steps):
                teacher = t + 1 + k
                if teacher >= b - a or not mask[t + late + k]:
                    continue
                logits = out.logits[0, teacher].detach()
                choice, q = int(logits.argmax()), draft.lm_head(normed[k, t])
                rows[k] += 1
                hits[k] += int(ids_N[q.argmax()]) == choice
                if not keep and not draft.t2d[choice]:
                    dropped += 1
                    continue
                p = torch.softmax(logits[ids_N], -1)
                loss = loss - decay**k * (p * torch.log_softmax(q, -1)).sum()
    return loss, hits, rows, dropped


@pytest.mark.parametrize("lengths", [[9], [6, 1, 13]])
@pytest.mark.parametrize("out_of_vocab", ["drop", "keep"])
def test_the_loss_is_the_sum_that_the_paper_writes(lengths: list[int], out_of_vocab: str) -> None:
    target, draft = pair()
    packed = batch(lengths)
    method = Eagle3Method(settings(steps=3, decay=0.8, out_of_vocab=out_of_vocab), target, draft)
    got = method(packed, 1)
    want, hits, rows, dropped = expected(target, draft, packed, 3, 0.8, keep=out_of_vocab == "keep")
    torch.testing.assert_close(got.loss, want)
    assert got.hits_K.tolist() == hits and got.rows_K.tolist() == rows
    assert (dropped > 0) == (out_of_vocab == "drop")
    assert method.denominator(packed) == packed.supervised
    weights = dict(draft.named_parameters())
    for name, a, b in zip(
        weights,
        torch.autograd.grad(got.loss, list(weights.values())),
        torch.autograd.grad(want, list(weights.values())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_specforge_rows_are_all_rows_with_an_unshifted_mask() -> None:
    target, draft = pair()
    packed = batch([11, 5])
    method = Eagle3Method(settings(steps=2, compat="specforge-0.2.0"), target, draft)
    got = method(packed, 1)
    want, hits, rows, _ = expected(target, draft, packed, 2, 0.8, late=0)
    torch.testing.assert_close(got.loss, want)
    assert got.hits_K.tolist() == hits and got.rows_K.tolist() == rows
    assert method.denominator(packed) == 16


def test_a_micro_batch_without_supervision_has_a_zero_gradient_everywhere() -> None:
    target, draft = pair()
    packed = batch([8], share=0.0)
    out = Eagle3Method(settings(steps=2), target, draft)(packed, 1)
    out.loss.backward()
    assert float(out.loss.detach()) == 0 and out.rows_K.tolist() == [0, 0]
    assert all(p.grad is not None and not bool(p.grad.any()) for p in draft.parameters())


def run(folder: Path, name: str, *overrides: str) -> Path:
    argv = ["--config", SMOKE, f"run.output_dir={folder}", f"run.name={name}", "schedule.max_steps=4", *overrides]
    assert main([*argv, "data.eval=null", "schedule.save_every=2"]) == 0
    return folder / name / "checkpoints" / "latest" / "draft"


def test_a_run_learns_resumes_and_leaves_a_draft_that_loads(tmp_path: Path) -> None:
    folder = run(tmp_path, "r")
    spec = tiny_target("llama", num_hidden_layers=4).spec
    draft = load_draft(folder, spec)
    assert isinstance(draft, Eagle3Draft) and int(draft.t2d.sum()) == 96
    facts = read_config(folder)["longdraft"]["training"]
    assert facts["steps"] == 4 and facts["max_lag"] == 3
    again = run(tmp_path, "half", "schedule.max_steps=2"), run(tmp_path, "half")
    whole, resumed = (load_draft(path, spec).state_dict() for path in (folder, again[1]))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def first_loss(folder: Path, name: str) -> float:
    row = json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[0])
    return float(row["loss"])


def test_a_fitted_start_lowers_the_first_loss_and_a_resumed_run_keeps_its_weights(tmp_path: Path) -> None:
    """Under Muon, whose state and AdamW's of the head both resume."""
    each = ("schedule.log_every=1", "optim.name=muon")
    run(tmp_path, "without", "schedule.max_steps=1", *each)
    folder = run(tmp_path, "whole", "draft.fit_tokens=4000", *each)
    assert first_loss(tmp_path, "whole") < 0.9 * first_loss(tmp_path, "without")
    run(tmp_path, "parts", "draft.fit_tokens=4000", *each, "schedule.max_steps=2")
    parts = run(tmp_path, "parts", "draft.fit_tokens=4000", *each)
    want, got = (load_file(path.parent / "state.safetensors") for path in (folder, parts))
    assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)
    moments = {key.rsplit(".", 1)[-1] for key in want if key.startswith("optimizer.lm_head.weight.")}
    assert moments == {"exp_avg", "exp_avg_sq", "step"}
    assert "optimizer.fc.weight.momentum_buffer" in want


def test_a_warm_start_keeps_the_vocabulary_and_may_stretch_the_rotation(tmp_path: Path) -> None:
    folder = run(tmp_path, "short")
    other = "other words altogether, xyzzy "
    (tmp_path / "other.jsonl").write_text(yaml.safe_dump({"text": other * 30}, default_flow_style=True, width=10**6))
    rope = "eagle3.rope={rope_type: yarn, factor: 4, original_max_position_embeddings: 4096}"
    long = run(tmp_path, "long", f"draft.init_from={folder}", rope, "optim.lr=1e-12")
    spec = tiny_target("llama", num_hidden_layers=4).spec
    before, after = load_draft(folder, spec), load_draft(long, spec)
    assert isinstance(before, Eagle3Draft) and isinstance(after, Eagle3Draft)
    assert torch.equal(before.d2t, after.d2t)
    torch.testing.assert_close(before.fc.weight, after.fc.weight, atol=1e-6, rtol=0)
    assert after.config.rope["factor"] == 4 and after.config.max_position == 16384


def test_a_warm_start_refuses_what_would_change_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path, "short")
    argv = ["--config", SMOKE, f"run.output_dir={tmp_path}", "run.name=x", f"draft.init_from={folder}"]
    assert main([*argv, "eagle3.draft_vocab_size=64"]) == 2
    assert "eagle3.draft_vocab_size=64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"draft": {"arch": "eagle3", "window": 64}}, "draft.window"),
        ({"draft": {"arch": "eagle3"}, "lag": {"max": 2}}, "lag"),
        ({"draft": {"arch": "eagle3"}, "objective": {"name": "kl"}}, "objective.name"),
        ({"draft": {"arch": "eagle3", "fit_tokens": 100}}, "draft.init=target"),
        ({"draft": {"arch": "eagle3"}, "views": {"share": 0.5}}, "views.share"),
        ({"ttt": {"steps": 2}}, "draft.arch=eagle3"),
        ({"eagle3": {"window": 64}}, "draft.arch=eagle3"),
    ],
)
def test_settings_of_the_other_draft_are_refused(sections: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        validate(TrainSettings, {"target": {"path": "x"}, "data": {"train": "x"}} | sections)


YARN = "eagle3.rope={rope_type: yarn, factor: 4, original_max_position_embeddings: 128}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [YARN],
            r"data.max_length=512 and 4 draft tokens pass the 512 .* lower data.max_length to 508, or .*factor to 5",
        ),
        (
            [YARN, "data.max_length=256", "positions.offset_share=1", "positions.max_position=512"],
            "positions.max_position=512 and 4 draft tokens",
        ),
        (["eagle3.max_position=500"], r"data.max_length=512 pass the 500 .*set eagle3.max_position=512"),
    ],
)
@pytest.mark.parametrize("plan", [["--plan"], []])
def test_positions_beyond_the_rotation_are_refused_before_anything_runs(
    overrides: list[str], message: str, plan: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", SMOKE, f"run.output_dir={tmp_path}", *overrides, *plan]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_rotation_that_just_covers_the_run_is_trained(tmp_path: Path) -> None:
    for name, given in (("fits", (YARN, "data.max_length=508")), ("own", ("eagle3.max_position=512",))):
        folder = run(tmp_path, name, *given, "schedule.max_steps=1")
        assert read_config(folder)["longdraft"]["training"]["steps"] == 1


def test_a_short_draft_adapted_by_yarn_is_served_with_the_stretched_rotation(tmp_path: Path) -> None:
    """An imported draft brings its old limit; the stretched rotation replaces it, and SGLang's loader reads the new one."""
    short = run(tmp_path, "short", "data.max_length=128", "eagle3.max_position=128", "schedule.max_steps=2")
    yarn = "eagle3.rope={rope_type: yarn, factor: 8, original_max_position_embeddings: 128}"
    folder = run(tmp_path, "yarn", f"draft.init_from={short}", yarn, "schedule.max_steps=2")
    written = read_config(folder)
    for rotation in (written["rope_scaling"], written["rope_parameters"]):
        assert (rotation["rope_type"], rotation["factor"], rotation["original_max_position_embeddings"]) == (
            "yarn",
            8,
            128,
        )
    assert written["max_position_embeddings"] == 1024
    target = tiny_target("llama", num_hidden_layers=4)
    rows, far = 6, 700  # beyond the short draft's positions
    torch.manual_seed(0)
    given = {
        "embedding": target.embedding_VE.clone(),
        "aux": torch.randn(rows, 3 * target.spec.hidden_size),
        "ids": torch.randint(target.spec.vocab_size, (rows,)),
        "positions": torch.arange(far, far + rows),
    }
    save_file(given, folder / "inputs.safetensors")
    done = subprocess.run([sys.executable, SGLANG, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    draft = load_draft(folder, target.spec)
    assert isinstance(draft, Eagle3Draft)
    draft.bind(target.embedding_VE, target.head_VE)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    with torch.no_grad():
        normed, _ = draft(
            given["ids"],
            draft.fuse(given["aux"]),
            given["positions"],
            lambda q, k, v: dense_attention(q, k, v, draft.config.head_dim**-0.5, mask)[0],
        )
        logits = draft.draft_logits(normed)
    theirs = load_file(folder / "outputs.safetensors")
    torch.testing.assert_close(logits, theirs["logits"], rtol=2e-4, atol=2e-4)
    assert torch.equal(draft.target_ids, theirs["ids"])
