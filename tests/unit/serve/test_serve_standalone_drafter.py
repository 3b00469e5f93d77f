"""The served language-model draft: it drafts what computing everything again drafts, whatever was kept and refused before (D2, D7).

Unwritten slots are poison, so a key that is read without having been written shows.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llama_on_pages import TABLE
from paged_lm import PagedLM, prefill_of
from serve_fakes import SAMPLING, row_params

from longdraft.draft_models.sparse_recipe import LayerHeads
from longdraft.errors import UserError
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.drafters.inputs import GREEDY
from longdraft.serve.drafters.running import Running
from longdraft.serve.drafters.standalone import StandaloneDrafter
from longdraft.serve.tokens import Tokens
from longdraft.train.tiny_random import tiny_random_model

STEPS, LENGTH = 4, 60
MODEL = tiny_random_model("llama")
VOCAB = MODEL.config.vocab_size
ROWS = {"a": 1, "b": 2, "c": 3}
TEXTS = {
    rid: torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(ord(rid))).tolist() for rid in ROWS
}


def make(
    context: int = 400, sinks: int = 4, vocab: int = VOCAB, model: Any = MODEL, ahead: int = 0
) -> StandaloneDrafter:
    lm: Any = PagedLM(model)
    drafter = StandaloneDrafter(lm, vocab, 3, STEPS, context, sinks, ahead)
    drafter.take_pools(None, SimpleNamespace(req_to_token=TABLE), None)
    drafter.bind_pool(None, {})
    return drafter


def prefill(drafter: StandaloneDrafter, at: dict[str, int]) -> None:
    """The target has computed the first tokens of these texts, whose next one is the newest."""
    drafter.prefilled(prefill_of(ROWS, [(rid, TEXTS[rid], 0, end) for rid, end in at.items()]))
    for rid, end in at.items():
        drafter.follow(rid, tokens_of(TEXTS[rid][: end + 1]), end)


def tokens_of(ids: list[int]) -> Tokens:
    return Tokens(SimpleNamespace(origin_input_ids=array("q", ids[:1]), output_ids=array("q", ids[1:])))


def running(texts: dict[str, list[int]]) -> Running:
    """Requests whose last token has no cache yet."""
    row_B = torch.tensor([ROWS[rid] for rid in texts])
    length_B = torch.tensor([len(ids) - 1 for ids in texts.values()])
    return Running(tuple(texts), row_B, TABLE, length_B, torch.tensor([ids[-1] for ids in texts.values()]))


@torch.no_grad()
def reference(ids: list[int], choose: Any = None, model: Any = MODEL, vocab: int = VOCAB) -> list[int]:
    """The chain behind a text, by computing all of it in every step."""
    ids, start = list(ids), len(ids)
    for _ in range(STEPS):
        logits = model(torch.tensor([ids])).logits[0, -1:, :vocab]
        ids.append(int(logits.argmax() if choose is None else choose(logits, torch.tensor([len(ids) - 1]))))
    return ids[start:]


def greedy(logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def test_chains_behind_a_prefill_are_those_of_the_whole_text() -> None:
    drafter = make()
    prefill(drafter, {"a": 30, "b": 1, "c": 17})
    texts = {"c": TEXTS["c"][:18], "a": TEXTS["a"][:31], "b": TEXTS["b"][:2]}
    got = drafter.propose_running(running(texts), greedy).tolist()
    assert got == [reference(ids) for ids in texts.values()]
    assert drafter.model.forwards == STEPS, "the token that may be missing costs no forward"  # type: ignore[attr-defined]


@pytest.mark.parametrize("on_host", [False, True])
def test_whatever_is_kept_of_a_chain_the_next_is_right(on_host: bool) -> None:
    """All drafts kept (the last of which nothing has read), some, none; and rounds that draft without keeping anything."""
    drafter, ids = make(), TEXTS["a"][:10]
    prefill(drafter, {"a": 9})
    for kept in (STEPS, 0, STEPS, STEPS, 2, 1, STEPS, 3, 0, 0, STEPS):
        if on_host:
            request = DraftRequest("a", tokens_of(ids), TABLE[1, : len(ids) - 1], STEPS)
            (drafts,) = drafter.propose([request], greedy)
            drafter.committed(request, [])
        else:
            (drafts,) = drafter.propose_running(running({"a": ids}), greedy).tolist()
        assert drafts == reference(ids)
        ids = [*ids, *drafts[:kept], (sum(ids) * 7 + kept) % 256]
    assert drafter.whole["a"] is None


def test_a_run_that_is_taken_back_over_several_chains_leaves_the_rest_right() -> None:
    """Mode exact: partial rounds draft one behind the other, and a full verification confirms only a part of them."""
    drafter, ids = make(ahead=20), TEXTS["b"][:12]
    prefill(drafter, {"b": 11})
    for confirmed in (3, 9, 5, 17, 0, 4):
        tentative = list(ids)
        for kept in (STEPS, 2, STEPS):
            (drafts,) = drafter.propose_running(running({"b": tentative}), greedy).tolist()
            assert drafts == reference(tentative)
            tentative = [*tentative, *drafts[:kept], (len(tentative) * 5) % 256]
        tentative += drafter.propose_running(running({"b": tentative}), greedy).tolist()[0]
        ids = [*tentative[: len(ids) + confirmed], (confirmed * 11) % 256]
    assert drafter.propose_running(running({"b": ids}), greedy).tolist() == [reference(ids)]


def test_limits_cut_chains_on_the_host() -> None:
    drafter = make()
    prefill(drafter, {"a": 20, "b": 5})
    ids = TEXTS["a"][:21], TEXTS["b"][:6]
    asked = [
        DraftRequest(r, tokens_of(i), TABLE[ROWS[r], : len(i) - 1], n)
        for r, i, n in zip("ab", ids, (2, 4), strict=True)
    ]
    assert drafter.propose(asked, greedy) == [reference(ids[0])[:2], reference(ids[1])]


def test_a_second_chunk_and_a_shared_prefix_are_read_where_they_lie() -> None:
    drafter = make()
    drafter.prefilled(prefill_of(ROWS, [("a", TEXTS["a"], 0, 25)]))
    drafter.prefilled(prefill_of(ROWS, [("a", TEXTS["a"], 25, 31), ("b", TEXTS["b"], 0, 8)]))
    ids = TEXTS["a"][:32]
    drafter.follow("a", tokens_of(ids), 31)
    assert drafter.propose_running(running({"a": ids}), greedy).tolist() == [reference(ids)]
    shared = TABLE.clone()
    shared[3, :20] = TABLE[1, :20]  # a prefix hit: the same slots in another row
    drafter.model.table = drafter.table_RW = shared  # type: ignore[attr-defined]
    text = TEXTS["a"][:20] + TEXTS["c"][:9]
    drafter.prefilled(prefill_of(ROWS, [("c", text, 20, 28)]))
    drafter.follow("c", tokens_of(text), 28)
    now = Running(("c",), torch.tensor([3]), shared, torch.tensor([28]), torch.tensor([text[28]]))
    assert drafter.propose_running(now, greedy).tolist() == [reference(text)]


def masked(ids: list[int], columns: list[int]) -> list[int]:
    """The chain where its first two tokens, of which the first is in the cache, and all behind them read these columns alone."""
    first, start, ids = len(ids) - 2, len(ids), list(ids)
    for _ in range(STEPS):
        size = len(ids)
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        seen[first:, :first] = False
        seen[first:, columns] = True
        with torch.no_grad():
            bias = torch.zeros(size, size).masked_fill(~seen, float("-inf"))[None, None]
            ids.append(int(MODEL(torch.tensor([ids]), attention_mask=bias).logits[0, -1].argmax()))
    return ids[start:]


@pytest.mark.parametrize(("context", "sinks"), [(8, 2), (8, 0), (9, 8), (40, 4), (41, 4)])
def test_a_chain_reads_sinks_and_the_most_recent_tokens(context: int, sinks: int) -> None:
    drafter, ids = make(context, sinks), TEXTS["a"][:42]
    prefill(drafter, {"a": 41})
    recent = context - sinks - 1  # the last cached token is computed again
    columns = list(range(40)) if context >= 41 else [*range(sinks), *range(40 - recent, 40)]
    assert drafter.propose_running(running({"a": ids}), greedy).tolist() == [masked(ids, columns)]


def test_a_chain_reads_what_was_chosen() -> None:
    drafter, ids = make(context=16, sinks=4), TEXTS["a"][:42]
    prefill(drafter, {"a": 41})
    columns = [0, 3, 9, 17, 33, 38, 39]
    now = running({"a": ids})
    chosen = torch.nn.functional.pad(TABLE[1, [*columns, 40]][None], (0, 5)), torch.tensor([8], dtype=torch.int32)
    got = drafter.propose_running(
        Running(now.rids, now.row_B, TABLE, now.length_B, now.newest_B, chosen=chosen), greedy
    )
    assert got.tolist() == [masked(ids, columns)]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_padding_and_noise_change_nothing(sampling: dict[str, Any]) -> None:
    """What a graph replays is this function at these sizes."""
    drafter, plain = make(), make()
    for each in (drafter, plain):
        prefill(each, {"a": 30, "b": 3})
    drafter.use_graphs([1, 3])
    texts = {"b": TEXTS["b"][:4], "a": TEXTS["a"][:31]}
    params = row_params("ba", sampling)
    for _ in range(2):
        got = drafter.propose_running(running(texts), params).tolist()
        assert got == plain.propose_running(running(texts), params).tolist()
        assert got == [reference(ids, row_params([rid], sampling)) for rid, ids in texts.items()]
        texts = {rid: [*ids, *chain[:2], 7] for (rid, ids), chain in zip(texts.items(), got, strict=True)}
    assert bool(drafter.model.pool.k[:, 1:].isnan().any()), "padding writes to nobody's slot alone"  # type: ignore[attr-defined]


def test_no_token_beyond_the_targets_is_proposed_and_none_beyond_the_drafts_is_read() -> None:
    """Either vocabulary may be the larger one."""
    padded = tiny_random_model("llama", vocab_size=VOCAB + 8)
    with torch.no_grad():
        padded.get_output_embeddings().weight[VOCAB:] = 3 * padded.get_output_embeddings().weight[:8]
    free = reference(TEXTS["a"][:31], model=padded, vocab=VOCAB + 8)
    drafter = make(model=padded)
    prefill(drafter, {"a": 30})
    (got,) = drafter.propose_running(running({"a": TEXTS["a"][:31]}), greedy).tolist()
    assert got == reference(TEXTS["a"][:31], model=padded) and max(got) < VOCAB
    assert max(free) >= VOCAB, "padding was meant to be what the draft likes best"
    larger = make(vocab=VOCAB + 100)
    prefill(larger, {"a": 30})
    ids = [*TEXTS["a"][:30], VOCAB + 50]
    (got,) = larger.propose_running(running({"a": ids}), greedy).tolist()
    assert got == reference([*ids[:-1], VOCAB - 1]) and max(got) < VOCAB


def test_chains_at_the_end_of_the_page_table_write_nobodys_slot() -> None:
    drafter = make()
    columns = TABLE.shape[1]
    ids = [i % 256 for i in range(columns)]
    for start in range(0, columns - 1, 100):
        drafter.prefilled(prefill_of(ROWS, [("a", ids, start, min(start + 100, columns - 1))]))
    drafter.follow("a", tokens_of(ids), columns - 1)
    before = drafter.model.pool.k.clone()  # type: ignore[attr-defined]
    (got,) = drafter.propose_running(running({"a": ids}), greedy).tolist()
    assert got[0] == reference(ids)[0]
    changed = (drafter.model.pool.k != before).flatten(2).any(-1).any(0).nonzero().flatten().tolist()  # type: ignore[attr-defined]
    poison = before.isnan().flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert set(changed) - set(poison) <= {0, int(TABLE[1, -1]), int(TABLE[1, -2])}


def test_what_is_handed_back_is_whole() -> None:
    """All but the last token where a chain was behind every round; the prompt where none was; nothing where something failed."""
    drafter = make()
    drafter.prefilled(prefill_of(ROWS, [(rid, TEXTS[rid], 0, 20) for rid in "abc"]))
    drafter.follow("a", tokens_of(TEXTS["a"][:21]), 20)
    assert drafter.follows("a") and not drafter.follows("b")
    assert [drafter.handed_back(rid, 30) for rid in "abc"] == [29, 20, 20]
    assert drafter.handed_back("b", 15) == 15
    drafter.settle("a", 33)  # a round on the host follows
    drafter.settle("b", 33)
    assert not drafter.follows("a")
    drafter.propose([DraftRequest("a", tokens_of(TEXTS["a"][:34]), TABLE[1, :33], 4)], greedy)
    assert [drafter.handed_back(rid, 40) for rid in "ab"] == [39, 20]
    drafter.settle("a", 36)  # and one without a draft, and another
    drafter.follow("a", tokens_of(TEXTS["a"][:39]), 38)
    assert drafter.handed_back("a", 50) == 35, "two tokens are missing"
    drafter.clear()
    assert [drafter.handed_back(rid, 40) for rid in "abc"] == [0, 0, 0]
    drafter.forget("a")
    drafter.prefilled(prefill_of({"d": 1}, [("d", TEXTS["a"], 0, 7)]))
    assert drafter.handed_back("d", 30) == 7 and "a" not in drafter.rows


def test_a_row_that_changes_hands_forgets_who_had_it() -> None:
    drafter = make()
    drafter.prefilled(prefill_of({"x": 1}, [("x", TEXTS["a"], 0, 9)]))
    drafter.prefilled(prefill_of({"y": 1}, [("y", TEXTS["b"], 0, 5)]))
    assert drafter.rows == {"y": 1} and drafter.whole == {"y": 5}


def test_prefills_that_failed_leave_zeros() -> None:
    drafter = make()
    drafter.unobserved(TABLE[1, :5].long())
    assert float(drafter.model.pool.k[:, TABLE[1, :5].long()].abs().max()) == 0.0  # type: ignore[attr-defined]


def test_the_lookahead_is_the_queries_of_every_step() -> None:
    """By transformers' own modules: rotated queries at the positions of the chain's tokens."""
    drafter, texts = make(), {"b": TEXTS["b"][:4], "a": TEXTS["a"][:31]}
    assert drafter.look_ahead([LayerHeads(layer=1, heads=[2, 0]), LayerHeads(layer=0, heads=[3])]) == 2
    prefill(drafter, {"a": 30, "b": 3})
    drafter.use_graphs([3])
    now = running(texts)
    chains = drafter.propose_running(now, greedy).tolist()
    kept: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for ids, chain in zip(texts.values(), chains, strict=True):
        for layer, found in queries([*ids, *chain[:-1]]).items():
            kept[layer].append(found[-STEPS:])
    second, first = drafter.lookahead(now)
    for seen, layer, heads in ((first, 0, (3,)), (second, 1, (0, 2))):
        torch.testing.assert_close(seen.q_NHD, torch.cat(kept[layer]), rtol=1e-4, atol=1e-5)
        assert seen.k_SKD is drafter.model.pool.k[layer] or torch.equal(  # type: ignore[attr-defined]
            seen.k_SKD.nan_to_num(),
            drafter.model.pool.k[layer].nan_to_num(),  # type: ignore[attr-defined]
        )
        assert seen.heads == heads and seen.first == 0 and seen.table_RW is None and seen.kv_scale == 1.0
    for rid, ids in texts.items():
        assert not bool(second.k_SKD[TABLE[ROWS[rid], : len(ids) - 1].long()].isnan().any())


@torch.no_grad()
def queries(ids: list[int]) -> dict[int, torch.Tensor]:
    """Rotated queries ``[T, H, D]`` of each layer over a text."""
    from llama_on_pages import attention, llama_logits

    found = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found[layer] = q
        return attention(q, k, v, 0)

    llama_logits(MODEL, torch.tensor(ids), torch.arange(len(ids)), attend)
    return found


def test_without_a_calibration_one_layer_looks_ahead_with_all_its_heads() -> None:
    drafter = make()
    assert drafter.lookahead(running({"a": TEXTS["a"][:3]})) == []
    assert drafter.look_ahead(None) == 1
    (layer, heads) = drafter.wanted[0]
    assert layer.layer_id == MODEL.config.num_hidden_layers * 2 // 3
    assert heads == tuple(range(MODEL.config.num_attention_heads))


@pytest.mark.parametrize(("layer", "heads", "named"), [(9, [0], "draft layer 9"), (0, [1, 40], "not head 40")])
def test_layers_and_heads_that_are_not_there_are_refused(layer: int, heads: list[int], named: str) -> None:
    with pytest.raises(UserError, match="calibrate with this draft") as error:
        make().look_ahead([LayerHeads(layer=layer, heads=heads)])
    assert named in str(error.value)


def test_greedy_batches_are_one_variant() -> None:
    """What is captured before the first request comes."""
    drafter = make()
    prefill(drafter, {"a": 9})
    seen: list[Any] = []
    loop = drafter.runner.work
    drafter.runner.work = lambda size, variant: (seen.append(variant), loop(size, variant))[1]
    drafter.propose_running(running({"a": TEXTS["a"][:10]}), row_params("a", {"temperature": 0.0}))
    assert seen == [GREEDY]
