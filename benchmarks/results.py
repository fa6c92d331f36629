"""The JSON that a run leaves: machine, versions, commit, records, and what was not made."""

import datetime
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

FORMAT = 1
ROOT = Path(__file__).parents[1]

PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "nvidia-cublas",
    "flax", "torch", "triton", "tokamax", "jax-triton", "quack-kernels", "nvidia-cutlass-dsl",
    "liger-kernel", "flash-linear-attention", "fla-core", "numpy",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """The device, its driver and every version that a number may depend on."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": getattr(device.client, "platform_version", None),
        "nvidia_smi": _nvidia_smi(),
        "packages": {name: _version(name) for name in PACKAGES},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> dict[str, str] | None:
    fields = ("name", "driver_version", "power.limit", "clocks.max.sm", "memory.total")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    first = text.strip().splitlines()[0]
    return dict(zip(fields, (part.strip() for part in first.split(",")), strict=False))


def commit() -> dict[str, Any]:
    """The git commit (or SWIGLU_JAX_COMMIT, where a copy without .git runs) and a digest of the
    package's sources and built libraries, which says whether two runs had the same code."""
    digest = hashlib.sha256()
    package = ROOT / "swiglu_jax"
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".so", ".json")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return {"commit": _git_commit(), "sources": digest.hexdigest()[:16]}


def _git_commit() -> str | None:
    if told := os.environ.get("SWIGLU_JAX_COMMIT"):
        return told
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True,
                              check=True).stdout.strip()  # fmt: skip
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True,
                                 text=True, check=True).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


class Results:
    """Collects records and writes the file anew after each task, so that a run that is cut short
    leaves what it has."""

    def __init__(self, what: str, directory: Path, options: dict[str, Any]):
        self.path = directory / file_name(what)
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "what": what,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **commit(),
            "machine": machine(),
            "options": options,
            "records": [],
            "not_made": [],
        }

    def add(self, record: dict[str, Any]) -> None:
        self.data["records"].append(record)

    def not_made(self, what: str, reason: str, **where: Any) -> None:
        """Note a comparison that was asked for and is not in the records."""
        self.data["not_made"].append({"what": what, "reason": reason, **where})
        print(f"not made: {what}: {reason}", flush=True)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.path)


def file_name(what: str) -> str:
    """<date>-<device>-<what>.json"""
    kind = jax.devices()[0].device_kind.lower().removeprefix("nvidia").strip()
    device = re.sub(r"[^a-z0-9]+", "-", kind).strip("-")
    return f"{datetime.date.today().isoformat()}-{device}-{what}.json"


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read result files; ValueError names one that is not such a file."""
    found = []
    for path in paths:
        data = json.loads(Path(path).read_text())
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path}: expected a benchmark result of format {FORMAT}")
        found.append(data | {"path": str(path)})
    return found
