"""Bytes of the Python standard library's own sources: real text that every machine has."""

import hashlib
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])

# Installed packages are not the standard library, and its tests repeat its sources.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
_HELD_OUT_EVERY = 16


@dataclass(frozen=True)
class Corpus:
    """Two disjoint sets of files, each joined into one array of bytes.

    Attributes:
      train: uint8 `[bytes]`.
      held_out: uint8 `[bytes]`, from files of which `train` holds no byte.
      train_files: how many files `train` joins.
      held_out_files: how many files `held_out` joins.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_files: int
    held_out_files: int


def load_corpus(root: Path | None = None, without: Collection[str] = ()) -> Corpus:
    """Read every `.py` file below `root` and split by file.

    The split hashes each file's path relative to `root`, so it depends neither on the order in
    which a file system lists names nor on a seed, and a file stays on its side of it when other
    files come or go.

    Args:
      root: folder to read; the running interpreter's standard library by default.
      without: names of folders to leave out.

    Raises:
      FileNotFoundError: `root` leaves one of the two sides without a file.
    """
    root = STANDARD_LIBRARY if root is None else root
    skipped = _SKIPPED_FOLDERS.union(without)
    sides: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped.isdisjoint(name.parts):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            sides[digest[0] % _HELD_OUT_EVERY == 0].append(path.read_bytes())
    if not (sides[True] and sides[False]):
        raise FileNotFoundError(
            f"{root} has too few .py files to train on some and hold out others; "
            "pass a folder with more of them"
        )
    train, held_out = (np.frombuffer(b"".join(sides[side]), np.uint8) for side in (False, True))
    return Corpus(train, held_out, len(sides[False]), len(sides[True]))


def unigram_entropy(data: np.ndarray) -> float:
    """Entropy in nats of the byte frequencies of `data`: the best loss that ignores context."""
    counts = np.bincount(data, minlength=VOCABULARY)
    p = counts[counts > 0] / data.size
    return float(-(p * np.log(p)).sum())


def sample_batches(data: np.ndarray, batch: int, length: int, seed: int) -> Iterator[jax.Array]:
    """Yield int32 `[batch, length + 1]` windows at random places: inputs and, one on, targets."""
    rng = np.random.default_rng(seed)
    window = np.arange(length + 1)
    while True:
        starts = rng.integers(0, data.size - length, size=(batch, 1))
        yield jnp.asarray(data[starts + window], jnp.int32)


def spread_batches(data: np.ndarray, batch: int, length: int, count: int) -> Iterator[jax.Array]:
    """Yield `count` batches of int32 `[batch, length + 1]` windows spread evenly over `data`."""
    window = np.arange(length + 1)
    starts = np.linspace(0, data.size - length - 1, batch * count).astype(np.int64)
    for rows in starts.reshape(count, batch, 1):
        yield jnp.asarray(data[rows + window], jnp.int32)
