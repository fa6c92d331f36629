"""Flax is optional: the package does not import it, and says which extra brings it."""

import subprocess
import sys

BLOCKED = "import sys; sys.modules['flax'] = None\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)


def test_the_package_does_not_import_flax():
    done = run("import sys, swiglu_jax; sys.exit('flax' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_the_package_works_without_flax():
    done = run(
        BLOCKED + "import jax.numpy as jnp, swiglu_jax\n"
        "w = jnp.ones((3, 2)); print(swiglu_jax.swiglu_mlp(jnp.ones((1, 2)), w, w, w.T).shape)"
    )
    assert done.stdout == "(1, 2)\n", done.stderr


def test_the_error_names_the_extra():
    for module in ("flax", "flax.nnx", "flax.linen"):
        done = run(BLOCKED + f"import swiglu_jax.{module}")
        assert "ImportError" in done.stderr
        assert "swiglu-jax[flax]" in done.stderr
