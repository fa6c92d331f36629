"""The documentation builds, with every warning (a dead link, an unknown name) an error."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_mkdocs_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api" / "index.html").read_text()
    assert "swiglu_mlp" in api
    assert "SWIGLU_JAX_IMPLEMENTATION" in api  # from the docstring, not from the page
