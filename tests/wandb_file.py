"""Reads what an offline W&B run left on disk: records in a LevelDB log behind a header of seven bytes."""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK, FRAGMENT = 7, 32768, struct.Struct("<IHB")  # checksum, length, kind
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """W&B's own messages, in order."""
    data, at, parts = path.read_bytes(), HEADER, b""
    while at + FRAGMENT.size <= len(data):
        if BLOCK - at % BLOCK < FRAGMENT.size:  # no fragment begins in a block's last bytes
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = FRAGMENT.unpack_from(data, at)
        at += FRAGMENT.size
        if at + length > len(data):
            return
        parts += data[at : at + length]
        at += length
        if kind in (WHOLE, LAST):
            yield Record.FromString(parts)
            parts = b""


@dataclass
class Stored:
    """What W&B would send: the run's id and config, its rows by name, its summary and metric definitions."""

    run_id: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    step_metrics: dict[str, str] = field(default_factory=dict)


def finished(path: Path, seconds: float = 30) -> list[Any]:
    """All messages of a run that has ended; W&B's own process may still be writing them."""
    until = time.monotonic() + seconds
    while not (found := list(records(path))) or not found[-1].HasField("exit"):
        assert time.monotonic() < until, f"{path} holds no end after {seconds} s"
        time.sleep(0.1)
    return found


def read(path: Path) -> Stored:
    """Everything that the tests look at."""
    stored = Stored()
    for record in finished(path):
        if record.HasField("run"):
            stored.run_id = record.run.run_id
            stored.config |= _values(record.run.config.update)
        if record.HasField("config"):
            stored.config |= _values(record.config.update)
        if record.HasField("history"):
            stored.rows.append(_values(record.history.item))
        if record.HasField("summary"):
            stored.summary |= _values(record.summary.update)
        if record.HasField("metric"):
            stored.step_metrics[record.metric.glob_name or record.metric.name] = record.metric.step_metric
    return stored


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
