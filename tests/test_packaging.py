"""What `pip install` gives: a wheel that imports fast and runs, an sdist with all it needs."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import swiglu_jax

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BUILD_REQUIRES = PYPROJECT["build-system"]["requires"]
IMPORT_SECONDS = 0.15
"""Over jax itself: a few tens of milliseconds, with room for a busy machine."""

TIME_IMPORT = """
import jax, time
before = time.perf_counter()
import swiglu_jax
print(time.perf_counter() - before)
"""
USE = """
import sys
# This checkout is installed editable, through a finder that comes before sys.path.
sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
import jax, jax.numpy as jnp, swiglu_jax
w = jnp.ones((6, 4))
x = jnp.ones((3, 4))
y, grad = jax.value_and_grad(lambda x: swiglu_jax.swiglu_mlp(x, w, w, w.T).sum())(x)
print(swiglu_jax.__file__, swiglu_jax.__version__, float(y), grad.shape)
"""


def _python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def _build(kind: str, out: Path) -> Path:
    """Without the native library, whose build has tests of its own."""
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("build")
    _python("-m", "build", f"--{kind}", "--no-isolation", "-C", "wheel.cmake=false",
            "--outdir", str(out), str(ROOT))  # fmt: skip
    (built,) = out.iterdir()
    return built


def test_the_import_costs_little_over_jax():
    best = min(float(_python("-c", TIME_IMPORT)) for _ in range(3))
    assert best < IMPORT_SECONDS


def test_the_build_takes_no_headers_newer_than_the_oldest_jax():
    """XLA serves handlers of older FFI headers, and refuses those of newer ones."""
    requirements = pytest.importorskip("packaging.requirements")

    def jaxlib(texts):
        (found,) = [r for r in map(requirements.Requirement, texts) if r.name == "jaxlib"]
        return found.specifier

    build = jaxlib(BUILD_REQUIRES)
    oldest = min(s.version for s in jaxlib(PROJECT["dependencies"]) if s.operator == ">=")
    major, minor = map(int, oldest.split(".")[:2])
    assert build.contains(f"{major}.{minor}.2")
    assert not build.contains(f"{major}.{minor + 1}.0")
    assert not build.contains(f"{major + 1}.0.0")


def test_the_version_is_one():
    assert swiglu_jax.__version__ == PROJECT["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", citation, re.M)[1] == PROJECT["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changes or f"## [{PROJECT['version']}]" in changes


def test_every_extra_that_a_text_names_is_there():
    named = set()
    texts = ("swiglu_jax/**/*.py", "examples/**/*.py", "README.md", "docs/*.md")
    for path in (path for pattern in texts for path in ROOT.glob(pattern)):
        for extras in re.findall(r"(?:swiglu-jax|'\.)\[([\w,]+)\]", path.read_text()):
            named |= set(extras.split(","))
    assert {"flax", "cuda13"} <= named <= set(PROJECT["optional-dependencies"])


def test_a_wheel_alone_runs(tmp_path):
    wheel = _build("wheel", tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    sources = {str(p.relative_to(ROOT)) for p in ROOT.glob("swiglu_jax/**/*.py")}
    assert sources <= set(names)
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "examples/", "docs/"))]
    printed = _python("-P", "-c", USE, PYTHONPATH=str(tmp_path / "site"))
    file, version, _, *shape = printed.split()
    assert Path(file).is_relative_to(tmp_path)
    assert version == PROJECT["version"]
    assert " ".join(shape) == "(3, 4)"


def test_the_binaries_are_small():
    """Before compression: what a wheel of this checkout would hold."""
    binaries = list((ROOT / "swiglu_jax" / "lib").glob("*.so"))
    if not binaries:
        pytest.skip("the native library is not built in this checkout")
    assert sum(path.stat().st_size for path in binaries) < 60e6


def test_the_sdist_holds_what_a_build_reads(tmp_path):
    with tarfile.open(_build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    native = {str(p.relative_to(ROOT)) for p in ROOT.glob("ffi/**/*") if p.is_file()}
    kernels = {str(p.relative_to(ROOT)) for p in ROOT.glob("swiglu_jax/kernels/**/*.[pch]*")
               if "__pycache__" not in p.parts}  # fmt: skip
    assert native | kernels | {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc"))]
