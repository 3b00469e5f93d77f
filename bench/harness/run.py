"""Runs the cells of a measurement, server by server: what is finished stays, what fails is a row, and time is kept.

Statuses: 0 all is there, 1 a check failed, 2 a user's error, 3 cells are left (``max_minutes``): the same command goes on.
"""

import argparse
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from longdraft.bench.harness.answers import Answer
from longdraft.bench.harness.ledger import Ledger, alone, digest
from longdraft.bench.harness.place import Place
from longdraft.bench.harness.settings import HarnessSettings
from longdraft.bench.harness.systems.base import Serving, System, servings
from longdraft.bench.harness.systems.registry import make_systems
from longdraft.bench.provenance import device_name
from longdraft.bench.server import Server
from longdraft.errors import UserError
from longdraft.schema import load_settings

LEFT = 3  # exit status: the same command goes on
S = TypeVar("S", bound=HarnessSettings)
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One system under one condition; ``facts`` are the condition's part of its rows."""

    system: System
    facts: dict[str, Any]
    key: str

    @property
    def name(self) -> str:
        return ", ".join([self.system.label, *(f"{key} {value}" for key, value in self.facts.items())])


class Experiment(ABC, Generic[S]):
    """A measurement: its cells, and what a cell's rows are."""

    kind: ClassVar[str] = ""
    identities: ClassVar[bool] = True  # whether rows say that tokens are plain decoding's

    def __init__(self, settings: S) -> None:
        self.settings = settings
        self.place = self.make_place()
        self.systems = make_systems(settings.systems, self.place)
        self.ledger = Ledger(settings.record, self.kind, told(settings))

    @abstractmethod
    def make_place(self) -> Place:
        """How large servers must be."""

    @abstractmethod
    def conditions(self, system: System) -> list[dict[str, Any]]:
        """Facts of a system's cells, in order."""

    @abstractmethod
    def decisive(self, facts: dict[str, Any]) -> dict[str, Any]:
        """What else decides the rows of cells of these facts: settings, and digests of prompts."""

    @abstractmethod
    def measure(self, server: Server, cell: Cell) -> tuple[Rows, list[Answer]]:
        """A cell's rows, and answers that later cells or sittings need."""

    @abstractmethod
    def figures(self, rows: Rows) -> dict[str, float]:
        """Of a record."""

    def compares(self, cell: Cell) -> bool:
        """Whether a cell needs plain decoding's answers."""
        return cell.system is not self.systems[0]

    def finish(self, rows: Rows) -> None:
        """Add to rows what follows from others."""

    @cached_property
    def cells(self) -> list[Cell]:
        """All of them, plain decoding's first. Where others are compared with its answers, its settings decide theirs too."""
        shared = [self.kind, self.place.dtype, device_name(), self.settings.seed, self.systems[0].asked.model_dump()]
        shared.append(self.settings.target.model_dump())
        shared.append(None if self.place.force is None else self.place.force.model_dump())
        found = []
        for system in self.systems:
            for facts in self.conditions(system):
                own = [system.settings, system.asked.draft, system.label, facts, self.decisive(facts)]
                found.append(Cell(system, facts, digest([shared, own])))
        return found

    def plain_cell(self, cell: Cell) -> Cell:
        """Plain decoding's under the same condition."""
        return next(c for c in self.cells if c.system is self.systems[0] and c.facts == cell.facts)

    def row(self, cell: Cell, ok: bool = True, why: str = "", n: int = 0, **more: Any) -> dict[str, Any]:
        """What every row says."""
        system = cell.system
        told = {"system": system.kind, "label": system.label, "settings": system.settings, "ok": ok, "why": why, "n": n}
        return {**told, "seed": self.settings.seed, **cell.facts, **more}

    def failed(self, cell: Cell, why: str) -> Rows:
        """Rows of a cell that gave none."""
        return [self.row(cell, False, why)]

    def checks(self) -> dict[str, bool]:
        """What the record answers for."""
        rows = self.ledger.rows
        found = {"every_cell_was_tried": all(self.ledger.finished(cell.key) for cell in self.cells)}
        if self.identities and (promised := [row["identical"] for row in rows if "identical" in row]):
            found["tokens_are_plain_where_promised"] = all(promised)
        return found


def told(settings: HarnessSettings) -> dict[str, Any]:
    """Settings for a record: files and folders by their names, as they are this machine's."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(each) for key, each in value.items() if each is not None}
        if isinstance(value, list):
            return [short(each) for each in value]
        return Path(value).name if isinstance(value, str) and "/" in value and Path(value).exists() else value

    return dict(short(json.loads(settings.model_dump_json(exclude={"record", "logs"}))))


class Clock:
    """Time of a sitting: whether there is enough for one more piece of work, by the longest of its kind so far."""

    def __init__(self, minutes: float | None) -> None:
        self.begin, self.seconds = time.monotonic(), None if minutes is None else 60 * minutes
        self.longest: dict[str, float] = {}

    def enough(self, *kinds: str) -> bool:
        """Whether one of each still fits in."""
        if self.seconds is None:
            return True
        return time.monotonic() - self.begin + sum(self.longest.get(kind, 0.0) for kind in kinds) < self.seconds

    def took(self, kind: str, since: float) -> None:
        self.longest[kind] = max(self.longest.get(kind, 0.0), time.monotonic() - since)


def reason(error: BaseException) -> str:
    """One line of an error: the last that speaks of one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = [line for line in lines if "error" in line.lower() or "out of memory" in line.lower()]
    line = (told or lines)[-1]
    return line if len(line) <= 300 else line[:300] + "..."


