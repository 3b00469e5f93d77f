"""Served on a card: pages of 1 and 16, caches in 16 bit and in float8, on each of SGLang's attention backends.

Every server with a draft gives what a plain one on the same backend over the same cache format gives. Several rows and one round
differently, so outputs may part where plain decoding all but ties, and nowhere else; most of them must not part at all. A wrong
slot, page or scale parts every one of them early and far from any tie.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_pair import differences, gaps, kept, prompts, server, target_folder, up
from tiny_draft import train_tiny_draft, train_tiny_eagle3

from longdraft.bench.server import Server

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(1500),
]
BACKENDS = ["fa3", "flashinfer", "triton"]
CACHES = {
    "auto": 0.25,
    "fp8_e4m3": 0.6,
}  # and how far apart two candidates' log-probabilities may lie that one rounding swaps
PAGES = [1, 16]
DRAFTS = ["longspec", "eagle3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target and a draft of each kind that has half learned its text."""
    root = tmp_path_factory.mktemp("caches")
    target = target_folder(root / "target")
    longspec = train_tiny_draft(target, root / "longspec", steps=60)
    return {"target": target, "longspec": longspec, "eagle3": train_tiny_eagle3(target, root / "eagle3")}


Group = tuple[str, Server, dict[tuple[str, int], Server]]


@pytest.fixture(scope="module", params=[(b, c) for b in BACKENDS for c in CACHES], ids="-".join)
def group(request: Any, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One backend and cache format: the plain server, and one for each draft and page size."""
    backend, cache = request.param
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 needs a Hopper card")
    logs = tmp_path_factory.mktemp(f"{backend}-{cache}")
    own = ["--attention-backend", backend, "--kv-cache-dtype", cache]
    made = [server(f"plain {backend} {cache}", folders["target"], logs / "plain.log", own, False)]
    kinds = [(draft, page) for draft in DRAFTS for page in PAGES]
    for draft, page in kinds:
        more = [*own, "--page-size", str(page), "--speculative-draft-model-path", str(folders[draft])]
        name = f"{draft} {backend} {cache} page {page}"
        made.append(server(name, folders["target"], logs / f"{draft}-{page}.log", more, True))
    with up(made) as (plain, *drafted):
        yield cache, plain, dict(zip(kinds, drafted, strict=True))


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_tokens_are_those_of_plain_decoding(group: Group, draft: str, page: int) -> None:
    cache, plain, servers = group
    drafted, asked = servers[draft, page], prompts()
    for when in ("at first", "from the prefix cache"):
        parted = differences(plain, drafted, asked)
        said = f"{drafted.name}, {when}, see {drafted.log}:\n" + "\n".join(parted)
        print(said)
        assert all(gap <= CACHES[cache] for gap in gaps(parted)), said
        assert len(parted) <= len(asked) // 2, said
    log = drafted.log.read_text(errors="replace")
    assert "failed" not in log and "leak" not in log, f"see {drafted.log}"
    assert kept(drafted, asked[:6]) > 0, f"{drafted.name} keeps no draft"


def test_page_sizes_give_equal_tokens(group: Group) -> None:
    """The same kernels over the same numbers in other slots: nothing may differ but by a near tie."""
    cache, _, servers = group
    parted = differences(servers["longspec", 1], servers["longspec", 16], prompts())
    said = f"{servers['longspec', 16].name} beside page 1:\n" + "\n".join(parted)
    assert all(gap <= CACHES[cache] for gap in gaps(parted)) and len(parted) <= 2, said
