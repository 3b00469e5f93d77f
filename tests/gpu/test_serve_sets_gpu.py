"""Sets of tokens on a card: chosen without one wait for the device, eager and from a graph, as the twins on the host choose them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_serve_device_step_gpu import no_waits

from longdraft.serve.drafters.base import Lookahead
from longdraft.serve.drafters.running import Running
from longdraft.serve.views.query_tap import QueryTap
from longdraft.serve.views.set_chooser import Group, History, SetChooser
from longdraft.serve.views.token_set import SparseBudget
from longdraft.serve.views.view_state import ViewState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROWS, COLUMNS, HEADS, KEYS, SIZE, STEPS, MOST = 8, 9000, 8, 2, 64, 3, 4
LENGTHS = [8000, 300, 4097]
BUDGET = SparseBudget(512, 4, 16, 200)


class World:
    """A chooser with its history and one lookahead, the same numbers on every device."""

    def __init__(self, device: str, sizes: Sequence[int], measures: bool) -> None:
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(device)

        self.device, slots = device, ROWS * COLUMNS
        table_RW = torch.randperm(slots, generator=draw).view(ROWS, COLUMNS).int().to(device)
        keys, own = random(slots, KEYS, SIZE), random(slots, KEYS, SIZE)
        self.q_BSHD = random(MOST, STEPS, HEADS, SIZE)
        tap = QueryTap((0,), 1)
        tap.allocate(32, HEADS, SIZE, torch.float32, torch.device(device))
        self.views = ViewState(ROWS, COLUMNS, 512, 8, torch.device(device))

        def lookahead(running: Running) -> list[Lookahead]:
            q_NHD = self.q_BSHD[: len(running.row_B)].flatten(0, 1)
            return [Lookahead(q_NHD, own, SIZE**-0.5, (1, 6), first=1)]

        history = History(keys, (0, 3, 5), SIZE**-0.5)
        self.sets = SetChooser(history, tap, self.views, table_RW, lookahead, measures)
        self.sets.query_RHD[:] = random(ROWS, HEADS, SIZE)
        self.sets.use_graphs(sizes, [BUDGET])
        row_B, length_B = torch.tensor([5, 2, 7], device=device), torch.tensor(LENGTHS, device=device)
        self.running = Running(("a", "b", "c"), row_B, table_RW, length_B, row_B)
        self.views.prefilled(row_B, length_B)

    def choose(self, groups: list[Group], looks: bool, guarded: bool) -> torch.Tensor | None:
        with no_waits() if guarded else nullcontext():
            return self.sets.choose(self.running, groups, looks, 8100)

    def views_now(self) -> list[Any]:
        views, row_B = self.views, self.running.row_B
        counts = views.count_LR[0, row_B].tolist()
        columns = [views.column_LRV[0, r, :n].tolist() for r, n in zip(row_B.tolist(), counts, strict=True)]
        return [views.start_R[row_B].tolist(), columns]


@pytest.mark.parametrize("sizes", [[], [1, MOST]], ids=["eager", "graphs"])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_card_chooses_what_the_host_chooses_and_waits_for_nothing(sizes: list[int], looks: bool, mixed: bool) -> None:
    other = SparseBudget(128, 4, 16, 30)
    found = []
    for device in ("cpu", "cuda"):
        world = World(device, sizes if device == "cuda" else [], measures=True)
        where_B = torch.tensor([True, False, True], device=device)
        groups = [Group(BUDGET, where_B), Group(other, ~where_B)] if mixed else [Group(BUDGET, None)]
        first = world.choose(groups, looks, False)  # builds kernels and the graph
        seen = [world.views_now()]
        world.sets.query_RHD.copy_(world.sets.query_RHD.flip(0))  # what the graph reads is read anew
        world.q_BSHD.neg_()
        missed_B = world.choose(groups, looks, device == "cuda")
        assert first is not None and missed_B is not None
        found.append([*seen, world.views_now(), missed_B.cpu()])
    (cpu_first, cpu_then, cpu_missed), (gpu_first, gpu_then, gpu_missed) = found
    for cpu, gpu in ((cpu_first, gpu_first), (cpu_then, gpu_then)):
        assert cpu[0] == gpu[0] and [len(x) for x in cpu[1]] == [len(x) for x in gpu[1]]
        apart = [len(set(x) ^ set(y)) for x, y in zip(cpu[1], gpu[1], strict=True)]
        assert max(apart) <= 2, (
            f"{apart} columns differ: more than two scores so near to each other as to be rounded past"
        )
    assert cpu_first != cpu_then
    torch.testing.assert_close(gpu_missed, cpu_missed, rtol=1e-3, atol=1e-4)
