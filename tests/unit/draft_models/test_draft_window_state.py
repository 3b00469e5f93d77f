"""The draft's ring of keys and values: carried, rebuilt, overwritten and shared by rows (D7, D8, D11)."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.packed_attention import packed_causal_attention

WINDOW, AHEAD = 6, 4
TARGET = tiny_target("llama")
DRAFT = tiny_draft(TARGET, window=WINDOW)


def look(state: WindowState, row: int, at: int, token: int = 9) -> torch.Tensor:
    """What a token at a position sees of its window, through queries that weigh every slot differently; read in both ways."""
    g = torch.Generator().manual_seed(at)
    q = torch.randn(1, 4, 16, generator=g)
    k, v = DRAFT.self_kv(torch.tensor([token]), torch.tensor([at]))
    row_B, at_B = torch.tensor([row]), torch.tensor([at])
    out = state.attend(row_B, at_B, q, k, v)
    _, (window,) = state.windows(row_B, at_B, 1)
    torch.testing.assert_close(state.attend(row_B, at_B, q, k, v, window), out, rtol=1e-5, atol=1e-6)
    return out


def rebuilt(ids: list[int], end: int, draft_window: int = WINDOW) -> WindowState:
    state = WindowState(tiny_draft(TARGET, window=draft_window), 1, AHEAD)
    state.rebuild(0, ids, end)
    return state


def draft_ahead(state: WindowState, row: int, at: int, tokens: list[int]) -> None:
    """Attend from drafted tokens one after the other, as proposing does; most will be rejected."""
    for step, token in enumerate(tokens):
        look(state, row, at + step, token)


token = st.integers(0, 255)
# A round: what was drafted, and how many drafts the target kept; then the bonus token.
trace = st.lists(st.tuples(st.lists(token, min_size=1, max_size=AHEAD), st.integers(0, AHEAD), token), max_size=8)


@settings(max_examples=40, deadline=None)
@given(prompt=st.lists(token, min_size=1, max_size=20), rounds=trace)
def test_carried_through_rounds_equals_rebuilt_from_the_last_ids(
    prompt: list[int], rounds: list[tuple[list[int], int, int]]
) -> None:
    """D7: rejected drafts leave nothing that a later token sees, however rounds alternate."""
    ids = list(prompt)  # the last one is the root, which the ring does not hold
    carried = WindowState(DRAFT, 1, AHEAD)
    carried.rebuild(0, ids[:-1], len(ids) - 1)
    zero = torch.zeros(1, dtype=torch.long)
    for drafted, kept, bonus in rounds:
        root_at = len(ids) - 1
        draft_ahead(carried, 0, root_at, [ids[-1], *drafted[:-1]])
        run = [*drafted[: min(kept, len(drafted))], bonus]
        accepted = [ids[-1], *run[:-1]]
        at = torch.arange(root_at, root_at + len(accepted))
        carried.store(zero.expand(len(accepted)), torch.tensor(accepted), at)
        ids += run
    end = len(ids) - 1
    fresh = rebuilt(ids[:-1], end)
    for step in range(AHEAD):  # also every later depth of the next proposal
        torch.testing.assert_close(look(carried, 0, end + step, 7 + step), look(fresh, 0, end + step, 7 + step))


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 40), window=st.integers(1, 9), data=st.data()
)  # fmt: skip
def test_the_ring_equals_a_full_cache_under_a_window_mask(length: int, window: int, data: st.DataObject) -> None:
    """D11, at the first token after any prompt, window 1 included."""
    ids = data.draw(st.lists(token, min_size=length, max_size=length))
    draft = tiny_draft(TARGET, window=window)
    state = WindowState(draft, 1, AHEAD)
    state.rebuild(0, ids[:-1], length - 1)
    k, v = draft.self_kv(torch.tensor(ids), torch.arange(length))
    q = torch.randn(length, 4, 16, generator=torch.Generator().manual_seed(length))
    want = packed_causal_attention(q, k, v, [0, length], window)[-1]
    got = state.attend(torch.zeros(1, dtype=torch.long), torch.tensor([length - 1]), q[-1:], k[-1:], v[-1:])
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)


def test_the_token_that_left_the_window_changes_nothing_and_the_oldest_in_it_does() -> None:
    """D8, and no less than the window."""
    ids = list(range(40, 60))
    before = look(rebuilt(ids, 20), 0, 20)
    for index, same in ((20 - WINDOW, True), (20 - WINDOW + 1, False)):
        changed = [*ids]
        changed[index] += 1
        assert torch.equal(before, look(rebuilt(changed, 20), 0, 20)) is same


def test_rebuilding_needs_the_last_ids_alone() -> None:
    ids = list(range(60, 90))
    whole, tail = rebuilt(ids, 30), rebuilt(ids[-(WINDOW - 1) :], 30)
    assert torch.equal(whole.position, tail.position)
    assert torch.equal(look(whole, 0, 30), look(tail, 0, 30))


def test_rebuilding_forgets_the_rows_former_request() -> None:
    """A longer request held the row before; its later positions must not look like this one's future."""
    state = WindowState(DRAFT, 2, AHEAD)
    state.rebuild(0, list(range(50)), 50)
    state.rebuild(0, [3, 4], 2)
    assert torch.equal(look(state, 0, 2), look(rebuilt([3, 4], 2), 0, 2))
    state.rebuild(0, list(range(50)), 50)
    state.rebuild(0, [3, 4], 50)  # a text known from its last two tokens: the others' old ones are not its own
    assert torch.equal(look(state, 0, 50), look(rebuilt([3, 4], 50), 0, 50))
    state.rebuild(0, [], 0)
    assert torch.equal(look(state, 0, 0), look(rebuilt([], 0), 0, 0))


