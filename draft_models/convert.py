"""``longdraft drafts import|export``: published drafts to our format and back; safetensors only."""

import argparse

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="longdraft drafts", description="Published drafts to our format and back.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, what in (("import", "a published draft as a folder that trains on and is served"), ("export", "back")):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("source", help="folder of the draft, or its safetensors file")
        command.add_argument("--format", choices=["longspec"], default="longspec", help="the published layout")
        command.add_argument("--target", required=True, help="folder or Hugging Face name of the target")
        command.add_argument("--output", required=True, help="folder to write")
    return top


def target_spec(name: str) -> TargetSpec:
    """A target's shapes from its config.

    Raises:
        UserError: no such model, or one that a draft cannot read.
    """
    from transformers import AutoConfig

    try:
        return TargetSpec.from_config(AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--target={name!r} cannot be read ({reason}): give a model folder or a Hugging Face name"
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Run the command line; raises :class:`UserError`."""
    from longdraft.draft_models.checkpoint import load_draft, save_draft
    from longdraft.draft_models.longspec import LongSpecDraft
    from longdraft.draft_models.longspec_import import export_longspec, import_longspec, published_facts

    args = parser().parse_args(argv)
    target = target_spec(args.target)
    if args.command == "import":
        draft = import_longspec(args.source, target)
        save_draft(draft, args.output, args.target, published_facts(target))
    else:
        loaded = load_draft(args.source, target)
        if not isinstance(loaded, LongSpecDraft):
            raise UserError(f"{args.source} holds no LongSpec draft: give one, or another --format")
        draft = loaded
        export_longspec(draft, args.output)
    count = sum(p.numel() for p in draft.parameters())
    print(f"{args.output}: {count:,} parameters, window {draft.config.settings.window}")
    return 0
