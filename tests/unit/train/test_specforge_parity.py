"""SpecForge's own EAGLE-3 step, run from the installed package, against what it is documented to compute.

Legend: B samples, S tokens, E hidden size, V target vocabulary, N draft vocabulary, K steps of the training-time test.
"""

import pytest
import torch
from specforge_harness import SpecForgeStep, specforge_step
from torch.nn.functional import pad

from longdraft.train.vocabulary import VocabularyMap

E, V, N, S, K, B = 32, 96, 40, 24, 3, 2
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": E,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "draft_vocab_size": N,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def random_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    layer, wide = "midlayer", 2 * E
    shapes = {
        "fc.weight": (E, 3 * E),
        "lm_head.weight": (N, E),
        "embed_tokens.weight": (V, E),
        f"{layer}.self_attn.q_proj.weight": (32, wide),
        f"{layer}.self_attn.k_proj.weight": (16, wide),
        f"{layer}.self_attn.v_proj.weight": (16, wide),
        f"{layer}.self_attn.o_proj.weight": (E, 32),
        f"{layer}.mlp.gate_proj.weight": (48, E),
        f"{layer}.mlp.up_proj.weight": (48, E),
        f"{layer}.mlp.down_proj.weight": (E, 48),
    }
    out = {name: 0.2 * torch.randn(shape, generator=g) for name, shape in shapes.items()}
    for name in ("norm", f"{layer}.hidden_norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
        out[f"{name}.weight"] = 1 + 0.1 * torch.randn(E, generator=g)
    ids = torch.randperm(V, generator=g)[:N].sort().values
    vocabulary = VocabularyMap.of(ids, V)
    return out | {"d2t": vocabulary.d2t_N, "t2d": vocabulary.t2d_V}


def random_batch(seed: int = 1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(B, S, dtype=torch.int64)
    mask[0, 7:20], mask[1, 3:9], mask[1, 15:23] = 1, 1, 1
    return {
        "input_ids": torch.randint(0, V, (B, S), generator=g),
        "loss_mask": mask,
        "hidden_state": torch.randn(B, S, 3 * E, generator=g),
        "target": torch.randn(B, S, E, generator=g),
        "head": 0.5 * torch.randn(V, E, generator=g),
    }


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> SpecForgeStep:
    return specforge_step(tmp_path_factory.mktemp("specforge"), CONFIG, random_weights(), random_batch(), K)


def test_its_loss_is_soft_cross_entropy_over_the_draft_vocabulary_and_a_mean_over_all_rows(step: SpecForgeStep) -> None:
    weights, batch = random_weights(), random_batch()
    teacher_BSV = pad(batch["target"], (0, 0, -1, 1)) @ batch["head"].t()  # it shifts ids and targets, not the mask
    p_BSN = teacher_BSV[..., weights["t2d"]].softmax(-1)
    counts_BS = batch["loss_mask"] * weights["t2d"][teacher_BSV.argmax(-1)]
    for k in range(K):
        shifted_p, shifted_rows = pad(p_BSN, (0, 0, -k, k)), pad(counts_BS, (-k, k))
        cross_BS = -(shifted_p * step.logits_KBSN[k].log_softmax(-1)).sum(-1)
        torch.testing.assert_close(step.ploss_K[k], (cross_BS * shifted_rows).sum() / (B * S), atol=1e-6, rtol=1e-5)
    weighted = sum(0.8**k * step.ploss_K[k] for k in range(K))
    torch.testing.assert_close(step.loss, weighted, atol=1e-6, rtol=1e-6)


def test_every_trained_weight_got_a_gradient(step: SpecForgeStep) -> None:
    assert step.grads.keys() == random_weights().keys() - {"embed_tokens.weight", "d2t", "t2d"}
    assert all(float(g.abs().max()) > 0 for g in step.grads.values())
