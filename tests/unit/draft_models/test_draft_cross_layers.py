"""A LongSpec draft that reads several layers of the target's cache."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_draft, tiny_target
from transformers import DynamicCache

from longdraft.draft_models.checkpoint import load_draft, save_draft
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings
from longdraft.draft_models.newest_key import Keys, newest_key_queries, newest_log_share, start_at_newest_key
from longdraft.errors import UserError
from longdraft.kernels.dense_attention import dense_attention

LAYERS, GROUP, LENGTH = [0, 2, 3], 3, 30
TARGET = tiny_target("llama", num_hidden_layers=4)
IDS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(5))
POSITION = torch.arange(LENGTH)


@torch.no_grad()
def test_captured_are_the_layers_of_the_targets_own_cache() -> None:
    cache = DynamicCache()
    TARGET.model(IDS[None], past_key_values=cache, use_cache=True)
    seen = TARGET.capture(IDS, POSITION, [0, LENGTH], kv_layers=LAYERS)
    for got, name in ((seen.k_TKD, "keys"), (seen.v_TKD, "values")):
        want = torch.cat([getattr(cache.layers[i], name)[0].transpose(0, 1) for i in LAYERS], 1)
        torch.testing.assert_close(got, want)
    last = TARGET.capture(IDS, POSITION, [0, LENGTH])
    assert torch.equal(last.k_TKD, seen.k_TKD[:, -TARGET.spec.num_kv_heads :])


@pytest.mark.parametrize("lag", [1, 3])
@torch.no_grad()
def test_each_layer_is_read_by_query_heads_of_its_own(lag: int) -> None:
    """The training pass against one attention a layer, which is how a server reads its pools."""
    draft = tiny_draft(TARGET, window=8, cross_layers=LAYERS, cross_group=GROUP)
    heads = TARGET.spec.num_kv_heads
    assert draft.config.cross_heads == len(LAYERS) * heads * GROUP
    seen = TARGET.capture(IDS, POSITION, [0, LENGTH], kv_layers=LAYERS)
    got = draft.forward_packed(IDS, POSITION, seen.k_TKD, seen.v_TKD, [0, LENGTH], lag)
    mask = POSITION[None] <= POSITION[:, None] - lag

    def by_layer(q_THD: torch.Tensor) -> torch.Tensor:
        outs = []
        for n, q in enumerate(q_THD.split(heads * GROUP, 1)):
            k, v = (x[:, n * heads : (n + 1) * heads] for x in (seen.k_TKD, seen.v_TKD))
            outs.append(dense_attention(q, k, v, q.shape[-1] ** -0.5, mask)[0])
        return torch.cat(outs, 1)

    def in_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        back = POSITION[:, None] - POSITION[None]
        return dense_attention(q, k, v, q.shape[-1] ** -0.5, (back >= 0) & (back < 8))[0]

    torch.testing.assert_close(got, draft(IDS, POSITION, in_window, by_layer))


@torch.no_grad()
def test_a_stored_draft_reads_the_same_layers(tmp_path: Path) -> None:
    draft = tiny_draft(TARGET, window=8, cross_layers=LAYERS, cross_group=GROUP)
    save_draft(draft, tmp_path, "target")
    again = load_draft(tmp_path, TARGET.spec, torch.float32, torch.device("cpu"))
    assert isinstance(again.config, LongSpecConfig) and again.config.cross_layers == tuple(LAYERS)
    assert torch.equal(again.cross_attn.q_proj.weight, draft.cross_attn.q_proj.weight)


def test_newest_heads_begin_in_every_layer() -> None:
    settings = {"window": 8, "cross_layers": LAYERS, "cross_group": GROUP, "qkv_bias": True, "cross_q_norm": False}
    draft = tiny_draft(TARGET, **settings)
    ids = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(6))
    seen = TARGET.capture(ids, torch.arange(200), [0, 200], kv_layers=LAYERS)
    keys = Keys(seen.k_TKD, torch.arange(200))
    query_KD = newest_key_queries([keys], draft.rotary, (1, 4), seed=0)
    start_at_newest_key(draft, query_KD, 2)
    q_RHD = draft.cross_attn.query(torch.randn(1, TARGET.spec.hidden_size))[0]
    by_key_head = q_RHD.view(-1, GROUP, TARGET.spec.head_dim)
    torch.testing.assert_close(by_key_head[:, :2], query_KD[:, None].expand(-1, 2, -1))
    row_R = torch.arange(100, 150)
    found = newest_log_share(by_key_head[:, 0], seen.k_TKD, torch.arange(200), row_R, draft.rotary, 1)
    chance = newest_log_share(torch.zeros_like(query_KD), seen.k_TKD, torch.arange(200), row_R, draft.rotary, 1)
    assert (found.mean(0) > chance.mean(0)).all()


@pytest.mark.parametrize("layers", [[4], [-1], [2, 1], [1, 1]])
def test_layers_that_the_target_lacks_are_refused(layers: list[int]) -> None:
    with pytest.raises(UserError, match=r"draft.cross_layers=.*ascending order, 0 to 3"):
        LongSpecConfig(TARGET.spec, LongSpecSettings(cross_layers=layers))
