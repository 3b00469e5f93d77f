"""What a server of modes ``exact``, ``partial`` and ``sparse`` keeps, made once SGLang has its cache pool."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longdraft.draft_models.sparse_recipe import PROTECTED
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.cache_format import UNSCALED, Scales, attention_layers
from longdraft.serve.drafters.base import Drafter
from longdraft.serve.drafters.looked import own_heads
from longdraft.serve.settings import LONGEST_REFRESH, ServeSettings
from longdraft.serve.sparse_rounds import SparseRounds, scaled
from longdraft.serve.view_step import ViewStep
from longdraft.serve.views.chooser import ViewChooser
from longdraft.serve.views.cycle_plan import CyclePlanner
from longdraft.serve.views.missed_mass import MissedMass
from longdraft.serve.views.query_tap import QueryTap, QueryTaps
from longdraft.serve.views.round_choice import Bytes, RoundChoice
from longdraft.serve.views.selectors import make_selector
from longdraft.serve.views.set_chooser import History, SetChooser
from longdraft.serve.views.token_set import SparseBudget
from longdraft.serve.views.view_state import ViewState

FIXED_ON_A_CARD = 5e9  # bytes: 1.2 ms, seen between a partial verification's time and its reading on an H200


def token_bytes(runner: Any, ranks: int = 1) -> int:
    """Keys and values of one cached token in all layers of a model runner's target; as one of so many ranks has them."""
    config = runner.model_config
    item: int = runner.kv_cache_dtype.itemsize
    return 2 * config.num_hidden_layers * config.get_num_kv_heads(ranks) * config.head_dim * item


def read_bytes(runner: Any, drafter: Drafter, settings: ServeSettings, chain: int, ranks: int = 1) -> Bytes:
    """What rounds read on one of so many ranks, for the first guess of how many of them pay."""
    weights, token = sum(p.nbytes for p in runner.model.parameters()), token_bytes(runner, ranks)
    fixed = FIXED_ON_A_CARD if runner.device == "cuda" else 0.0
    return Bytes(weights, drafter.bytes_per_step * (chain - 1), token, settings.view_width(chain), fixed)


def keep_views(
    step: ViewStep, settings: ServeSettings, runner: Any, drafter: Drafter, most: int, scales: Mapping[int, Scales]
) -> None:
    """Give a step its views, and the attention backend what it keeps for their choice.

    Args:
        step: of the server.
        settings: of the server.
        runner: the target's model runner; its attention backend is ours, its pools exist.
        drafter: of the server.
        most: requests at once.
        scales: of the layers whose cache has any.
    """
    backend, table, config = runner.attn_backend, runner.req_to_token_pool.req_to_token, runner.model_config
    assert isinstance(backend, LongDraftAttention)
    selector = make_selector(settings.view_selector, settings.view_reduction)
    layers, by_layer = selector.layers(config.num_hidden_layers), settings.view_lists == "layers"
    by_layer = by_layer and bool(layers)  # without queries all layers have the same list
    backend.tap = tap = QueryTap(tuple(range(config.num_hidden_layers)) if by_layer else layers, selector.rows)
    heads, ranks = config.num_attention_heads // step.ranks.size, step.ranks
    tap.allocate(most * step.stride, heads, config.head_dim, runner.dtype, table.device)
    budget = settings.budget()
    step.view_width = min(settings.view_width(step.chain), table.shape[1])
    remembered = (LONGEST_REFRESH if settings.sparse else settings.pending) + 2 * step.stride
    rows, columns = table.shape
    lists = len(tap.layers) if by_layer else 1
    widest = max(budget.columns, min(settings.sparse_tokens, columns) if settings.sparse else 0)
    step.views = ViewState(rows, columns, widest, remembered, table.device, lists, budget.sinks)
    scale = next(layer.scaling for _, layer in attention_layers(runner.model))
    step.chooser = ViewChooser(selector, budget, runner.token_to_kv_pool, tap, scale, scales, by_layer, ranks)
    if settings.refresh_missed_mass is not None:
        step.missed = MissedMass(step.chooser, step.views, layers, settings.refresh_missed_mass)
    choice = RoundChoice(read_bytes(runner, drafter, settings, step.chain, ranks.size), max_ms=settings.max_cycle_ms)
    step.planner = CyclePlanner(settings, step.chain, choice)
    if settings.sets:
        _keep_sets(step, settings, runner, drafter, most, scales)


def _keep_sets(
    step: ViewStep, settings: ServeSettings, runner: Any, drafter: Drafter, most: int, scales: Mapping[int, Scales]
) -> None:
    """What chooses sets of tokens; the arguments are those of :func:`keep_views`, which comes first."""
    config, recipe, ranks = runner.model_config, settings.recipe(), step.ranks
    layer = max(config.num_hidden_layers - 2, 0) if recipe is None else recipe.target.layer
    heads = range(config.num_attention_heads) if recipe is None else recipe.target.heads
    tap, each = QueryTap((layer,), 1), config.num_attention_heads // ranks.size
    own = own_heads(heads, range(ranks.rank * each, (ranks.rank + 1) * each))
    tap.allocate(most * step.stride, each, config.head_dim, runner.dtype, runner.device)
    runner.attn_backend.tap = QueryTaps(runner.attn_backend.tap, tap)
    scale = next(each.scaling for _, each in attention_layers(runner.model) if each.layer_id == layer)
    keys = runner.token_to_kv_pool.get_key_buffer(layer)
    history = History(keys, own, scale, scales.get(layer, UNSCALED)[0], len(heads))
    table = runner.req_to_token_pool.req_to_token
    budget, viewed = settings.set_budget(), None
    if budget.tokens > (columns := max(table.shape[1], PROTECTED + 1)):
        budget = scaled(budget, columns)  # which holds any context; its lists are as wide as it is
    if make_selector(settings.view_selector).by_round:
        blocks = settings.budget()
        viewed = SparseBudget(blocks.tokens, blocks.sinks, blocks.recent, 0)
        share = budget.lookahead / budget.most_lookahead
        viewed = replace(viewed, lookahead=round(share * viewed.most_lookahead))
    measures = settings.refresh_missed_mass is not None
    sets = SetChooser(history, tap, step.views, table, drafter.lookahead, measures, ranks)
    step.sparse = SparseRounds(sets, budget, viewed)
    step.set_width = min(budget.tokens, step.view_width)  # no narrower than a set but where a table's row is
