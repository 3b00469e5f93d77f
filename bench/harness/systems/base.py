"""What all systems answer: how their server starts, what their requests ask, and what they promise."""

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from longdraft.bench.harness.place import Place
from longdraft.bench.harness.settings import COMMON, PROMISED, TAKES, SystemSettings

LONGEST = 150  # characters of a log's name


def file_name(words: str) -> str:
    """Words as a part of a file's name: of letters, digits and what no shell or folder reads otherwise."""
    return re.sub(r"[^\w.,()+-]+", "-", words)


@dataclass(frozen=True)
class Launch:
    """A server to start; ``settings`` are ours, None for stock SGLang."""

    words: tuple[str, ...]
    environment: dict[str, str]
    settings: dict[str, Any] | None = None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "sglang.launch_server", *self.words]

    def process_environment(self) -> dict[str, str]:
        """With our settings in it."""
        own = {} if self.settings is None else {"LONGDRAFT_SETTINGS": json.dumps(self.settings)}
        return self.environment | own

    def merged(self, other: "Launch") -> "Launch | None":
        """One server for both, whose requests name their modes; None where they contradict each other."""
        if self.settings is None or other.settings is None:
            return None
        if (self.words, self.environment) != (other.words, other.environment):
            return None
        ours, theirs = dict(self.settings), dict(other.settings)
        modes = {ours.pop("mode"), theirs.pop("mode")}
        if any(ours[key] != theirs[key] for key in (ours.keys() & theirs.keys()) - {"sparse_tokens"}):
            return None
        sets = [each["sparse_tokens"] for each in (ours, theirs) if "sparse_tokens" in each]
        widest = {"sparse_tokens": max(sets)} if sets else {}
        mode = "exact" if modes - {"full", "off"} else "full"
        return Launch(self.words, self.environment, {**ours, **theirs, **widest, "mode": mode})


class System(ABC):
    """One system of a file, on a place."""

    kind: ClassVar[str] = ""  # the word of the YAML

    def __init__(self, asked: SystemSettings, place: Place) -> None:
        self.asked, self.place = asked, place

    @property
    def label(self) -> str:
        """Its name in rows."""
        return self.asked.label or self.own_label()

    def own_label(self) -> str:
        """Where the file gives it none."""
        return self.kind

    @property
    def file_name(self) -> str:
        """Its label as a part of files' names."""
        return file_name(self.label)

    @property
    def settings(self) -> dict[str, Any]:
        """What the file says of it, defaults in, folders by their names: for rows."""
        said = self.asked.model_dump(include=set(COMMON | TAKES[self.asked.system]) - {"label"})
        said |= {"draft": Path(self.asked.draft).name} if self.asked.draft else {}
        return {key: value for key, value in said.items() if value not in (None, [], {}, False)}

    @property
    def promised(self) -> bool:
        """Whether its tokens must be plain decoding's."""
        return self.kind in PROMISED and self.place.force is None

    @property
    def forced(self) -> float | None:
        """Its forced accept length."""
        if self.place.force is None:
            return None
        return self.asked.accept_length or self.place.force.accept_length

    def missing(self) -> str | None:
        """Why this machine cannot serve it; None where it can."""
        return None

    @abstractmethod
    def launch(self) -> Launch:
        """Its own server."""

    def request(self) -> dict[str, Any]:
        """Sampling parameters by which a request asks for it."""
        return {}


@dataclass
class Serving:
    """A server and the systems that it serves."""

    launch: Launch
    systems: list[System] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "+".join(system.file_name for system in self.systems)

    def log(self, folder: Path) -> Path:
        return folder / f"{self.name[:LONGEST]}.log"


def servings(systems: Sequence[System], share: bool) -> list[Serving]:
    """Servers in the systems' order; with ``share`` as few as there can be."""
    found: list[Serving] = []
    for system in systems:
        launch = system.launch()
        for serving in found if share else ():
            if (both := serving.launch.merged(launch)) is not None:
                serving.launch = both
                serving.systems.append(system)
                break
        else:
            found.append(Serving(launch, [system]))
    return found
