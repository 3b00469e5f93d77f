"""A served LongSpec draft that reads several layers: chains and trees equal those over the layers side by side."""

from array import array
from types import SimpleNamespace

import torch
from serve_fakes import row_params
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.dense_attention import dense_attention
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import parse_tree

LAYERS, STEPS, LENGTH, AT = [1, 3], 3, 40, 30
TARGET = tiny_target("llama", num_hidden_layers=4)
DRAFT = tiny_draft(TARGET, window=6, cross_layers=LAYERS, cross_group=3)
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


def request() -> DraftRequest:
    ids = IDS[: AT + 1].tolist()
    req = SimpleNamespace(origin_input_ids=array("q", ids[:1]), output_ids=array("q", ids[1:]))
    return DraftRequest("a", Tokens(req), SLOTS[:AT], STEPS)


def drafter() -> LongSpecDrafter:
    made = LongSpecDrafter(DRAFT, 2, STEPS, 64, 4, "torch")
    made.bind_pool(Pool(), {})
    return made


def reference() -> list[int]:
    state = WindowState(DRAFT, 1, STEPS)
    state.rebuild(0, IDS[:AT].tolist(), AT)
    seen = TARGET.capture(IDS, torch.arange(LENGTH), [0, LENGTH], kv_layers=LAYERS)
    at = torch.tensor([AT])
    keys, values = seen.k_TKD[:AT], seen.v_TKD[:AT]
    out = propose_chain(
        state, torch.tensor([0]), IDS[at], at, STEPS, lambda q: dense_attention(q, keys, values, 16**-0.5)[0]
    )
    return out[0].tolist()


@torch.no_grad()
def test_a_chain_is_the_reference_chain() -> None:
    assert drafter().propose([request()], lambda logits, at: logits.argmax(-1)) == [reference()]


@torch.no_grad()
def test_a_tree_of_one_branch_is_the_chain() -> None:
    shape = parse_tree("1,1,1")
    assert shape is not None
    tree = drafter().propose_tree([request()], row_params("a", {"temperature": 0}), shape)
    assert tree.token_BT[0].tolist() == [IDS[AT].item(), *reference()]
