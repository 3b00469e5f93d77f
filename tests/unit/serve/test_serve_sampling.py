"""Choices from processed logits: the analytic filtered distribution, seeds, greedy rows, batches, bias, NaN (V3's twin)."""

import hashlib
import math
from typing import Any

import pytest
import torch
from serve_fakes import plain_request

from longdraft.kernels.gumbel import gumbel_argmax, gumbel_noise
from longdraft.serve.sampling import rows as rows_module
from longdraft.serve.sampling.rows import AT_ONCE, CUT, RowParams, seed_of
from longdraft.serve.sampling.target_choice import process_logits, target_choice

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.4, 1.0, 0.9, 0.3, -0.2, -1.0, -3.0])
DRAWS = 20_000


def filtered(params: dict[str, Any]) -> torch.Tensor:
    """The distribution of SGLang's parameters, by their definitions: each cut looks at the whole distribution."""
    p = torch.softmax(LOGITS.double() / params.get("temperature", 1.0), 0)
    order = sorted(range(len(p)), key=lambda i: -float(p[i]))
    kept, before = set(), 0.0
    for rank, i in enumerate(order):
        in_k = rank < params.get("top_k", len(p))
        in_p = before <= params.get("top_p", 1.0)
        in_min = float(p[i]) >= params.get("min_p", 0.0) * float(p.max())
        if in_k and in_p and in_min:
            kept.add(i)
        before += float(p[i])
    p[[i for i in range(len(p)) if i not in kept]] = 0
    return p / p.sum()


def chi_square_bound(freedom: int) -> float:
    """The 1 - 1e-6 quantile (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
}


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_choices_follow_the_filtered_distribution(params: dict[str, Any], vary: str) -> None:
    """Chi-square over seeds and over positions; what is cut is never drawn."""
    req = plain_request(sampling_seed=5, **params)
    rows = RowParams.build([req], [DRAWS], CPU)
    position = torch.arange(DRAWS) if vary == "position" else torch.full((DRAWS,), 9)
    if vary == "seed":
        rows = RowParams.build([plain_request(sampling_seed=s, **params) for s in range(DRAWS)], [1] * DRAWS, CPU)
    drawn = torch.bincount(rows.choose(LOGITS.expand(DRAWS, -1), position), minlength=len(LOGITS)).double()
    want = filtered(params)
    assert (drawn[want == 0] == 0).all()
    live = want > 0
    expected = want[live] * DRAWS
    statistic = float(((drawn[live] - expected) ** 2 / expected).sum())
    assert statistic < chi_square_bound(int(live.sum()) - 1)


def test_greedy_rows_take_the_argmax_among_sampling_ones() -> None:
    reqs = [plain_request(temperature=0.0), plain_request(sampling_seed=1, temperature=5.0), plain_request(top_k=1)]
    rows = RowParams.build(reqs, [50, 50, 50], CPU)
    chosen = rows.choose(LOGITS.expand(150, -1), torch.arange(150))
    assert not rows.greedy
    assert (chosen[:50] == 0).all()
    assert (chosen[100:] == 0).all()
    assert len(chosen[50:100].unique()) > 3
    assert RowParams.build([reqs[0], reqs[2]], [1, 1], CPU).greedy


def test_a_row_is_chosen_the_same_in_any_batch() -> None:
    """V7 under sampling: company with filters, greedy rows or other widths changes no token."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 4000, generator=g) * 2
    position = torch.arange(60)
    req = plain_request(sampling_seed=3)
    alone = RowParams.build([req], [60], CPU)
    others = [plain_request(top_p=0.5), plain_request(temperature=0.0), plain_request(top_k=3, min_p=0.2)]
    together = RowParams.build([*others, req], [1, 1, 1, 60], CPU)
    assert together.filtered
    assert not alone.filtered
    mixed = together.choose(torch.cat([logits[:3], logits]), torch.cat([torch.arange(3), position]))
    assert torch.equal(mixed[3:], alone.choose(logits, position))


