"""Pools of pages: a request's reservation goes on in its own last page, takes whole pages behind it, and none twice (S3)."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from longdraft.serve import hooks, spec_inputs
from longdraft.serve.spec_inputs import DraftInput

PAGE, RESERVE, WIDTH = 16, 10, 100


class _Tree(SimpleNamespace):
    """A prefix cache that holds nothing."""

    page_size = PAGE

    def is_chunk_cache(self) -> bool:
        return True


def allocator(pages: int, monkeypatch: pytest.MonkeyPatch) -> PagedTokenToKVPoolAllocator:
    """SGLang's, on a CPU as our hook makes it."""
    made = PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, torch.float32, "cpu", None, need_sort=False)
    on_cpu = functools.partial(hooks.pages_on_cpu, None, made)
    monkeypatch.setattr(made, "alloc_extend", on_cpu)
    return made


def running(held: list[int], used: list[int], pages: PagedTokenToKVPoolAllocator) -> Any:
    """A batch whose requests hold slots for ``held`` tokens in pages of their own, ``used`` of them committed."""
    table = torch.full((len(held) + 1, WIDTH), -1, dtype=torch.int32)
    reqs = []
    for row, (end, committed) in enumerate(zip(held, used, strict=True), start=1):
        slots = pages.alloc(-(-end // PAGE) * PAGE)
        assert slots is not None
        table[row, :end] = slots[:end]
        req = SimpleNamespace(req_pool_idx=row, kv_allocated_len=end, kv_committed_len=committed, decode_batch_idx=0)
        reqs.append(req)
    rows = torch.arange(1, len(held) + 1)
    pool = SimpleNamespace(req_to_token=table)
    tree = _Tree(token_to_kv_pool_allocator=pages)
    return SimpleNamespace(reqs=reqs, req_to_token_pool=pool, tree_cache=tree, req_pool_indices=rows)


@pytest.fixture(autouse=True)
def _reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_inputs, "get_alloc_reserve_per_decode", lambda: RESERVE)


def test_every_place_of_a_row_has_its_slot_and_pages_belong_to_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends inside a page, at its end, a full row, and one that needs nothing new."""
    pages = allocator(40, monkeypatch)
    held, used = [5, 15, 16, 17, 32, 95, 40], [5, 15, 16, 17, 30, 95, 21]
    batch = running(held, used, pages)
    before = pages.available_size()
    DraftInput().prepare_for_decode(batch)
    owners: dict[int, int] = {}
    for row, (req, old, committed) in enumerate(zip(batch.reqs, held, used, strict=True), start=1):
        assert req.kv_allocated_len == max(old, min(committed + RESERVE, WIDTH))
        slots = batch.req_to_token_pool.req_to_token[row, : req.kv_allocated_len]
        assert (slots >= PAGE).all(), "page 0 is the padding's"
        assert (slots % PAGE == torch.arange(len(slots)) % PAGE).all(), "a place stands at its offset in a page"
        for page in (slots // PAGE).unique().tolist():
            assert owners.setdefault(page, row) == row
        assert (batch.req_to_token_pool.req_to_token[row, req.kv_allocated_len :] == -1).all()
    taken = sum(-(-r.kv_allocated_len // PAGE) - -(-old // PAGE) for r, old in zip(batch.reqs, held, strict=True))
    assert before - pages.available_size() == taken * PAGE
    for row, req in enumerate(batch.reqs, start=1):
        pages.free(batch.req_to_token_pool.req_to_token[row, : req.kv_allocated_len].long())
    assert pages.available_size() == 40 * PAGE


def test_a_pool_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = allocator(3, monkeypatch)
    batch = running([16, 16], [16, 16], pages)
    batch.tree_cache.available_and_evictable_str = batch.tree_cache.pretty_print = lambda: ""
    with pytest.raises(RuntimeError, match="out of memory"):
        DraftInput().prepare_for_decode(batch)


def test_a_card_keeps_its_kernel() -> None:
    card = SimpleNamespace(device="cuda")
    seen: list[Any] = []
    given = hooks.pages_on_cpu(lambda *args: seen.append(args), card, *[torch.zeros(1)] * 5, 7)
    assert given is None and len(seen[0]) == 8 and seen[0][0] is card and seen[0][6] == 7
