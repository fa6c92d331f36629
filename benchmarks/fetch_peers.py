"""Download the peers' wheels, in two folders that each fit in one transfer to a GPU machine.

    python benchmarks/fetch_peers.py [--out .carry]

For a GPU machine without a network, whose Python is 3.12 and which has torch, triton and jax.
`peers.md` beside this file says what goes where and why; `install_peers.sh` installs it there.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHON = "3.12"
GLIBC = ("2_28", "2_27", "2_24", "2_17")

WHEELS = (
    # tokamax, and what it imports beyond jax and flax (xprof, for a timer of TPUs, left out)
    "tokamax==0.0.17", "einshape==1.0", "immutabledict==4.3.1", "qwix==0.1.8",
    "pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types==0.8.0",
    "typing-inspection==0.4.5", "typing-extensions==4.16.0", "jax-triton==0.4.1",
    # quack and the compiler of its kernels
    "quack-kernels==0.5.0", "apache-tvm-ffi==0.1.15.post2", "torch-c-dlpack-ext==0.1.5",
    "nvidia-cutlass-dsl==4.5.2",
    # Liger and FLA
    "liger-kernel==0.8.5", "flash-linear-attention==0.6.0", "fla-core==0.6.0",
)  # fmt: skip

LARGE = "nvidia-cutlass-dsl-libs-base==4.5.2"
"""71 MiB: more than one transfer may carry, so it goes in two parts."""

FIRST_PART = 41 << 20
"""Bytes of the large wheel in the first folder; leaves room for the native library beside it."""


def download(packages: tuple[str, ...], directory: Path) -> None:
    """pip's download of wheels for the GPU machine's Python, without their dependencies."""
    platforms = [f"manylinux_{v}_x86_64" for v in GLIBC] + ["manylinux2014_x86_64"]
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
        "--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp",
        *(f"--platform={p}" for p in platforms), f"--dest={directory}", *packages,
    ]  # fmt: skip
    subprocess.run(command, check=True)


def main() -> None:
    """Download, split and print the sizes."""
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--out", type=Path, default=Path(__file__).parents[1] / ".carry")
    out = command.parse_args().out
    first, second = out / "peers-1", out / "peers-2"
    for folder in (first, second):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    download(WHEELS, second)
    with tempfile.TemporaryDirectory() as scratch:
        download((LARGE,), Path(scratch))
        (wheel,) = Path(scratch).iterdir()
        data = wheel.read_bytes()
    (first / f"{wheel.name}.part1").write_bytes(data[:FIRST_PART])
    (second / f"{wheel.name}.part2").write_bytes(data[FIRST_PART:])
    for folder in (first, second):
        size = sum(p.stat().st_size for p in folder.iterdir())
        print(f"{folder}: {size / 2**20:.1f} MiB in {len(list(folder.iterdir()))} files")


if __name__ == "__main__":
    main()
