"""A language model as the draft on a card: chains in CUDA graphs, without a wait for the device; and SGLang's own model in a real server."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llama_on_pages import TABLE
from paged_lm import PagedLM, prefill_of
from serve_fakes import SAMPLING, row_params
from served_pair import NEW, differences, gaps, kept, prompts, server, target_folder, up

from longdraft.bench.server import Server
from longdraft.serve.drafters.running import Running
from longdraft.serve.drafters.standalone import StandaloneDrafter
from longdraft.serve.graph_runner import CudaGraphRunner
from longdraft.train.tiny_random import tiny_random_model

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(1500)]
STEPS, COUNT = 4, 4
MODEL = tiny_random_model("llama")
TEXTS = [torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(b)).tolist() for b in range(COUNT)]
ROWS = {str(b): b + 1 for b in range(COUNT)}


def drafter() -> StandaloneDrafter:
    """Over a poisoned cache in float32, by our Triton kernels; texts of several lengths are prefilled."""
    lm: Any = PagedLM(copy.deepcopy(MODEL), "cuda", "triton")
    made = StandaloneDrafter(lm, MODEL.config.vocab_size, COUNT, STEPS, 48, 4)
    made.take_pools(None, SimpleNamespace(req_to_token=TABLE.cuda()), None)
    made.bind_pool(None, {})
    made.prefilled(prefill_of(ROWS, [(str(b), ids, 0, 9 + 20 * b) for b, ids in enumerate(TEXTS)]))
    for b, ids in enumerate(TEXTS):
        made.latest.write(
            torch.tensor([b + 1], device="cuda"),
            torch.tensor([8 + 20 * b], device="cuda"),
            torch.tensor([[ids[8 + 20 * b]]], device="cuda"),
        )
    return made


@pytest.mark.parametrize("sampling", SAMPLING)
def test_graphs_draft_what_the_eager_loop_drafts_and_nothing_waits(sampling: dict[str, Any]) -> None:
    """Batches below, at and above the captured sizes; everything kept, something, nothing."""
    eager, graph = drafter(), drafter()
    graph.use_graphs([1, 2])
    assert isinstance(graph.runner, CudaGraphRunner)
    length_B = torch.tensor([9 + 20 * b for b in range(COUNT)], device="cuda")
    newest_B = torch.tensor([ids[9 + 20 * b] for b, ids in enumerate(TEXTS)], device="cuda")
    captured: set[int] = set()
    for number, (count, kept_drafts) in enumerate(((2, 4), (1, 4), (2, 0), (4, 2), (3, 4), (2, 1), (1, 0))):
        params = row_params("abcd"[:count], sampling, torch.device("cuda"))
        row_B = torch.arange(1, count + 1, device="cuda")
        now = Running(tuple("0123"[:count]), row_B, graph.table_RW, length_B[:count], newest_B[:count])
        want = eager.propose_running(now, params)
        if count in captured:  # a capture, and a batch larger than all of them, may wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            got = graph.propose_running(now, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert got.tolist() == want.tolist(), f"round {number}"
        captured |= {count} if count <= 2 else set()
        length_B[:count] += kept_drafts + 1
        newest_B[:count] = 7 * number


@pytest.fixture(scope="module", params=["fa3", "flashinfer", "triton"])
def servers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A plain one, and one whose target drafts for itself, in CUDA graphs and without."""
    if request.param == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 needs a Hopper card")
    root = tmp_path_factory.mktemp(f"standalone-{request.param}")
    target, own = target_folder(root / "target"), ["--attention-backend", request.param]
    draft = [*own, "--speculative-draft-model-path", str(target)]
    made = [
        server("plain", target, root / "plain.log", own, False),
        server("graphs", target, root / "graphs.log", draft, True),
    ]
    made.append(server("eager", target, root / "eager.log", [*draft, "--disable-cuda-graph"], True))
    with up(made) as started:
        yield started


@pytest.mark.parametrize("which", [1, 2])
def test_a_target_that_drafts_for_itself_is_nearly_always_right(servers: list[Server], which: int) -> None:
    """In 16 bit the steps of a chain round differently from a verification, so near ties may part, and nothing else."""
    plain, drafted, asked = servers[0], servers[which], prompts()
    parted = differences(plain, drafted, asked)
    said = f"{drafted.name}, see {drafted.log}:\n" + "\n".join(parted)
    assert all(gap <= 0.25 for gap in gaps(parted)) and len(parted) <= len(asked) // 2, said
    share = kept(drafted, asked) / (len(asked) * NEW * STEPS / (STEPS + 1))
    assert share > 0.8, f"{drafted.name} keeps {share:.2f} of what it could"
    log = drafted.log.read_text(errors="replace")
    assert "failed" not in log and "leak" not in log and "could not follow" not in log, f"see {drafted.log}"
