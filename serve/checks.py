"""Start-up checks: what cannot be served right is refused before any weight is loaded, in a line that names the remedy."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from longdraft.draft_models.checkpoint import check_draft, read_config
from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.eagle3_config import Eagle3Config, check_reach, rope_reach
from longdraft.draft_models.kinds import AnyConfig
from longdraft.draft_models.target import TargetSpec
from longdraft.draft_models.token_counts import TokenCounts
from longdraft.errors import UserError
from longdraft.serve.cache_format import CPU_BACKENDS
from longdraft.serve.draft_lm_checks import check_draft_folder, check_draft_lm, is_causal_lm
from longdraft.serve.drafters.looked import heads_that_look, wanted_heads
from longdraft.serve.rank_checks import check_heads, check_ranks
from longdraft.serve.settings import ServeSettings, read_environment
from longdraft.serve.shape_costs import CostTable
from longdraft.serve.target_layers import check_architecture
from longdraft.serve.tree_shape import TreeShape, candidates, parse_tree

# Flag of SGLang -> why it is refused. A flag counts as given when its value is truthy.
REFUSED = {
    "enable_lora": "adapters change the target under the draft",
    "lora_paths": "adapters change the target under the draft",
    "enable_dp_attention": "ranks would draft different batches",
    "enable_hierarchical_cache": "the draft reads the last layer from the device's cache pool",
    "enable_custom_logit_processor": "processors see one position a step, a verification has several",
    "enable_return_hidden_states": "a verification keeps logits only",
    "enable_return_routed_experts": "a verification keeps logits only",
    "enable_streaming_session": "a session keeps slots across requests that our reservation would hand back",
    "enable_two_batch_overlap": "verification runs one batch at a time",
    "enable_pdmux": "verification runs one batch at a time",
    "enable_hisparse": "verification reads the whole cache",
    "prefill_only_disable_kv_cache": "drafting needs the cache",
    "speculative_adaptive": "longdraft chooses its own depth",
    "dllm_algorithm": "a diffusion model has no next token",
    "quantization_param_path": "SGLang scales what it writes to the cache by it, and not what it reads",
    "skip_tokenizer_init": "stop tokens come from the tokenizer",
}
REQUIRED_ONE = {
    "pp_size": "pipeline parallelism is not supported with speculation",
    "attn_cp_size": "context parallelism is not supported with speculation",
    "speculative_eagle_topk": "branches are set by the option tree",
}

PAGE_SIZES = (1, 16)
ATTENTION = {
    "cuda": ("fa3", "flashinfer", "triton"),
    "cpu": CPU_BACKENDS,
}  # device -> SGLang's backends that are known to fit


def exit_on_user_error(check: Callable[[], object]) -> None:
    """Run a check in the launching process; what it refuses ends the process with one line and status 2."""
    try:
        check()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def check_server_args(server_args: Any) -> None:
    """Check SGLang's arguments for ``--speculative-algorithm LONGDRAFT``.

    Raises:
        UserError: the first thing that is wrong: an unsupported flag, bad settings, a target or draft that does not fit.
    """
    settings = read_environment()
    for name, reason in REFUSED.items():
        if getattr(server_args, name, None):
            raise UserError(f"--{name.replace('_', '-')} does not work with LONGDRAFT ({reason}): leave it out")
    for name, reason in REQUIRED_ONE.items():
        if (value := getattr(server_args, name, None)) not in (None, 1):
            raise UserError(f"--{name.replace('_', '-')} {value} does not work with LONGDRAFT ({reason}): use 1")
    if server_args.disaggregation_mode not in (None, "null"):
        raise UserError(
            f"--disaggregation-mode {server_args.disaggregation_mode} does not work with LONGDRAFT (draft state is not transferred): leave it out"
        )
    if (pages := getattr(server_args, "page_size", None)) not in (None, *PAGE_SIZES):
        raise UserError(
            f"--page-size {pages} does not work with LONGDRAFT (it is tested with pages of these sizes only): use {' or '.join(map(str, PAGE_SIZES))}"
        )
    _check_attention(server_args)
    _check_shape(server_args, settings)
    _check_models(server_args, settings)


def _check_attention(server_args: Any) -> None:
    """SGLang's own attention, which runs the prefill, and the format of the cache that it shares with the verification."""
    if (device := server_args.device) not in ATTENTION:
        raise UserError(f"--device {device} does not work with LONGDRAFT: use {' or '.join(ATTENTION)}")
    known = ATTENTION[device]
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if (backend := getattr(server_args, name)) not in (None, *known):
            raise UserError(
                f"--{name.replace('_', '-')} {backend} does not work with LONGDRAFT with --device {device}: "
                f"use {' or '.join(known)}"
            )
    kept, dtype = server_args.kv_cache_dtype, getattr(server_args.get_model_config(), "dtype", None)
    if kept in ("bf16", "bfloat16") and dtype != torch.bfloat16:
        raise UserError(
            f"--kv-cache-dtype {kept} does not work with LONGDRAFT for a target of {dtype} (queries and cache differ): use auto"
        )
    if kept not in ("auto", "bf16", "bfloat16", "fp8_e4m3"):
        raise UserError(
            f"--kv-cache-dtype {kept} does not work with LONGDRAFT (no kernel of the verification reads it): use fp8_e4m3 or auto"
        )
    if kept == "fp8_e4m3" and "intel_amx" in server_args.get_attention_backends():
        raise UserError(
            "--kv-cache-dtype fp8_e4m3 does not work with --attention-backend intel_amx: use --attention-backend torch_native"
        )


