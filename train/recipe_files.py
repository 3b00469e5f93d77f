"""Where recipes lie, and the data files beside them."""

from pathlib import Path

from longdraft.errors import UserError
from longdraft.train.config import TrainSettings, as_list


def shipped(path: str) -> Path:
    """Where a file of ours lies in an installed package or in a checkout."""
    import longdraft

    return Path(longdraft.__file__).parent / path


def find_config(path: str) -> Path:
    """A recipe by its path from here, or the installed one of that path (``recipes/…``).

    Raises:
        UserError: neither exists.
    """
    for candidate in (Path(path), shipped(path)):
        if candidate.is_file():
            return candidate
    raise UserError(f"config {path!r} does not exist: give a YAML file, such as recipes/smoke/longspec.yaml")


def resolve_data_paths(settings: TrainSettings, recipe: Path | None) -> None:
    """Let data files lie beside the recipe: a name that is no file here, but is one there, becomes that one."""
    if recipe is None:
        return

    def resolve(name: str) -> str:
        beside = recipe.parent / name
        return str(beside) if not Path(name).exists() and beside.exists() else name

    settings.data.train = [resolve(name) for name in as_list(settings.data.train)]
    if settings.data.eval is not None:
        settings.data.eval = [resolve(name) for name in as_list(settings.data.eval)]
