"""What a calibration has found so far: a JSON file that is replaced in one move after every unit of work, and traces beside it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longdraft.errors import UserError
from longdraft.train.checkpoints import lock_folder

STATE = "state.json"


class State:
    """The work folder of a calibration, held by this process until :meth:`close`.

    ``values`` holds what units of work found, by name.

    Args:
        folder: made if missing.
        identity: settings that decide the result.

    Raises:
        UserError: another process works there, or the folder was begun with other settings.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, json.loads(json.dumps(identity))
        self._lock = lock_folder(folder, "work folder", "out", "out")
        try:
            self.values = self._resume()
        except UserError:
            self._lock.close()
            raise

    def _resume(self) -> dict[str, Any]:
        path = self.folder / STATE
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text())
            values, then = dict(found["values"]), found["identity"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is damaged ({error}): remove the folder to begin anew") from None
        for key in sorted(then.keys() | self.identity.keys()):
            if then.get(key) != self.identity.get(key):
                raise UserError(
                    f"{key}={self.identity.get(key)!r}, but {str(self.folder)!r} was begun with {then.get(key)!r}: give the former "
                    "value or another out, or remove the folder"
                )
        return values

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """A unit's value, found now unless an earlier process has; plain data."""
        if name not in self.values:
            self.values[name] = find()
            self.save()
        return self.values[name]

    def save(self) -> None:
        """Replace the file.

        Raises:
            UserError: a full disk; what was saved before holds.
        """
        work = self.folder / f".{STATE}.{os.getpid()}"
        try:
            with work.open("w") as file:
                json.dump({"identity": self.identity, "values": self.values}, file)
                file.flush()
                os.fsync(file.fileno())
            work.replace(self.folder / STATE)
        except OSError as error:
            raise UserError(
                f"{str(self.folder)!r} cannot be written ({error.strerror}): make room and run the same command, it goes on "
                "behind the last step"
            ) from None

    def remove(self) -> None:
        """The result is written: nothing here is needed any more."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Let other processes work here."""
        self._lock.close()
