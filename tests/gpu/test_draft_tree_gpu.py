"""A round's draft tree in one CUDA graph, of both kinds of drafts: eager, captured and on the CPU they are the same trees."""

import pytest
import torch
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.draft_models.draft_tree import TreeDraft, beam_tree, ranked_tree
from longdraft.draft_models.rope import Rotary
from longdraft.draft_models.tree_steps import Eagle3TreeStep, LongSpecTreeStep, rows_plan
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.gumbel import gumbel_noise
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.kernels.stable_topk import stable_topk
from longdraft.kernels.tree import Tree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TARGET = tiny_target("llama", num_hidden_layers=5)
BATCH, CONTEXT, RUNS, SCALE = 3, 40, 13, 16**-0.5
G = torch.Generator().manual_seed(0)
TEXT_BL = torch.randint(0, 256, (BATCH, CONTEXT + 1), generator=G)
K_SKD, V_SKD = torch.randn(2, BATCH * CONTEXT, 2, 16, generator=G)
HIDDEN_BE = torch.randn(BATCH, TARGET.spec.hidden_size, generator=G)
SEEDS = torch.tensor([3, -5, 1 << 40])


def grow(device: str, kind: str, root_B: torch.Tensor, position_B: torch.Tensor) -> Tree:
    """A tree of a fresh draft on a device; only tensors of the device are read behind the first call."""
    pages_BW = torch.arange(BATCH * CONTEXT, dtype=torch.int32, device=device).view(BATCH, CONTEXT)
    k_SKD, v_SKD, seed_B = K_SKD.to(device), V_SKD.to(device), SEEDS.to(device)

    def prefix(depth: int, q_BMHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plan = rows_plan(*q_BMHD.shape[:2], root_B.device, pages_BW, torch.full_like(pages_BW[:, 0], CONTEXT))
        backend = "triton" if root_B.is_cuda else "torch"
        return prefix_attention(q_BMHD.flatten(0, 1), k_SKD, v_SKD, plan, SCALE, backend)

    def score(logits_BMN: torch.Tensor, depth: int) -> torch.Tensor:
        noise_BN = gumbel_noise(seed_B, position_B + depth, torch.arange(logits_BMN.shape[-1], device=device)).float()
        return (logits_BMN.log_softmax(-1) + noise_BN[:, None]).log_softmax(-1)

    if kind == "beam":
        draft = tiny_draft(TARGET, window=8).to(device)
        draft.rotary = Rotary(draft.config.rotary_spec).to(device)
        draft.bind(TARGET.embedding_VE.to(device), TARGET.head_VE.to(device))
        state = WindowState(draft, BATCH, 4)
        for row in range(BATCH):
            state.rebuild(row, TEXT_BL[row, :-1].tolist(), CONTEXT)
        rows = torch.arange(BATCH, device=device)
        cross = lambda q: prefix(0, q)[0].view_as(q)  # noqa: E731
        step = LongSpecTreeStep(state, rows, position_B, cross, RUNS, "triton" if root_B.is_cuda else "torch")
        grown = lambda: beam_tree(TreeDraft(step, score), root_B, (4, 4, 4, 6))  # noqa: E731
    else:
        eagle3 = tiny_eagle3(TARGET).to(device)
        eagle3.rotary = Rotary(eagle3.config.rotary_spec).to(device)
        eagle3.bind(TARGET.embedding_VE.to(device))
        hidden_BE = HIDDEN_BE.to(device)

        def grown() -> Tree:
            eagle3_step = Eagle3TreeStep(eagle3, hidden_BE, position_B, prefix, RUNS)
            return ranked_tree(TreeDraft(eagle3_step, score), root_B, 4, 4, 24)

    if device == "cpu":
        return grown()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = grown()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grown()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.token_BT, eager.token_BT)
    assert torch.equal(captured.parent_BT, eager.parent_BT)
    return captured


@pytest.mark.parametrize("kind", ["beam", "ranked"])
def test_a_captured_tree_is_the_eager_one_and_the_cpus(kind: str) -> None:
    """Float32; scores of random drafts are far enough apart for both devices' rounding."""
    root_B, position_B = TEXT_BL[:, -1], torch.full((BATCH,), CONTEXT)
    want = grow("cpu", kind, root_B, position_B)
    got = grow("cuda", kind, root_B.cuda(), position_B.cuda())
    same = (got.token_BT.cpu() == want.token_BT) & (got.parent_BT.cpu() == want.parent_BT)
    assert float(same.float().mean()) > 0.95
    assert torch.equal(got.token_BT[:, :5].cpu(), want.token_BT[:, :5])


@pytest.mark.parametrize(("rows", "count"), [(1, 128256), (256, 32768), (16, 40)])
def test_stable_topk_breaks_ties_as_on_the_cpu(rows: int, count: int) -> None:
    scores = torch.randn(rows, count, generator=G).bfloat16().float()
    score, index = stable_topk(scores.cuda(), 16)
    order = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(index.cpu(), order.indices[:, :16])
    assert torch.equal(score.cpu(), order.values[:, :16])