def _check_shape(server_args: Any, settings: ServeSettings) -> None:
    """Steps and draft tokens must be those of the chain or the tree."""
    steps, drafted = server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
    shape = parse_tree(settings.tree)
    if shape is None and steps is not None and not 1 <= steps <= 100:
        raise UserError(f"--speculative-num-steps {steps} is out of range: use 1 to 100, 2 to 6 pays")
    shapes = candidates(settings.tree, shape.depth if shape else steps or 4)
    if shapes and server_args.speculative_draft_model_path is None:
        raise UserError(f"tree={settings.tree!r} needs a draft: give one with --draft, or leave the tree out")
    if settings.tree_costs is not None:
        CostTable.load(settings.tree_costs, [each.name for each in shapes])
    if shape is not None:
        for name, value, own in (("steps", steps, shape.depth), ("draft-tokens", drafted, shape.places)):
            if value not in (None, own):
                raise UserError(
                    f"--speculative-num-{name} {value} does not fit tree={settings.tree!r}, which has {own}: leave it out"
                )
        return
    if settings.viewed:
        _check_views(server_args, settings)
        return
    chain = (steps or 4) + 1
    if drafted is not None and drafted != chain:
        raise UserError(
            f"--speculative-num-draft-tokens {drafted} does not fit --speculative-num-steps {chain - 1}: leave it out, a chain has "
            "steps + 1"
        )


def _check_views(server_args: Any, settings: ServeSettings) -> None:
    """Modes with views draft on the device, and their page lists are made there."""
    folder = server_args.speculative_draft_model_path
    if settings.self_draft == (folder is not None):
        remedy = "leave one of them out" if settings.self_draft else "give one with --draft, or set self_draft"
        has = "a draft and self_draft" if settings.self_draft else "no draft"
        raise UserError(f"mode={settings.mode!r} has {has}: {remedy}")
    chain = 1 if settings.self_draft else (server_args.speculative_num_steps or 4) + 1
    if settings.pending < chain:
        raise UserError(
            f"pending={settings.pending} has no room for one partial round, which gains up to {chain} tokens: write {chain} or more"
        )
    if server_args.device == "cuda" and settings.attention in ("flashinfer", "torch"):
        raise UserError(
            f"attention={settings.attention!r} plans on the host, which mode={settings.mode!r} does not wait for: use fa3, triton or auto"
        )
    if server_args.speculative_num_draft_tokens is not None:
        raise UserError(
            f"--speculative-num-draft-tokens {server_args.speculative_num_draft_tokens} does not fit mode={settings.mode!r}, which "
            "sets it from the steps and pending: leave it out"
        )


