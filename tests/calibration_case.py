"""A small calibration of tiny random models: its command line, documents, and drafts of every kind."""

import json
from pathlib import Path

from tiny import tiny_draft, tiny_eagle3, tiny_model, tiny_target

from longdraft.draft_models.checkpoint import save_draft


def write_documents(path: Path) -> Path:
    """Five texts of letters that differ, one of them too short to be traced."""
    texts = [f"Day {n} was dry. {'abcdefgh'[n] * 3} rained on day {n * n}! " * (3 if n == 4 else 14) for n in range(5)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def small_words(documents: Path, out: Path) -> list[str]:
    """Four questions, three texts of four verifications, sets of 40 tokens."""
    found = ["--target.path", "tiny-random:llama:3", "--documents", str(documents), "--out", str(out)]
    found += ["--needles.lengths", "[360]", "--needles.depths", "2", "--needles.haystacks", "1", "--needles.count", "2"]
    found += ["--needles.new-tokens", "4", "--heads", "2", "--traces.documents", "3", "--traces.tokens", "120"]
    return [*found, "--traces.windows", "4", "--search.budget", "40", "--search.step", "4", "--search.trials", "8"]


def write_drafts(folder: Path) -> dict[str, str]:
    """Folders by kind: ``longspec`` and ``model`` fit a target of three layers, ``eagle3`` one of four."""
    target = tiny_target("llama", num_hidden_layers=3)
    save_draft(tiny_draft(target, window=16, cross_layers=[0, 2]), folder / "longspec", "tiny")
    save_draft(tiny_eagle3(tiny_target("llama", num_hidden_layers=4)), folder / "eagle3", "tiny")
    tiny_model("llama", folder / "model", seed=3)
    return {kind: str(folder / kind) for kind in ("longspec", "eagle3", "model")}
