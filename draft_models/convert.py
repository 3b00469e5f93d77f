"""``longdraft drafts import|export|recipe``: published drafts to our format and back, and a draft JSON as a recipe's section."""

import argparse
from typing import TYPE_CHECKING

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError

if TYPE_CHECKING:
    from longdraft.draft_models.kinds import AnyDraft


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="longdraft drafts", description="Published drafts to our format and back.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, what in (
        ("import", "write a published draft as a folder that trains on (draft.init_from) and is served (--draft)"),
        ("export", "write a draft of ours in the published layout, for its authors' code or SGLang's stock EAGLE3"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("source", help="folder of the draft, or its safetensors file")
        command.add_argument(
            "--format",
            choices=["longspec", "eagle3"],
            default="longspec",
            help="the published layout (default: longspec)",
        )
        command.add_argument("--target", required=True, help="folder or Hugging Face name of the target")
        command.add_argument("--output", required=True, help="folder to write")
    recipe = commands.add_parser("recipe", help="a SpecForge draft JSON as the section of a recipe, printed")
    recipe.add_argument("source", help="the JSON, or a folder with config.json")
    recipe.add_argument("--target", required=True, help="folder or Hugging Face name of the target")
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
    args = parser().parse_args(argv)
    target = target_spec(args.target)
    if args.command == "recipe":
        from longdraft.draft_models.eagle3_json import recipe_section, settings_of_json

        print(recipe_section(settings_of_json(args.source, target)), end="")
        return 0
    draft = (_import if args.command == "import" else _export)(args, target)
    count = sum(p.numel() for p in draft.parameters())
    window = draft.config.settings.window or "none"
    print(f"{args.output}: {count:,} parameters, window {window}")
    return 0


def _import(args: argparse.Namespace, target: TargetSpec) -> "AnyDraft":
    from longdraft.draft_models.checkpoint import save_draft
    from longdraft.draft_models.eagle3_import import import_eagle3
    from longdraft.draft_models.longspec_import import import_longspec, published_facts

    if args.format == "longspec":
        longspec = import_longspec(args.source, target)
        save_draft(longspec, args.output, args.target, published_facts(target))
        return longspec
    eagle3 = import_eagle3(args.source, target)
    save_draft(eagle3, args.output, args.target)
    return eagle3


def _export(args: argparse.Namespace, target: TargetSpec) -> "AnyDraft":
    from longdraft.draft_models.checkpoint import load_draft
    from longdraft.draft_models.eagle3_import import export_eagle3
    from longdraft.draft_models.longspec import LongSpecDraft
    from longdraft.draft_models.longspec_import import export_longspec

    draft = load_draft(args.source, target)
    if draft.config.kind != args.format:
        raise UserError(f"{args.source} holds a draft of kind {draft.config.kind!r}: use --format {draft.config.kind}")
    if isinstance(draft, LongSpecDraft):
        export_longspec(draft, args.output)
    else:
        export_eagle3(draft, args.output)
    return draft
