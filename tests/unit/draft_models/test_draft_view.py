"""Views in the reference decoder: which keys they hold, and that they cost accept length at most."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.draft_view import ViewReader, attention_mass, visible_keys
from longdraft.draft_models.reference_decode import greedy_decode, speculative_decode
from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.view_attention import View

PROMPT = [(37 * i + i * i) % 250 for i in range(90)]
RECENT, MASS = View(24, 4, 20, 4), View(24, 4, 8, 4)


def keys(count: int, kv_heads: int = 2) -> torch.Tensor:
    return torch.randn(count, kv_heads, 8, generator=torch.Generator().manual_seed(count))


def query(heads: int = 4) -> torch.Tensor:
    return 2 * torch.randn(heads, 8, generator=torch.Generator().manual_seed(1))


def test_a_view_without_blocks_is_what_the_server_reads_today() -> None:
    """Sinks and the most recent keys, whatever the query."""
    want = [*range(4), *range(70, 90)]
    for asked in (None, query()):
        assert visible_keys(RECENT, keys(90), asked, 0.3).tolist() == want
    assert visible_keys(MASS, keys(90), None, 0.3).tolist() == want, "a first round has no query"


@given(st.integers(0, 6), st.integers(1, 9), st.integers(1, 5), st.integers(0, 30), st.integers(1, 60))
def test_a_view_keeps_its_budget_its_sinks_and_its_window(
    sinks: int, window: int, block: int, spare: int, longer: int
) -> None:
    view = View(sinks + window + spare, sinks, window, block)
    count = view.budget + longer
    chosen = visible_keys(view, keys(count), query(), 0.3).tolist()
    assert len(set(chosen)) == len(chosen) <= view.budget
    assert {*range(sinks), *range(count - window, count)} <= set(chosen) <= set(range(count))


def test_blocks_are_those_with_the_most_attention() -> None:
    k, q = keys(90), query()
    mass = attention_mass(q, k, 0.3)
    assert float(mass.sum()) == pytest.approx(1)
    each = [torch.softmax(k[:, h // 2] @ q[h] * 0.3, 0) for h in range(4)]
    torch.testing.assert_close(mass, torch.stack(each).mean(0))
    chosen = set(visible_keys(MASS, k, q, 0.3).tolist()) - {*range(4), *range(82, 90)}
    inner = mass.clone()
    inner[:4] = inner[82:] = 0
    best = torch.nn.functional.pad(inner, (0, 2)).view(-1, 4).sum(1).topk(3).indices.tolist()
    assert chosen == {s for b in best for s in range(4 * b, 4 * b + 4) if 4 <= s < 82}


def test_a_reader_attends_to_exactly_the_view_and_remembers_the_last_committed_query() -> None:
    k, v, reader = keys(90), keys(91)[:90], ViewReader(MASS, 0.3)
    queries = [query() * (1 + i) for i in range(3)]
    attend = reader.begin(k, v)
    for q in queries:
        got = attend(q[None])
        at = visible_keys(MASS, k, None, 0.3)
        torch.testing.assert_close(got, dense_attention(q[None], k[at], v[at], 0.3)[0])
    reader.committed(1)
    assert reader.last_HD is not None and torch.equal(reader.last_HD, queries[1])
    reader.committed(3)
    assert torch.equal(reader.last_HD, queries[2])
    at = visible_keys(MASS, k, queries[2], 0.3)
    torch.testing.assert_close(
        reader.begin(k, v)(queries[0][None]), dense_attention(queries[0][None], k[at], v[at], 0.3)[0]
    )


@pytest.mark.parametrize("view", [RECENT, MASS], ids=["recent", "mass"])
def test_decoding_under_a_view_gives_the_targets_own_tokens(view: View) -> None:
    """V1: the draft reads a part, the target everything."""
    target = tiny_target("qwen3")
    done = speculative_decode(target.model, tiny_draft(target, window=8), PROMPT, 12, 3, view)
    assert done.tokens == greedy_decode(target.model, PROMPT, 12)


def test_a_budget_beyond_the_cache_drafts_as_without_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    from longdraft.draft_models import drafting

    honest, drafted = drafting.propose_chain, []

    def watched(*args: object, **named: object) -> torch.Tensor:
        drafted.append(honest(*args, **named))  # type: ignore[arg-type]
        return drafted[-1]

    monkeypatch.setattr(drafting, "propose_chain", watched)
    target = tiny_target("llama")
    runs = []
    for view in (None, View(4096, 32, 128, 16), RECENT):
        drafted.clear()
        speculative_decode(target.model, tiny_draft(target, window=8), PROMPT, 8, 3, view)
        runs.append([x.tolist() for x in drafted])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
