"""Rounds on a card: launched without one wait for the device, eager and in graphs, with the host behind or not, for the same tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_rounds import COLUMNS, ROWS, STRIDE, MadeUpTarget, Server, make_request, plainly
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.serve import stats
from longdraft.serve.device_step import DeviceStep
from longdraft.serve.drafters.cross_attention import Cache
from longdraft.serve.drafters.eagle3 import Eagle3Drafter
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.make_step import make_step
from longdraft.serve.observer import Observer
from longdraft.serve.settings import ServeSettings
from longdraft.serve.tree_shape import parse_tree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE, KERNEL, TOKENS = "cuda", "triton", 288
SLOTS = ROWS * COLUMNS + 1
KINDS: list[dict[str, Any]] = [
    {},
    {"custom_params": {"longdraft": {"mode": "off"}}},
    {"stop_token_ids": [3, 5]},
    {"temperature": 0.8, "sampling_seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "sampling_seed": 2},
]


@contextmanager
def no_waits() -> Iterator[None]:
    """What waits for the device raises; the step would log that as a failure and go on."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def longspec() -> Any:
    torch.manual_seed(0)
    target = tiny_target("llama")
    draft = tiny_draft(target, window=8).to(DEVICE)
    draft.bind(target.embedding_VE.to(DEVICE), target.head_VE.to(DEVICE))
    drafter = LongSpecDrafter(draft, ROWS, STRIDE - 1, 16, 4, KERNEL)
    drafter.bind_cache(Cache(*(torch.randn(SLOTS, 2, 16, device=DEVICE) for _ in range(2))))
    return drafter


def eagle3() -> Any:
    torch.manual_seed(0)
    target = tiny_target("llama", num_hidden_layers=5)
    draft = tiny_eagle3(target, draft_vocab_size=100).to(DEVICE)
    draft.bind(target.embedding_VE.to(DEVICE), target.head_VE.to(DEVICE))
    drafter = Eagle3Drafter(draft, ROWS, STRIDE - 1, 16, 4, KERNEL)
    drafter.allocate(SLOTS, DEVICE)
    return drafter


def requests() -> list[Any]:
    more = {"max_new_tokens": 24, "ignore_eos": True}
    return [
        make_request(
            f"r{i}",
            i + 1,
            [i + 1] * (3 + i),
            **{**more, **({"ignore_eos": False} if "stop_token_ids" in k else {}), **k},
        )
        for i, k in enumerate(KINDS)
    ]


def serve(build: Any, tree: str, sizes: list[int], behind: bool, guarded: bool) -> list[Any]:
    """Tokens and counters of one batch of every kind; once to build kernels and graphs, then watched."""
    drafter = build()
    features = 3 * drafter.draft.config.target.hidden_size if drafter.observed_layers else 0
    shape = parse_tree(tree)
    drafter.use_graphs(sizes, [] if shape is None else [shape])
    target = MadeUpTarget(vocab=TOKENS, device=DEVICE, features=features)
    stride = STRIDE if shape is None else shape.places
    step = make_step([] if shape is None else [shape], target, drafter, Observer(drafter), ServeSettings(), stride)
    assert isinstance(step, DeviceStep)
    for guard in [False, True] if guarded else [False]:
        for req in requests():
            drafter.forget(req.rid)
        reqs = requests()
        Server(step, behind, DEVICE, no_waits if guard else _nothing).run(reqs)
    return [(list(r.output_ids), stats.attach(r, "?").summary()) for r in reqs]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("sizes", [[], [1, 2, 4, 8]], ids=["eager", "graphs"])
@pytest.mark.parametrize("tree", ["chain", "2,3,2", "eagle2:3,2,7"])
@pytest.mark.parametrize("build", [longspec, eagle3])
def test_a_round_waits_for_nothing(build: Any, tree: str, sizes: list[int], behind: bool, caplog: Any) -> None:
    served = serve(build, tree, sizes, behind, True)
    waits = [str(r.exc_info[1]) if r.exc_info else r.message for r in caplog.records if "longdraft" in r.message]
    assert not waits, "a round waited for the device, or failed"
    for kind, req, (tokens, _) in zip(KINDS, requests(), served, strict=True):
        if "temperature" not in kind:
            assert tokens == plainly(req)


@pytest.mark.parametrize("tree", ["chain", "2,3,2", "eagle2:3,2,7"])
@pytest.mark.parametrize("build", [longspec, eagle3])
def test_eager_graphs_and_a_host_behind_give_the_same_tokens_and_counts(build: Any, tree: str) -> None:
    want = serve(build, tree, [], False, False)
    for sizes, behind in (([], True), ([1, 2, 4, 8], False), ([1, 2, 4, 8], True)):
        assert serve(build, tree, sizes, behind, False) == want, f"sizes={sizes}, overlap={behind}"
