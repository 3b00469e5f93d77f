"""Algorithm 1 against brute force on problems that are small enough for it (U5).

Legend: S layers, W windows, N tokens.
"""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch

from longdraft.train.calibration.recovery import Split, choose_sets, recovery
from longdraft.train.calibration.search import (
    Objective,
    Plan,
    lookahead_values,
    search,
    search_draft_layers,
    search_lookahead,
)
from longdraft.train.calibration.traces import Trace

TOKENS, BUDGET = 90, 32  # 12 of a set are not protected
PLAN = Plan(budget=BUDGET, splits=[3, 6], draft_layers=3, gain=0.0, trials=40, step=2, seed=0)


def once(name: str, find: Callable[[], float]) -> float:
    return find()


def silent(text: str) -> None: ...


def random_trace(seed: int, target_layers: int = 4, draft_layers: int = 4, windows: int = 3) -> Trace:
    g = torch.Generator().manual_seed(seed)
    length_W = TOKENS - torch.arange(windows - 1, -1, -1)
    valid_WN = torch.arange(TOKENS) < length_W[:, None]

    def attention(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, TOKENS, generator=g).mul(3).masked_fill(~valid_WN, float("-inf"))
        return drawn.softmax(-1)

    return Trace(
        length_W,
        attention(target_layers, windows),
        attention(1, target_layers, windows),
        attention(draft_layers, windows),
    )


def brute(traces: list[Trace], target: int, draft: list[int], lookahead: int) -> float:
    """Recovery in plain loops: mean over texts, windows and layers."""
    found = []
    for trace in traces:
        for w, length in enumerate(trace.length_W.tolist()):
            ahead_N = sum((trace.lookahead_SWN[d, w] for d in draft), torch.zeros(TOKENS))
            kept_WN = choose_sets(
                trace.history_GSWN[0, target, w][None], ahead_N[None], torch.tensor([length]), Split(BUDGET, lookahead)
            )
            found += [float(recovery(layer[w][None], kept_WN)) for layer in trace.attention_SWN]
    return sum(found) / len(found)


@pytest.mark.parametrize("seed", range(3))
def test_the_search_is_brute_force_step_by_step(seed: int) -> None:
    traces = [random_trace(seed), random_trace(seed + 50)]
    choice = search(Objective(traces, BUDGET), PLAN, once, silent)
    history = [brute(traces, layer, [], 0) for layer in range(4)]
    assert choice.target_layer == history.index(max(history))

    def mean_of_splits(layers: list[int]) -> float:
        return sum(brute(traces, choice.target_layer, layers, m) for m in PLAN.splits) / len(PLAN.splits)

    chosen: list[int] = []
    before = max(history)
    while len(chosen) < 3:
        values = {layer: mean_of_splits([*chosen, layer]) for layer in range(4) if layer not in chosen}
        layer = max(values, key=lambda each: values[each])
        if chosen and values[layer] - before < PLAN.gain:
            break
        chosen.append(layer)
        before = values[layer]
    assert choice.draft_layers == chosen
    tried = {m: brute(traces, choice.target_layer, chosen, m) for m in lookahead_values(BUDGET, PLAN.step)}
    assert choice.recovery == pytest.approx(max(tried.values()), abs=1e-6)
    assert tried[choice.lookahead] == pytest.approx(max(tried.values()), abs=1e-6)


def pointed(places: dict[int, float], windows: int = 2) -> torch.Tensor:
    """Attention on some tokens, ``[W, N]``."""
    row_N = torch.zeros(TOKENS)
    for place, mass in places.items():
        row_N[place] = mass
    return row_N.expand(windows, -1).clone()


def planted_trace() -> Trace:
    """The target looks at tokens 30 to 41. Its layer 1 knew of three, draft layers 2 and 0 of others; layers 1 and 3 look elsewhere."""
    wanted = pointed(dict.fromkeys(range(30, 42), 1 / 12))
    history = torch.stack([pointed({60: 1.0}), pointed({30: 0.5, 31: 0.3, 32: 0.2})])
    draft = [{33: 0.5, 34: 0.5}, {50: 1.0}, {35: 0.4, 36: 0.3, 37: 0.2, 38: 0.1}, {51: 1.0}]
    length_W = torch.full((2,), TOKENS)
    return Trace(length_W, wanted[None], history[None], torch.stack([pointed(places) for places in draft]))