@settings(max_examples=40, deadline=None)
@given(window=st.integers(1, 9), ahead=st.integers(1, 5), lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_page_lists_of_a_chain_name_the_slots_that_the_mask_sees(window: int, ahead: int, lengths: list[int]) -> None:
    """Every step of a chain, requests shorter than the window, rows in any order; slots that hold nothing of the text are NaN."""
    draft = tiny_draft(TARGET, window=window)
    state = WindowState(draft, len(lengths) + 1, ahead)
    row_B = torch.arange(len(lengths)).flip(0)
    for row, length in zip(row_B.tolist(), lengths, strict=True):
        state.rebuild(row, list(range(50 + max(length - window, 0), 50 + length)), length)
    for cache in (state.k, state.v):
        cache[state.position < 0] = float("nan")
    at_SB, windows = state.windows(row_B, torch.tensor(lengths), ahead + 1)
    assert at_SB.tolist() == [[length + step for length in lengths] for step in range(ahead + 1)]
    q = torch.randn(len(lengths), 4, 16, generator=torch.Generator().manual_seed(0))
    for at_B, plan in zip(at_SB, windows, strict=True):
        k, v = draft.self_kv(at_B + 7, at_B)
        got = state.attend(row_B, at_B, q, k, v, plan)
        seen = [set(plan.slots(b, n).tolist()) for b, n in enumerate(plan.lens)]
        for b, (row, at) in enumerate(zip(row_B.tolist(), at_B.tolist(), strict=True)):
            held = state.position[row]
            want = ((held <= at) & (held > at - window)).nonzero().flatten() + row * state.ring
            assert seen[b] == set(want.tolist()) and len(seen[b]) == plan.lens[b], "each slot once"
        for cache in (state.k, state.v):
            cache.nan_to_num_()  # the twin multiplies what it hides by zero
        torch.testing.assert_close(got, state.attend(row_B, at_B, q, k, v), rtol=1e-5, atol=1e-6)
        for cache in (state.k, state.v):
            cache[state.position < 0] = float("nan")


def test_rows_are_independent_and_a_batch_equals_its_rows_alone() -> None:
    state = WindowState(DRAFT, 3, AHEAD)
    texts = {0: list(range(12)), 2: list(range(100, 103))}
    for row, ids in texts.items():
        state.rebuild(row, ids, len(ids))
    rows, at = torch.tensor([2, 0]), torch.tensor([3, 12])
    q = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    k, v = DRAFT.self_kv(torch.tensor([8, 9]), at)
    together = state.attend(rows, at, q, k, v)
    for index, row in enumerate((2, 0)):
        alone = rebuilt(texts[row], len(texts[row]))
        one = slice(index, index + 1)
        out = alone.attend(torch.tensor([0]), at[one], q[one], k[one], v[one])
        torch.testing.assert_close(together[one], out)
    assert (state.position[1] < -(1 << 30)).all(), "a row that nobody used stays empty"


def test_memory_of_a_row_is_what_is_announced() -> None:
    """The server takes this memory before its cache pool is sized."""
    state = WindowState(DRAFT, 3, AHEAD)
    held = sum(x.numel() * x.element_size() for x in (state.k, state.v, state.position, state.first))
    assert held == 3 * WindowState.bytes_per_row(DRAFT, AHEAD)
    assert state.ring == WINDOW + AHEAD
