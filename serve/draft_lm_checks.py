"""Start-up checks of a causal language model that is given as the draft: it must be one that SGLang runs, and speak the target's tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from longdraft.draft_models.checkpoint import CONFIG, read_config
from longdraft.errors import UserError, shown
from longdraft.serve.drafters.looked import wanted_heads
from longdraft.serve.rank_checks import check_heads
from longdraft.serve.settings import ServeSettings
from longdraft.serve.target_layers import check_architecture
from longdraft.serve.tree_shape import CHAIN

LM = "ForCausalLM"  # how transformers ends the names of these architectures, and of no speculation head
INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = "*.bin", "*.pt", "*.gguf"
FILES = "tokenizer*", "vocab*", "*.tiktoken"


def is_causal_lm(folder: str | Path) -> bool:
    """Whether a folder holds a causal language model of transformers, by its config; drafts of ours say what they are themselves."""
    try:
        config = json.loads((Path(folder) / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict) or "longdraft" in config:
        return False
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith(LM)


def check_draft_folder(folder: str, trust_remote_code: bool = False) -> None:
    """What SGLang would say less clearly where it parses the folder first.

    Raises:
        UserError: neither a draft of ours nor a causal language model, or one whose config transformers refuses.
    """
    if is_causal_lm(folder):
        read_lm_config(folder, trust_remote_code)
    else:
        read_config(folder)


def read_lm_config(folder: str, trust_remote_code: bool) -> Any:
    """A causal language model's config as SGLang reads it; raises :class:`UserError` where that fails."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    try:
        return get_config(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers has many
        reason = " ".join(str(error).split())
        raise UserError(f"draft folder {folder}: {CONFIG} cannot be read ({reason}): give another draft") from None


def check_draft_lm(server_args: Any, settings: ServeSettings, folder: str) -> None:
    """Check a causal language model as the draft of a server.

    Args:
        server_args: SGLang's arguments.
        settings: ours.
        folder: the draft's, one that :func:`is_causal_lm`.

    Raises:
        UserError: trees, a ranked head, fewer positions than the server's context, an architecture that SGLang runs as something
            else or that LONGDRAFT's attention does not compute, layers and heads of a recipe that it has not, weights that are
            not whole, or another tokenizer than the target's.
    """
    if settings.tree != CHAIN:
        raise UserError(f"tree={settings.tree!r}: a language model as the draft drafts chains: leave the tree out")
    if settings.draft_head_tokens is not None:
        raise UserError(
            "draft_head_tokens is for LongSpec drafts, a language model has a head of its own: leave it out"
        )
    text = _check_model(server_args, folder)
    if server_args.tp_size > 1:
        check_heads(server_args.tp_size, text, "draft")
    if (recipe := settings.recipe() if settings.sets else None) is not None:
        have = dict.fromkeys(range(text.num_hidden_layers), text.num_attention_heads)
        wanted_heads(recipe.draft, "the draft model", have)
    _check_weights(server_args, folder)
    target, draft = (
        token_names(server_args, path, whose)
        for path, whose in ((server_args.tokenizer_path, "the target's"), (folder, f"draft folder {folder}: its"))
    )
    check_vocabulary(target, draft, folder)


def _check_model(server_args: Any, folder: str) -> Any:
    """The draft's text config."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.hf_transformers_utils import get_context_length, get_hf_text_config

    config = read_lm_config(folder, server_args.trust_remote_code)
    text = get_hf_text_config(config)
    named, reach = config.architectures[0], get_context_length(text)
    context = server_args.get_model_config().context_len
    if reach < context:
        raise UserError(
            f"draft folder {folder}: max_position_embeddings={reach}, the server's context has {context} positions: use "
            f"--context-length {reach} or less, or another draft"
        )
    model = ModelConfig.from_server_args(server_args, model_path=folder, is_draft_model=True)
    if (run := model.hf_config.architectures[0]) != named:
        raise UserError(f"draft folder {folder}: SGLang runs a {named} draft as {run}: give another draft")
    check_architecture(model, "draft")
    return text


def _check_weights(server_args: Any, folder: str) -> None:
    """By the files' headers, which a copy that was broken off does not fit."""
    if "dummy" in (server_args.load_format, server_args.speculative_draft_load_format):
        return
    named = set[str]()
    try:
        if (index := Path(folder) / INDEX).is_file():
            named = set(json.loads(index.read_text())["weight_map"].values())
        files = sorted({*(Path(folder) / name for name in named), *Path(folder).glob("*.safetensors")})
        for file in files:
            with safe_open(file, "pt") as opened:
                opened.keys()
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise UserError(f"draft folder {folder}: weights cannot be read ({error}): fetch them again") from None
    if not files and not any(file for name in OTHER_WEIGHTS for file in Path(folder).glob(name)):
        raise UserError(f"draft folder {folder} has no weights: put them there, model.safetensors for one")


def token_names(server_args: Any, path: str, whose: str) -> dict[int, str]:
    """The tokens of a tokenizer, by id.

    Raises:
        UserError: a folder without one.
    """
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    try:
        if Path(path).is_dir() and not any(file for name in FILES for file in Path(path).glob(name)):
            raise ValueError("the folder has none")  # transformers would make one up
        tokenizer = get_tokenizer(
            path,
            tokenizer_mode=server_args.tokenizer_mode,
            trust_remote_code=server_args.trust_remote_code,
            tokenizer_revision=server_args.revision,
        )
        return {int(number): str(token) for token, number in tokenizer.get_vocab().items()}
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{whose} tokenizer cannot be read ({reason}), and a language model drafts only with the target's: put its files there"
        ) from None


def check_vocabulary(target: Mapping[int, str], draft: Mapping[int, str], folder: str) -> None:
    """Compare the tokens that both have. One of them may have more behind these, and any padding: what the target has not is not proposed.

    Args:
        target, draft: tokens by id.
        folder: the draft's, for the message.

    Raises:
        UserError: the first id with another token, and how many there are.
    """
    shared = range(min(max(target, default=-1), max(draft, default=-1)) + 1)
    other = [number for number in shared if target.get(number) != draft.get(number)]
    if not shared or other:
        first = other[0] if other else 0
        raise UserError(
            f"draft folder {folder}: token {first} of its tokenizer is {shown(draft.get(first))}, of the target's "
            f"{shown(target.get(first))} ({len(other)} of {len(shared)} differ): give a draft that has the target's tokenizer"
        )
