"""What was shipped with the package, or built beside it, as one fingerprint."""

import functools
import hashlib
from pathlib import Path


@functools.cache
def digest_of_artifacts() -> str:
    """Changes whenever the native library or a shipped kernel does."""
    digest = hashlib.sha256()
    directory = Path(__file__).parent / "lib"
    for path in sorted(p for p in directory.glob("*") if p.is_file()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