@pytest.mark.parametrize("rows", [AT_ONCE, AT_ONCE + 1, 5 * AT_ONCE // 2])
def test_many_rows_are_sampled_in_parts_of_bounded_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampling requests in turns, cut in all ways; the parts are of about one size."""
    reqs = [
        plain_request(temperature=0.0 if i % 5 == 0 else 0.7 + i % 3, sampling_seed=i, top_k=3 + i % 4, top_p=0.9)
        for i in range(rows)
    ]
    logits_NV = torch.randn(rows, 40, generator=torch.Generator().manual_seed(1))
    position_N = torch.arange(rows) % 97
    params, alone = RowParams.build(reqs, [1] * rows, CPU), []
    for i, req in enumerate(reqs):
        alone.append(int(RowParams.build([req], [1], CPU).choose(logits_NV[i : i + 1], position_N[i : i + 1])))
    sizes: list[int] = []

    def watched(logprob_NV: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        sizes.append(len(logprob_NV))
        return gumbel_argmax(logprob_NV, *rest)

    monkeypatch.setattr(rows_module, "gumbel_argmax", watched)
    assert params.choose(logits_NV, position_N).tolist() == alone
    assert sum(sizes) == rows and max(sizes) <= AT_ONCE and max(sizes) - min(sizes) <= 1
    assert len(set(alone)) > 10


def test_a_whole_nucleus_cuts_nothing_even_where_sums_round_past_one() -> None:
    """float32 sums of 50,000 probabilities pass 1; the tail must not vanish in company of a filtered request."""
    prob = torch.softmax(torch.randn(4, 50_000, generator=torch.Generator().manual_seed(1)), -1)
    rows = RowParams.build([plain_request(top_k=40_000), plain_request()], [2, 2], CPU)
    kept = rows._filter(prob)
    assert torch.equal(kept[2:], prob[2:])
    assert ((kept[:2] > 0).sum(-1) == 40_000).all()


def test_ties_at_a_cut_are_kept_by_token_id() -> None:
    """16-bit logits tie often; which of them top-k keeps must not hang on how a batch's shape is sorted."""
    prob = torch.full((1, 5000), 1 / 5000)
    kept = RowParams.build([plain_request(top_k=7)], [1], CPU)._filter(prob)
    assert kept.nonzero()[:, 1].tolist() == list(range(7))


def test_seeds_are_the_requests_own_or_its_ids() -> None:
    assert seed_of(plain_request(sampling_seed=42)) == 42
    assert seed_of(plain_request(sampling_seed=-1)) == -1
    assert seed_of(plain_request(sampling_seed=(1 << 64) - 1)) == -1, "the same 64 bits"
    digest = hashlib.blake2b(b"abc", digest_size=8).digest()
    assert seed_of(plain_request(rid="abc")) == int.from_bytes(digest, "little", signed=True)
    assert seed_of(plain_request(rid="abc")) != seed_of(plain_request(rid="abd"))
    torch.tensor([seed_of(plain_request(sampling_seed=1 << 63))])  # fits a signed tensor


def test_rows_belong_to_their_requests() -> None:
    rows = RowParams.build(
        [plain_request(temperature=0.5, sampling_seed=1), plain_request(sampling_seed=2)], [2, 3], CPU
    )
    assert rows.temperature_N1.flatten().tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert rows.seed_N.tolist() == [1, 1, 2, 2, 2]


def test_bias_reaches_every_row_of_its_request_alone() -> None:
    biased, other = plain_request(logit_bias={"3": 100.0, "0": -100.0}), plain_request()
    out = process_logits(LOGITS.expand(5, -1).clone(), [biased, other], [[1, 2], [5]])
    want = LOGITS.expand(5, -1).clone()
    want[:3, 3] += 100
    want[:3, 0] -= 100
    torch.testing.assert_close(out, want)


def test_penalties_and_bias_meet_the_rows_of_a_chain() -> None:
    """A greedy request with a presence penalty: each draft that repeats the best token lowers it behind itself."""
    req = plain_request([0], temperature=0.0, presence_penalty=2.0)
    choice, processed = target_choice(LOGITS.expand(3, -1).clone(), [req], [[1, 2]], torch.arange(3))
    assert choice.tolist() == [1, 2, 3]
    assert processed.dtype == torch.float32


def test_nan_and_infinity_never_win_by_accident() -> None:
    logits = torch.tensor([[float("nan"), 1.0, 2.0], [float("inf"), 1.0, 2.0], [float("-inf"), 1.0, 2.0]])
    req = plain_request(temperature=0.0)
    choice, processed = target_choice(logits, [req], [[0, 0]], torch.arange(3))
    assert choice.tolist() == [2, 0, 2]
    assert not processed.isnan().any()
    sampled = plain_request(sampling_seed=1)
    chosen = {int(target_choice(logits, [sampled], [[0, 0]], torch.arange(3) + s)[0][0]) for s in range(50)}
    assert chosen == {1, 2}


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = LOGITS.bfloat16()[None]
    before = logits.clone()
    processed = process_logits(logits, [plain_request(logit_bias={"1": 0.001})], [[]])
    assert torch.equal(logits, before), "the target's own logits stay as they are"
    assert float(processed[0, 1] - before[0, 1].float()) == pytest.approx(0.001, rel=1e-2)


MIXED = [
    plain_request(temperature=0.0),
    plain_request(sampling_seed=4, temperature=0.7),
    plain_request(sampling_seed=9),
]


def test_repeated_rows_are_the_rows_of_that_many() -> None:
    rows, wanted = RowParams.build(MIXED, [1, 1, 1], CPU).repeat(4), RowParams.build(MIXED, [4, 4, 4], CPU)
    for name, value in vars(wanted).items():
        got = getattr(rows, name)
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value


def test_scores_of_a_tree_are_logarithms_of_probabilities_under_the_targets_noise() -> None:
    """Of the best child at every node: the choice that the target would make of the same logits."""
    logits = torch.randn(3, 50, 40, generator=torch.Generator().manual_seed(0)) * 2
    position = torch.tensor([7, 8, 30])
    rows = RowParams.build(MIXED, [1, 1, 1], CPU)
    scores = rows.scores(logits, position)
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(3, 50))
    torch.testing.assert_close(scores[0], logits[0].log_softmax(-1))
    chosen = rows.repeat(50).choose(logits.flatten(0, 1), position.repeat_interleave(50))
    assert torch.equal(scores.argmax(-1).flatten(), chosen)
    noise = gumbel_noise(torch.tensor([4]), position[1:2], torch.arange(40)).float()
    torch.testing.assert_close(scores[1], (logits[1] / 0.7 + noise).log_softmax(-1))
    greedy = RowParams.build(MIXED[:1], [1], CPU)
    assert torch.equal(greedy.scores(logits[:1], position[:1]), logits[:1].log_softmax(-1))


def test_scores_of_a_drafts_vocabulary_have_the_noise_of_the_targets_ids() -> None:
    ids = torch.tensor([2, 3, 17, 39])
    logits = torch.full((1, 1, 40), float("-inf"))
    logits[..., ids] = torch.tensor([0.3, 1.0, -1.0, 0.0])
    rows = RowParams.build([plain_request(sampling_seed=4)], [1], CPU)
    position = torch.tensor([11])
    torch.testing.assert_close(rows.scores(logits[..., ids], position, ids), rows.scores(logits, position)[..., ids])


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_what_the_cuts_leave_out_is_less_likely_in_a_tree(params: dict[str, Any]) -> None:
    """By CUT, against the rest: greedy rows in the same batch cut nothing."""
    reqs = [plain_request(sampling_seed=6), plain_request(sampling_seed=6, **params), plain_request(temperature=0.0)]
    scores = RowParams.build(reqs, [1, 1, 1], CPU).scores(LOGITS.expand(3, 1, -1), torch.tensor([5, 5, 5]))[:, 0]
    lost = (scores[0] - scores[0, 0]) - (scores[1] - scores[1, 0])
    torch.testing.assert_close(lost, torch.where(filtered(params) > 0, 0.0, CUT).float())
    torch.testing.assert_close(scores[2], LOGITS.log_softmax(0))
