"""longdraft induction --target.path TARGET --data.train TEXT.jsonl

Which layers of a target a cross-attention draft can copy from: ``draft.cross_layers``. What a model says next stands often in its
context already, behind an earlier occurrence of the same words. Some layers have heads that look there (induction heads: Olsson et
al., 2022); their keys hold which token came before a position, their values which one stands at it, so that a draft's own queries
find it in their cache. A last layer, which LongSpec reads, need not have one.

For each head: the share of rows at which the key with the most attention (but for the first four, which attract it, and the row's own)
stands at a token that is the target's next choice.

Legend: L tokens, R rows, S layers, H query heads, K key/value heads.
"""

import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from pydantic import Field

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import Settings
from longdraft.train.config import DataSettings, TargetSettings
from longdraft.train.documents import Corpus
from longdraft.train.target import load_config, load_model, load_tokenizer, resolve_dtype

SINKS = 4
SHOWN = 12


class InductionSettings(Settings):
    """Find the layers of a target whose cache a draft can copy from."""

    target: TargetSettings
    data: DataSettings
    documents: int = Field(4, ge=1, description="documents that are read, from the front")
    tokens: int = Field(
        1024, ge=64, description="first tokens of each that are read; the second half are the rows that count"
    )
    layers: int = Field(2, ge=1, description="layers to name")


@torch.no_grad()
def copy_share(model: Any, id_L: torch.Tensor, first: int) -> torch.Tensor:
    """Share of the rows from ``first`` on at which a head's favourite key stands at the target's choice, float32 ``[S, H]``.

    Args:
        model: a transformers causal language model that gives its attention away (``eager``).
        id_L: one document.
        first: above the number of sinks.
    """
    out = model(id_L[None], output_attentions=True, use_cache=False)
    row_R = torch.arange(first, len(id_L), device=id_L.device)
    choice_R = out.logits[0, first:].argmax(-1)
    shares = []
    for attention in out.attentions:
        mass_HRL = attention[0][:, first:].clone()
        mass_HRL[:, :, :SINKS] = 0
        mass_HRL[:, row_R - first, row_R] = 0
        shares.append((id_L[mass_HRL.argmax(-1)] == choice_R).float().mean(1))
    return torch.stack(shares)


def measure(settings: InductionSettings) -> torch.Tensor:
    """Mean share over documents by layer and key head, of the best query head of each, ``[S, K]``.

    Raises:
        UserError: data without a document of that length.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec, tokenizer = TargetSpec.from_config(load_config(settings.target)), load_tokenizer(settings.target)
    corpus = Corpus(settings.data.train, settings.data, tokenizer, spec.vocab_size)
    found = (torch.tensor(corpus[i].ids[: settings.tokens]) for i in range(len(corpus)))
    texts = list(islice((ids for ids in found if len(ids) == settings.tokens), settings.documents))
    if not texts:
        raise UserError(f"data.train={settings.data.train!r} has no document of tokens={settings.tokens}: lower it")
    eager = settings.target.model_copy(update={"attn": "eager"})
    model = load_model(eager, resolve_dtype(settings.target.dtype, device)).to(device).eval()
    total_SH = sum(copy_share(model, ids.to(device), settings.tokens // 2) for ids in texts)
    assert isinstance(total_SH, torch.Tensor)
    return (total_SH / len(texts)).unflatten(1, (spec.num_kv_heads, -1)).amax(2).cpu()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    from longdraft.options import parse_all

    settings = parse_all(InductionSettings, list(sys.argv[1:] if argv is None else argv), "longdraft induction")
    share_SK = measure(settings)
    heads = share_SK.shape[1]
    print("layer  key head  rows at which it looks at the target's next token")
    for at in share_SK.flatten().argsort(descending=True)[:SHOWN].tolist():
        print(f"{at // heads:5}  {at % heads:8}  {share_SK[at // heads, at % heads]:.1%}")
    best = sorted(share_SK.amax(1).argsort(descending=True)[: settings.layers].tolist())
    print(f"draft.cross_layers={best}".replace(" ", ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