def _check_models(server_args: Any, settings: ServeSettings) -> None:
    folder = server_args.speculative_draft_model_path
    if folder is not None:
        # Before SGLang parses the same file with a worse message.
        check_draft_folder(folder, getattr(server_args, "trust_remote_code", False))
    model = server_args.get_model_config()
    check_architecture(model)
    text = model.hf_text_config
    shape = parse_tree(settings.tree)
    steps = shape.depth if shape else server_args.speculative_num_steps or 4
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    if rope.get("rope_type", rope.get("type")) == "yarn":
        covered = rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1.0)
        if covered < model.context_len + steps + 1:
            raise UserError(
                f"--context-length {model.context_len} passes what the target's YaRN covers ({covered:.0f} positions with {steps + 1} "
                f"draft tokens): use at most {int(covered) - steps - 1}"
            )
    _check_history(settings, text)
    if server_args.tp_size > 1:
        check_heads(server_args.tp_size, text, "target")
    if folder is None:
        if settings.draft_head_tokens is not None:
            raise UserError("draft_head_tokens is for LongSpec drafts: give one with --draft, or leave it out")
        return
    if is_causal_lm(folder):
        check_draft_lm(server_args, settings, folder)
        return
    target = TargetSpec.from_config(text)
    own = check_draft(folder, read_config(folder), target).config
    _check_head(own, target, settings)
    if isinstance(own, LongSpecConfig):
        query_heads = target.num_kv_heads * own.cross_group
        check_ranks(server_args.tp_size, query_heads, target.num_kv_heads, "draft's cross-attention")
    recipe = settings.recipe() if settings.sets else None
    if recipe is not None:
        wanted_heads(recipe.draft, *heads_that_look(own))
    for each in candidates(settings.tree, steps):
        _check_tree(own, target, settings, each)
    if isinstance(own, Eagle3Config):
        # A request ends within the context, so drafts pass it only in a batch's padding; a stretched rotation is held to more.
        beyond = 0 if rope_reach(own.rope) is None else steps + 1
        try:
            check_reach(own, model.context_len, beyond)
        except UserError as error:
            raise UserError(f"draft folder {folder}: {error} (--context-length {model.context_len})") from None


def _check_history(settings: ServeSettings, text: Any) -> None:
    """A recipe's layer and heads of the target, whose attention chooses sets of tokens."""
    recipe = settings.recipe() if settings.sets else None
    if recipe is None:
        return
    layers, heads, own = text.num_hidden_layers, text.num_attention_heads, recipe.target
    if own.layer >= layers:
        raise UserError(
            f"sparse_recipe={settings.sparse_recipe!r}: the target has {layers} layers, not layer {own.layer}: calibrate with this target"
        )
    if max(own.heads) >= heads:
        raise UserError(
            f"sparse_recipe={settings.sparse_recipe!r}: the target has {heads} query heads a layer, not head {max(own.heads)}: "
            "calibrate with this target"
        )


def _check_tree(own: AnyConfig, target: TargetSpec, settings: ServeSettings, shape: TreeShape) -> None:
    """A tree that the draft cannot grow would be drafted never."""
    if isinstance(own, LongSpecConfig):
        tokens = own.settings.head_tokens or settings.draft_head_tokens or target.vocab_size
        if shape.depth > own.settings.window:
            raise UserError(
                f"tree={settings.tree!r} is {shape.depth} deep, the draft's window holds {own.settings.window} tokens: make it flatter"
            )
    else:
        tokens = own.vocab_size
    if shape.widest > tokens:
        raise UserError(
            f"tree={settings.tree!r} takes {shape.widest} tokens at once, the draft knows {tokens}: make it narrower"
        )


def _check_head(own: AnyConfig, target: TargetSpec, settings: ServeSettings) -> None:
    """What ``draft_head_tokens`` needs: a LongSpec draft without a ranked head, and counts of this target."""
    if settings.draft_head_tokens is None or settings.draft_head_counts is None:
        return
    if not isinstance(own, LongSpecConfig):
        raise UserError(
            "draft_head_tokens is for LongSpec drafts, an EAGLE-3 draft has a head of its own: leave it out"
        )
    if own.settings.head_tokens is not None:
        raise UserError(
            f"draft_head_tokens={settings.draft_head_tokens}: the draft has a ranked head of {own.settings.head_tokens} tokens of its "
            "own: leave it out"
        )
    TokenCounts.load(settings.draft_head_counts, target.vocab_size).top(settings.draft_head_tokens)