class Runner(Generic[S]):
    """One sitting of an experiment."""

    def __init__(self, experiment: Experiment[S], retry: bool) -> None:
        self.experiment, self.ledger = experiment, experiment.ledger
        self.clock = Clock(experiment.settings.max_minutes)
        self.todo = {cell.key for cell in experiment.cells if not self.ledger.finished(cell.key, retry)}
        for cell in experiment.cells:  # plain answers that are gone, say with a file that was not copied along
            if cell.key in self.todo and experiment.compares(cell):
                plain = experiment.plain_cell(cell).key
                if plain not in self.ledger.answers and self.ledger.sound(plain):
                    self.todo.add(plain)

    def run(self) -> int:
        """Measure what is left; the status.

        Raises:
            UserError: logs cannot be written, or ``max_minutes`` were over before the first cell.
        """
        experiment, keys = self.experiment, [cell.key for cell in self.experiment.cells]
        if dropped := self.ledger.forget_others(keys):
            print(
                f"{dropped} rows are of cells that the file no longer asks for, or asks for otherwise: "
                f"moved to {self.ledger.dropped_path}"
            )
        before = len(self.todo)
        print(f"{len(keys) - before} of {len(keys)} cells are there", flush=True)
        logs = experiment.settings.logs
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"logs={str(logs)!r} cannot be made ({error.strerror}): give another folder") from None
        self.ledger.begin()
        for system in experiment.systems:
            if (why := system.missing()) is not None:
                for cell in self.cells_of([system]):
                    self.done(cell, experiment.failed(cell, why), [])
        able = [system for system in experiment.systems if system.missing() is None]
        for serving in servings(able, experiment.settings.share_servers):
            if (cells := self.cells_of(serving.systems)) and self.clock.enough("start", "cell"):
                self.serve(serving, cells)
        self.save()
        checks = experiment.checks()
        if self.todo and len(self.todo) == before:  # another sitting would come as far
            raise UserError(
                f"max_minutes={experiment.settings.max_minutes} were over before a cell was measured: give more"
            )
        if self.todo:
            print(f"{len(self.todo)} cells are left: the same command goes on", flush=True)
            return LEFT
        return 0 if all(checks.values()) else 1

    def cells_of(self, systems: Sequence[System]) -> list[Cell]:
        """Those of these systems that are left."""
        return [cell for cell in self.experiment.cells if cell.key in self.todo and cell.system in systems]

    def serve(self, serving: Serving, cells: list[Cell]) -> None:
        """One server's cells; where it dies of one, another is started for those behind it."""
        while cells and self.clock.enough("start", "cell"):
            begin = time.monotonic()
            log = serving.log(self.experiment.settings.logs)
            server = Server(serving.name, serving.launch.command, log, serving.launch.process_environment())
            try:
                with server:
                    self.clock.took("start", begin)
                    while cells and self.clock.enough("cell") and self.one(server, cells[0]):
                        cells.pop(0)
                    if server.process.poll() is None:
                        return
                    cells.pop(0)
            except UserError as error:  # it did not start
                for cell in cells:
                    self.done(cell, self.experiment.failed(cell, reason(error)), [])
                return

    def one(self, server: Server, cell: Cell) -> bool:
        """Measure a cell, or note why that failed; whether the server still runs."""
        begin = time.monotonic()
        try:
            rows, answers = self.experiment.measure(server, cell)
        except Exception as error:
            why = reason(error)
            if isinstance(error, OSError) and server.process.poll() is None:
                server.stop()  # it may still be at work on what was given up, beside the next cell
                why += f" (see {server.log.name})"
            elif server.process.poll() is not None:
                why = f"the server ended: {reason(RuntimeError(server.log.read_text(errors='replace')[-20_000:]))}"
            rows, answers = self.experiment.failed(cell, why), []
        self.done(cell, rows, answers)
        self.clock.took("cell", begin)
        return server.process.poll() is None

    def done(self, cell: Cell, rows: Rows, answers: list[Answer]) -> None:
        self.ledger.add(cell.key, rows, answers)
        self.todo.discard(cell.key)
        self.save()
        for row in rows:
            facts = ", ".join(f"{key} {value}" for key, value in row.items() if key in SHOWN)
            print(f"{cell.name}: {facts if row['ok'] else 'not counted: ' + row['why']}", flush=True)

    def save(self) -> None:
        """Write the record so far."""
        experiment = self.experiment
        experiment.finish(self.ledger.rows)
        order = [cell.key for cell in experiment.cells]
        self.ledger.write(experiment.settings.name, experiment.figures(self.ledger.rows), experiment.checks(), order)


SHOWN = ("tok_s", "tok_s_spread", "ms_step", "tau_micro", "score_own", "score_reference", "ttft_p50_ms", "identical")


def run_file(experiment: type[Experiment[S]], schema: type[S], what: str, argv: Sequence[str] | None) -> int:
    """``longdraft bench WHAT FILE.yaml [--retry] [a.b=value ...]``."""
    parser = argparse.ArgumentParser(prog=f"longdraft bench {experiment.kind}", description=what)
    parser.add_argument("file", metavar="FILE.yaml", help="what is measured; recipes/bench has some")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="laid over the file")
    parser.add_argument("--retry", action="store_true", help="measure cells again that failed before")
    args = parser.parse_args(argv)
    settings = load_settings(schema, args.file, args.overrides)
    with alone(settings.record):
        return Runner(experiment(settings), args.retry).run()