def test_layers_that_do_not_count_choose_but_are_not_recovered() -> None:
    """Of three layers two look at token 60, which layer 0 knows of, the last one where layer 1 does: what a mean over all of them hides."""
    seen, trace = pointed({60: 1.0}), planted_trace()
    attention = torch.cat([seen[None], seen[None], trace.attention_SWN])
    trace = Trace(trace.length_W, attention, trace.history_GSWN, trace.lookahead_SWN[:0])
    tight = BUDGET - 11  # one token beside sinks and window
    assert search(Objective([trace], tight), PLAN, once, silent).target_layer == 0
    counted = search(Objective([trace], tight, 2), PLAN, once, silent)
    assert counted.target_layer == 1 and counted.recovery == pytest.approx(1 / 12)


def test_greedy_layers_are_the_best_of_all_subsets() -> None:
    objective, plan = Objective([planted_trace()], BUDGET), Plan(BUDGET, [6], 2, 0.001, 10, 1, 0)
    choice = search(objective, plan, once, silent)
    assert choice.target_layer == 1 and choice.draft_layers == [2, 0]
    every = {layers: objective(1, layers, 6) for n in (1, 2) for layers in combinations(range(4), n)}
    assert set(max(every, key=lambda layers: every[layers])) == {0, 2}
    assert every[0, 2] == pytest.approx(9 / 12), "three of the history's tokens, two and four of the draft's"


def test_a_layer_that_adds_too_little_ends_the_search_but_the_first_is_taken() -> None:
    objective = Objective([planted_trace()], BUDGET)
    said: list[str] = []
    rising = Plan(BUDGET, [6], 4, 0.001, 10, 1, 0)
    assert search_draft_layers(objective, rising, 1, objective(1), once, said.append) == [2, 0]
    assert said[-1].endswith("left out") and "draft layer 1 would add" in said[-1]
    steep = Plan(BUDGET, [6], 4, 0.5, 10, 1, 0)
    assert search_draft_layers(objective, steep, 1, 0.9, once, silent) == [2]
    trace = planted_trace()
    alone = Objective([Trace(trace.length_W, trace.attention_SWN, trace.history_GSWN, trace.lookahead_SWN[:0])], BUDGET)
    choice = search(alone, PLAN, once, silent)
    assert (choice.draft_layers, choice.lookahead, choice.target_layer) == ([], 0, 1)


def test_lookahead_values_reach_from_none_to_all_that_there_is_room_for() -> None:
    assert lookahead_values(512, 16)[:3] == [0, 16, 32] and lookahead_values(512, 16)[-2:] == [480, 492]
    assert lookahead_values(36, 8) == [0, 8, 16]


@pytest.mark.parametrize("seed", [0, 7, (1 << 63) - 1])
def test_the_lookahead_is_the_best_of_all_values_and_the_same_every_time(seed: int) -> None:
    objective = Objective([random_trace(11), random_trace(12)], BUDGET)
    plan = Plan(BUDGET, [6], 1, 0.0, 40, 1, seed)
    found = search_lookahead(objective, plan, 2, [1, 3], once)
    every = [objective(2, [1, 3], m) for m in range(13)]
    assert found == (every.index(max(every)), max(every)) == search_lookahead(objective, plan, 2, [1, 3], once)


def test_both_ends_are_tried_and_of_equal_values_the_smallest_wins() -> None:
    tried: list[str] = []

    def flat(name: str, find: Callable[[], float]) -> float:
        tried.append(name)
        return 0.5

    plan = Plan(BUDGET, [6], 1, 0.0, 12, 3, 0)
    assert search_lookahead(Objective([planted_trace()], BUDGET), plan, 1, [2], flat) == (0, 0.5)
    assert tried[:2] == ["lookahead 0", "lookahead 12"] and set(tried) <= {f"lookahead {m}" for m in (0, 3, 6, 9, 12)}


def test_every_value_is_found_once_by_name() -> None:
    """What a stopped search kept is not found again, and the result does not change."""
    objective, known = Objective([random_trace(1)], BUDGET), dict[str, float]()
    calls: list[str] = []

    def keep(name: str, find: Callable[[], float]) -> float:
        if name not in known:
            calls.append(name)
            known[name] = find()
        return known[name]

    first = search(objective, PLAN, keep, silent)
    assert len(calls) == len(set(calls)) == len(known) and {"target 3", "lookahead 0"} <= known.keys()
    for name in list(known)[len(known) // 2 :]:
        del known[name]
    calls.clear()
    assert search(objective, PLAN, keep, silent) == first
    assert 0 < len(calls) < len(known)
