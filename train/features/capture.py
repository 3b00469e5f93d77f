"""longdraft capture --config RECIPE --out DIR [--plan] [--yes] [a.b=VALUE ...]

Runs the frozen target over a recipe's documents once and stores what its draft reads, so that training needs no target pass:
``data.source=features data.features=DIR``. Prints the size first. The same command continues a stopped capture with the
first missing shard; under torchrun every rank writes its share of the shards.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Corpus
from longdraft.train.features.format import INDEX, ROWS, Index, Place, aux_layers, shard_is_whole, write_shard
from longdraft.train.features.plan import check_size, make_index, size_text
from longdraft.train.loop import position_limit
from longdraft.train.provenance import origin
from longdraft.train.recipe_files import find_config, resolve_data_paths
from longdraft.train.samples import SampleStream
from longdraft.train.target import LAST, FrozenTarget, load_config, load_target, load_tokenizer, resolve_dtype

Say = Callable[[str], None]


def capture(
    settings: TrainSettings, folder: Path, command: list[str], say: Say, plan: bool = False, agreed: bool = False
) -> Index:
    """Store the features of a recipe's documents.

    Args:
        settings: the recipe.
        folder: made if missing; one that holds a part of the same store is completed.
        command: for the record.
        say: told sizes and progress.
        plan: only say the size.
        agreed: whatever the size is.

    Raises:
        UserError: a folder of another store, a store that is too large, and whatever the recipe has wrong.
    """
    if settings.data.source != "online":
        raise UserError(f"data.source={settings.data.source!r}: a capture runs the target, use online")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(settings)
    spec = TargetSpec.from_config(load_config(settings.target))
    corpus = Corpus(settings.data.train, settings.data, load_tokenizer(settings.target), spec.vocab_size)
    stream = SampleStream(corpus, settings, position_limit(settings, spec.max_position))
    dtype = str(resolve_dtype(settings.target.dtype, device)).removeprefix("torch.")
    index = make_index(settings, spec, corpus, stream, dtype, origin(command))
    _check_folder(folder, index)
    missing = [shard for shard in range(index.shards) if not shard_is_whole(folder, index, shard)]
    left = sum(p.length for p in index.places if p.shard in set(missing))
    if rank == 0:
        say(size_text(index))
        if len(missing) < index.shards:
            say(f"{index.shards - len(missing)} shards are there, {left:,} tokens are left")
    check_size(index, folder, settings.features.max_gib, agreed, left)
    if plan:
        return index
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            index.write(folder)
    except OSError as error:
        raise UserError(f"--out {str(folder)!r} cannot be written ({error.strerror}): choose another folder") from None
    # By number, not by place among the missing: ranks look at different moments.
    if mine := [shard for shard in missing if shard % world == rank]:
        _run(settings, folder, index, stream, load_target(settings.target, device), mine, say)
    return index


def _device(settings: TrainSettings) -> torch.device:
    if settings.engine.device == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device='cuda' but torch sees no GPU: use engine.device=cpu")
    cuda = settings.engine.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")


def _check_folder(folder: Path, index: Index) -> None:
    if not (folder / INDEX).exists():
        return
    then, now = Index.read(folder), index
    for key in sorted(then.identity.keys() | now.identity.keys()):
        if then.identity.get(key) != now.identity.get(key):
            raise UserError(
                f"{key}={now.identity.get(key)!r}, but --out {str(folder)!r} was captured with {then.identity.get(key)!r}: "
                "give another folder, or the former value"
            )
    if then.digest != now.digest:
        raise UserError(
            f"--out {str(folder)!r} has another dtype, features.store or features.shard_gib: give another folder"
        )


def _run(
    settings: TrainSettings,
    folder: Path,
    index: Index,
    stream: SampleStream,
    target: FrozenTarget,
    shards: list[int],
    say: Say,
) -> None:
    for done, shard in enumerate(shards, 1):
        began = time.monotonic()
        places = [p for p in index.places if p.shard == shard]
        write_shard(folder, index, shard, _shard(settings, index, stream, target, places))
        seconds, tokens = time.monotonic() - began, sum(p.length for p in places)
        say(f"{index.shard_name(shard)} ({done} of {len(shards)}): {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s")


def _shard(
    settings: TrainSettings, index: Index, stream: SampleStream, target: FrozenTarget, places: list[Place]
) -> dict[str, torch.Tensor]:
    """Every tensor of a shard. Documents go through the target in groups of about ``target.max_batch_tokens``."""
    rows, dtype = sum(p.length for p in places), getattr(torch, index.dtype)
    out = {name: torch.empty(rows, dtype=kind) for name, kind in ROWS.items()}
    out |= {name: torch.empty(rows, *shape, dtype=dtype) for name, shape in index.tensors.items()}
    names = settings.stored_features
    layers = aux_layers(settings, target.spec) if "aux" in names else []
    kv_layers = (settings.draft.cross_layers or LAST) if "kv" in names else ()
    for group in _groups(places, target.max_batch_tokens):
        drawn = [stream.drawn(p.variant, p.document) for p in group]
        found = [d for d in drawn if d is not None]
        assert [len(d.document.ids) for d in found] == [p.length for p in group], "a document changed under the capture"
        span = slice(group[0].begin, group[-1].begin + group[-1].length)
        id_T = torch.tensor([token for d in found for token in d.document.ids])
        position_T = torch.cat([d.position_L for d in found])
        out["input_ids"][span], out["position_ids"][span] = id_T, position_T
        out["loss_mask"][span] = torch.tensor([kept for d in found for kept in d.document.supervised])
        cu = [0]
        for place in group:
            cu.append(cu[-1] + place.length)
        device = target.device
        seen = target.capture(id_T.to(device), position_T.to(device), cu, "hidden" in names, layers, kv_layers)
        for name in index.tensors:
            out[name][span] = seen.tensors[name].to("cpu")
    return out


def _groups(places: list[Place], limit: int) -> list[list[Place]]:
    groups: list[list[Place]] = []
    filled = 0
    for place in places:
        if groups and filled + place.length <= limit:
            groups[-1].append(place)
        else:
            groups.append([place])
            filled = 0
        filled += place.length
    return groups


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="longdraft capture", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--config", help="YAML recipe")
    parser.add_argument("--out", required=True, help="folder for index.json and the shards")
    parser.add_argument("--plan", action="store_true", help="print the size; store nothing")
    parser.add_argument("--yes", action="store_true", help="store more than features.max_gib")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace the recipe's")
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_intermixed_args(words)
    recipe = find_config(args.config) if args.config else None
    settings = load_settings(TrainSettings, recipe, args.overrides)
    resolve_data_paths(settings, recipe)
    command = ["longdraft", "capture", *words]
    capture(settings, Path(args.out), command, lambda text: print(text, flush=True), args.plan, args.yes)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:  # torchrun runs this file itself
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
