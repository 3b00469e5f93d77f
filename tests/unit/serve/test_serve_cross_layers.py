"""A served LongSpec draft that reads several layers, and their newest row: chains and trees equal those over the layers side by side."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from serve_fakes import row_params
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.dense_attention import dense_attention
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.drafters.cross_attention import Cache, newest_rows
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import parse_tree

LAYERS, STEPS, LENGTH, AT = [1, 3], 3, 40, 30
TARGET = tiny_target("llama", num_hidden_layers=4)
DRAFTS = {lags: tiny_draft(TARGET, window=6, cross_layers=LAYERS, cross_group=3, newest_lags=lags) for lags in (0, 2)}
IDS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(2))
SLOTS = torch.randperm(64)[:LENGTH].int()


class Pool:
    """As much of SGLang's cache pool as a drafter asks for; NaN where no token lies."""

    def __init__(self) -> None:
        self.buffers = {}
        for layer in range(4):
            seen = TARGET.capture(IDS, torch.arange(LENGTH), [0, LENGTH], kv_layers=[layer])
            self.buffers[layer] = [torch.full((64, 2, 16), float("nan")) for _ in range(2)]
            for buffer, rows in zip(self.buffers[layer], (seen.k_TKD, seen.v_TKD), strict=True):
                buffer[SLOTS.long()] = rows

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.buffers[layer][0]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.buffers[layer][1]


@pytest.fixture(autouse=True, params=["module", "fused"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds for the module and for the step that takes its place on a card, here over its twins."""
    if request.param == "fused":
        monkeypatch.setattr(FusedStep, "of", staticmethod(FusedStep))


def request(at: int = AT) -> DraftRequest:
    ids = IDS[: at + 1].tolist()
    req = SimpleNamespace(origin_input_ids=array("q", ids[:1]), output_ids=array("q", ids[1:]))
    return DraftRequest("a", Tokens(req), SLOTS[:at], STEPS)


def drafter(lags: int) -> LongSpecDrafter:
    made = LongSpecDrafter(DRAFTS[lags], 2, STEPS, 64, 4, "torch")
    made.bind_pool(Pool(), {})
    return made


def reference(lags: int, root: int = AT) -> list[int]:
    state = WindowState(DRAFTS[lags], 1, STEPS)
    state.rebuild(0, IDS[:root].tolist(), root)
    seen = TARGET.capture(IDS, torch.arange(LENGTH), [0, LENGTH], kv_layers=LAYERS)
    at = torch.tensor([root])
    keys, values = seen.k_TKD[:root], seen.v_TKD[:root]

    def cross_attend(q_BHD: torch.Tensor) -> torch.Tensor:
        return dense_attention(q_BHD, keys, values, 16**-0.5)[0]

    newest = DRAFTS[lags].read_newest(keys[-1:], values[-1:], at - 1)
    return propose_chain(state, torch.tensor([0]), IDS[at], at, STEPS, cross_attend, newest_BF=newest)[0].tolist()


@pytest.mark.parametrize("lags", [0, 2])
@pytest.mark.parametrize("root", [AT, 1])
@torch.no_grad()
def test_a_chain_is_the_reference_chain(lags: int, root: int) -> None:
    got = drafter(lags).propose([request(root)], lambda logits, at: logits.argmax(-1))
    assert got == [reference(lags, root)]


@pytest.mark.parametrize("lags", [0, 2])
@torch.no_grad()
def test_a_tree_of_one_branch_is_the_chain(lags: int) -> None:
    shape = parse_tree("1,1,1")
    assert shape is not None
    tree = drafter(lags).propose_tree([request()], row_params("a", {"temperature": 0}), shape)
    assert tree.token_BT[0].tolist() == [IDS[AT].item(), *reference(lags)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_newest_row_is_the_last_slot_unrotated_and_unscaled(dtype: torch.dtype) -> None:
    draft, scales = DRAFTS[2], (0.5, 2.0)
    layers = [Cache(torch.randn(9, 2, 16).to(dtype), torch.randn(9, 2, 16).to(dtype), scales) for _ in LAYERS]
    pages, lens = torch.tensor([[4, 7, 0], [1, 2, 8], [3, 3, 3]], dtype=torch.int32), torch.tensor([2, 3, 0]).int()
    got = newest_rows(draft, layers, pages, lens, torch.tensor([12, 40, 0]))
    keys = torch.cat([c.k_SKD[[7, 8]].float() * 0.5 for c in layers], 1)
    values = torch.cat([c.v_SKD[[7, 8]].float() * 2.0 for c in layers], 1)
    want = draft.read_newest(keys, values, torch.tensor([11, 39]))
    assert got is not None and want is not None
    torch.testing.assert_close(got[:2], want)
    assert not got[2].any(), "nothing is cached"
    assert newest_rows(DRAFTS[0], layers, pages, lens, torch.tensor([12, 40, 0])) is None
