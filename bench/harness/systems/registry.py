"""From a file's words to systems."""

from collections.abc import Sequence

from longdraft.bench.harness.place import Place
from longdraft.bench.harness.settings import SystemSettings
from longdraft.bench.harness.systems.base import System
from longdraft.bench.harness.systems.ours import (
    Exact,
    Full,
    Off,
    Partial,
    Quest,
    SelfDrafting,
    SnapKV,
    Sparse,
    Streaming,
)
from longdraft.bench.harness.systems.sglang import Eagle3, Ngram, Plain
from longdraft.errors import UserError

KINDS: dict[str, type[System]] = {
    kind.kind: kind
    for kind in (Plain, Eagle3, Ngram, Full, Exact, Partial, Sparse, Streaming, SnapKV, Quest, SelfDrafting)
}


def make_systems(asked: Sequence[SystemSettings], place: Place) -> list[System]:
    """All systems of a file, plain first: others are compared with it.

    Raises:
        UserError: two of the same label.
    """
    ordered = sorted(asked, key=lambda each: each.system != "plain")
    found = [(Off if each.mode_off else KINDS[each.system])(each, place) for each in ordered]
    labels = [system.label for system in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"two systems are {twice!r}: give each a label of its own")
    return found
