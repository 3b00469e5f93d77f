"""LongSpec's published drafts: their layer's names, biases and window to our format and back.

The public checkpoints hold one bare decoder layer: biased q, k and v projections, a flash window of (512, -1) under a causal
mask, no final norm, and key and value projections in the cross-attention that nothing reads (LongSpec, section 3.1 and its
released training code). Legend: E hidden size, H query heads, K key/value heads, D head size.
"""

from pathlib import Path
from typing import Any

import torch

from longdraft.draft_models.checkpoint import CheckpointError
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings, TrainingFacts
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.published import published_weights, write_published
from longdraft.draft_models.target import TargetSpec
from longdraft.draft_models.windows import from_flash

WINDOW = from_flash((512, -1))
TRAINED_LAGS, TRAINED_ANCHORS, TRAINED_LENGTH = (
    4,
    4,
    32768,
)  # of the published recipe; positions beyond it are untrained
OURS_TO_THEIRS = {
    "self_norm.weight": "input_layernorm.weight",
    "cross_norm.weight": "post_self_attention_layernorm.weight",
    "mlp_norm.weight": "post_cross_attention_layernorm.weight",
}
UNUSED = tuple(f"cross_attn.{which}_proj.{kind}" for which in "kv" for kind in ("weight", "bias"))
PREFIXES = ("draft_model.", "glide.", "model.")  # a whole training state, the test code's attribute, transformers' base
LAYERS = {"qwen2": "Qwen2GlideDecoderLayer"}  # any other family: the Llama class


def import_longspec(source: str | Path, target: TargetSpec) -> LongSpecDraft:
    """Read a published draft for its target.

    Args:
        source: a folder with ``model.safetensors`` or its shards and index, or one safetensors file.
        target: the target that the draft was trained for; it decides every size and the rotary embedding.

    Returns:
        The draft in the stored dtype, not yet bound to the target's embedding and head.

    Raises:
        CheckpointError: no safetensors, or a missing, unknown or mis-shaped weight.
    """
    found = _layer(published_weights(Path(source)), source)
    settings = LongSpecSettings(window=WINDOW, qkv_bias=True, cross_q_norm=False)
    with torch.device("meta"):
        shell = LongSpecDraft(LongSpecConfig(target, settings))
    wanted = {OURS_TO_THEIRS.get(name, name): name for name in shell.state_dict()}
    if missing := wanted.keys() - found.keys():
        raise CheckpointError(
            f"{source} misses weights {', '.join(sorted(missing))}: give a published LongSpec draft (a GliDe layer)"
        )
    if unknown := found.keys() - wanted.keys() - set(UNUSED):
        raise CheckpointError(
            f"{source} has unknown weights {', '.join(sorted(unknown))}: give a published LongSpec draft (a GliDe layer)"
        )
    ours = {wanted[name]: weight for name, weight in found.items() if name in wanted}
    for name, want in shell.state_dict().items():
        if ours[name].shape != want.shape:
            raise CheckpointError(
                f"{source}: {OURS_TO_THEIRS.get(name, name)} is {tuple(ours[name].shape)}, the target makes it "
                f"{tuple(want.shape)}: use the target that the draft was trained for"
            )
    draft = LongSpecDraft(shell.config)
    draft.load_state_dict(ours)
    frequencies = draft.rotary.inverse
    draft = draft.to(ours["self_attn.q_proj.weight"].dtype)
    draft.rotary.inverse = frequencies  # a cast to 16 bit would bend far positions
    return draft.eval()


def published_facts(target: TargetSpec) -> TrainingFacts:
    """How the published drafts were trained: lags 1 to 4, up to 4 anchors, 32K tokens (LongSpec, section 4.1)."""
    length = min(TRAINED_LENGTH, target.max_position)
    return TrainingFacts(max_length=length, max_position=length, anchors=TRAINED_ANCHORS, max_lag=TRAINED_LAGS)


def export_longspec(draft: LongSpecDraft, folder: str | Path) -> None:
    """Write our draft as the released code's ``from_pretrained`` loads it; the unused projections are zeros.

    Args:
        draft: any dtype.
        folder: a new or empty folder; both files appear whole.

    Raises:
        CheckpointError: a draft that the released layer cannot hold, or a folder with something in it.
    """
    _refuse_unlike(draft)
    t = draft.config.target
    weights = {OURS_TO_THEIRS.get(n, n): w.detach().cpu().contiguous() for n, w in draft.state_dict().items()}
    like = weights["self_attn.k_proj.weight"]
    for attention in ("self_attn", "cross_attn"):
        for which, size in (("q", t.num_heads), ("k", t.num_kv_heads), ("v", t.num_kv_heads)):
            name = f"{attention}.{which}_proj"
            weights.setdefault(f"{name}.weight", like.new_zeros(size * t.head_dim, t.hidden_size))
            weights.setdefault(f"{name}.bias", like.new_zeros(size * t.head_dim))
    write_published(folder, weights, _their_config(t, like.dtype))


def _refuse_unlike(draft: LongSpecDraft) -> None:
    s, t = draft.config.settings, draft.config.target
    checks = {
        f"window={s.window}": s.window == WINDOW,
        "final_norm=True": not s.final_norm,
        "cross_q_norm=True": not draft.config.cross_q_norm,
        f"head_tokens={s.head_tokens}": s.head_tokens is None,
        f"cross_layers={s.cross_layers}": not s.cross_layers,
        f"cross_group={s.cross_group}": s.cross_group is None,
        f"newest_lags={s.newest_lags}": not s.newest_lags,
        f"head_dim={t.head_dim}": t.head_dim * t.num_heads == t.hidden_size,
    }
    if wrong := [name for name, fits in checks.items() if not fits]:
        raise CheckpointError(
            f"{', '.join(wrong)} does not exist in LongSpec's released layer (window {WINDOW}, no such norms, whole "
            "vocabulary, the last layer alone read by as many heads as the target has, heads as wide as the hidden size): train such a draft, or keep our format"
        )


def _their_config(t: TargetSpec, dtype: torch.dtype) -> dict[str, Any]:
    family = "qwen2" if t.model_type == "qwen2" else "llama"
    return {
        "architectures": [LAYERS.get(family, "LlamaGlideDecoderLayer")],
        "model_type": family,
        "hidden_size": t.hidden_size,
        "intermediate_size": t.intermediate_size,
        "num_hidden_layers": t.num_layers,
        "num_attention_heads": t.num_heads,
        "num_key_value_heads": t.num_kv_heads,
        "vocab_size": t.vocab_size,
        "max_position_embeddings": t.max_position,
        "rms_norm_eps": t.rms_norm_eps,
        "hidden_act": t.hidden_act,
        "rope_theta": t.rope["rope_theta"],
        "rope_scaling": None if t.rope["rope_type"] == "default" else t.rope,
        "tie_word_embeddings": t.tie_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _layer(weights: dict[str, torch.Tensor], source: str | Path) -> dict[str, torch.Tensor]:
    """The draft's own tensors under bare names; of a training state, without the target's."""
    for prefix in PREFIXES:
        inner = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        if "self_attn.q_proj.weight" in inner:
            weights = inner
            break
    # Rotary frequencies are the target's; older transformers stored them with a layer.
    return {n: w for n, w in weights.items() if not n.endswith("rotary_emb.inv_freq")}
