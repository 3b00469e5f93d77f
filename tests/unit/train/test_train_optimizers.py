"""Which optimizer steps which weight of a draft."""

import torch
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.train.config import OptimSettings
from longdraft.train.engines.optimizers import build_optimizers

TARGET = tiny_target("llama", num_hidden_layers=4)


def owners(draft: torch.nn.Module, name: str) -> dict[str, tuple[str, float]]:
    """Each weight's optimizer and weight decay."""
    named = {key: p for key, p in draft.named_parameters() if p.requires_grad}
    names = {id(p): key for key, p in named.items()}
    found = dict[str, tuple[str, float]]()
    for optimizer in build_optimizers(named, OptimSettings(name=name, weight_decay=0.1)):  # type: ignore[arg-type]
        for group in optimizer.param_groups:
            for p in group["params"]:
                assert names[id(p)] not in found
                found[names[id(p)]] = type(optimizer).__name__, group["weight_decay"]
    assert found.keys() == named.keys()
    return found


def test_muon_takes_matrices_between_hidden_rows_alone() -> None:
    """A head's rows are tokens: AdamW's, with the decay of matrices; vectors have none."""
    found = owners(tiny_eagle3(TARGET, fc_norm=True), "muon")
    assert found.pop("lm_head.weight") == ("AdamW", 0.1)
    vectors = {key for key in found if "norm" in key}
    assert {found[key] for key in vectors} == {("AdamW", 0.0)}
    assert {found[key] for key in found.keys() - vectors} == {("Muon", 0.1)}
    assert "fc.weight" in found.keys() - vectors


def test_a_longspec_draft_has_no_head_of_its_own() -> None:
    found = owners(tiny_draft(TARGET), "muon")
    assert {kind for kind, _ in found.values()} == {"Muon", "AdamW"}
    assert all((kind == "AdamW") == ("norm" in key or key.endswith("bias")) for key, (kind, _) in found.items())


def test_adamw_decays_matrices_alone() -> None:
    found = owners(tiny_eagle3(TARGET), "adamw")
    assert all(value == ("AdamW", 0.0 if "norm" in key else 0.1) for key, value in found.items())
