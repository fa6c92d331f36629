"""Measurements kept on disk, one small file each, for every process and every later run.

A file is written under a name of its own and then renamed, so that a reader sees a whole file or
none. A damaged file is a miss, and a directory that cannot be written only costs the next
process a measurement.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from swiglu_jax._candidate import StageCall
from swiglu_jax._measurement import Measurement

try:
    import fcntl
except ImportError:  # not a POSIX system: there are no CUDA trials to take turns either
    fcntl = None

logger = logging.getLogger("swiglu_jax")

FORMAT = 1


def path_of(directory: Path, machine: dict[str, str], call: StageCall) -> Path:
    """The file of a call measured on ``machine`` (device and every version that matters)."""
    key = json.dumps({"format": FORMAT, "machine": machine, "call": asdict(call)}, sort_keys=True)
    return directory / "tuning" / f"{call.stage}-{hashlib.sha256(key.encode()).hexdigest()}.json"


def read(path: Path) -> Measurement | None:
    """The measurement in a file, or None where there is no sound one."""
    try:
        return Measurement.from_json(json.loads(path.read_text())["measurement"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("ignoring the damaged tuning file %s: %s", path, error)
        return None


def write(path: Path, machine: dict[str, str], call: StageCall, measured: Measurement) -> bool:
    """Keep a measurement; False (with a warning) where the directory cannot be written."""
    text = json.dumps(
        {"machine": machine, "call": asdict(call), "measurement": measured.to_json()}, indent=1
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        logger.warning("could not keep a tuning result at %s: %s", path, error)
        return False
    return True


@contextlib.contextmanager
def turn(directory: Path) -> Iterator[None]:
    """Hold the machine's tuning lock, so that processes do not disturb each other's trials.

    A lock that cannot be had (no such directory, no flock there) is done without: two processes
    then measure at once, which costs accuracy and nothing else.
    """
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(directory / "tuning.lock", "w"))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("measuring without a lock in %s: %s", directory, error)
        yield
