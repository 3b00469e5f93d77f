"""The plan of a sparse set, as the benchmark makes it, on the CPU."""

from pathlib import Path

import pytest
import torch

from longdraft.bench import sparse_attention
from longdraft.bench.head_mass import last_rows
from longdraft.bench.prefix_attention import SCALE, Shape, make_layers
from longdraft.bench.sparse_attention import choose, main, sparse_plan
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.serve.views.token_set import SparseBudget


@pytest.mark.parametrize("tokens", [64, 128])
def test_a_sparse_plan_reads_its_budget_and_attends_to_the_chosen_columns(tokens: int) -> None:
    layers = make_layers(Shape(2, 300, 5), torch.float32, 1, "cpu", least=1 << 20)
    budget = SparseBudget(tokens, lookahead=16)
    chosen = choose(layers, budget, last_rows(layers))
    plan = sparse_plan(layers, chosen, budget)
    assert plan.lens_B.tolist() == [tokens] * 2
    for b in range(2):
        columns = [*chosen.column_BV[b, : chosen.count_B[b]].tolist(), *range(int(chosen.start_B[b]), 300)]
        slots = layers.plan.pages_BW[b, columns]
        assert torch.equal(plan.pages_BW[b, :tokens], slots)
        assert set(range(4)) <= set(columns) and set(range(284, 300)) <= set(columns)
    k_SKD, v_SKD = layers.caches[0]
    out_THD, _ = prefix_attention(layers.q_THD.float(), k_SKD, v_SKD, plan, SCALE)
    key = k_SKD[plan.pages_BW[0, :tokens].long()][:, 0]
    score = (layers.q_THD[4, 0].float() @ key.T) * SCALE
    wanted = torch.softmax(score, -1) @ v_SKD[plan.pages_BW[0, :tokens].long()][:, 0]
    torch.testing.assert_close(out_THD[4, 0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "r.json")]) == 2
    assert "GPU" in capsys.readouterr().err and sparse_attention.LAYERS == 32
