"""A Prometheus of one's own: scrapes one server for a while and evaluates expressions over what it has seen."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from longdraft.bench.server import free_port
from longdraft.errors import UserError

SCRAPE_SECONDS = 2


@dataclass(frozen=True)
class Line:
    """One series of a result: its labels, seconds since the epoch, and values."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


class Prometheus:
    """The program as a child process; ``with`` starts it, waits until it is ready and ends it.

    Args:
        program: its name or path.
        target: ``host:port`` that is scraped every two seconds.
        folder: for its configuration, log and data.

    Raises:
        UserError: there is no such program, or it does not start.
    """

    def __init__(self, program: str, target: str, folder: Path) -> None:
        found = shutil.which(program)
        if found is None:
            raise UserError(f"--prometheus {program!r} is no program: install Prometheus, or give its path")
        self.program, self.folder = found, folder
        self.address = f"127.0.0.1:{free_port()}"
        scrape = {"job_name": "longdraft", "static_configs": [{"targets": [target]}]}
        self.configuration = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": [scrape]}

    def __enter__(self) -> "Prometheus":
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "prometheus.yaml").write_text(yaml.safe_dump(self.configuration))
        words = [f"--config.file={self.folder}/prometheus.yaml", f"--storage.tsdb.path={self.folder}/data"]
        with (self.folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(
                [self.program, *words, f"--web.listen-address={self.address}"], stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def _wait_until_ready(self, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise UserError(f"Prometheus did not start, see {self.folder / 'prometheus.log'}")

    def _get(self, path: str, **query: Any) -> Any:
        words = urllib.parse.urlencode(query)
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{words}", timeout=60) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise UserError(f"Prometheus refuses {query}: {error.read().decode(errors='replace')}") from None

    def range(self, expr: str, start: float, end: float, step: float) -> list[Line]:
        """The expression every ``step`` seconds, a line for each series that has a value.

        Raises:
            UserError: it is no expression.
        """
        found = self._get("query_range", query=expr, start=start, end=end, step=step)["result"]
        return [
            Line(row["metric"], [float(t) for t, _ in row["values"]], [float(v) for _, v in row["values"]])
            for row in found
        ]

    def version(self) -> str:
        return str(self._get("status/buildinfo")["version"])
