"""The demo, run as a person runs it, for a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--batch=8", "--length=64", "--layers=2", "--width=64", "--hidden=96", "--seed=3"]


def run(out: Path, *arguments: str, platform: str = "cpu") -> subprocess.CompletedProcess[str]:
    # One real device, not the eight virtual ones that the other tests ask for.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": platform, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / "train_lm.py"), "--out", str(out), *arguments]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=280)


def summary_of(out: Path, *arguments: str, platform: str = "cpu") -> tuple[dict, str]:
    done = run(out, *arguments, platform=platform)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "train_lm.json").read_text()), done.stdout


def test_loss_falls_and_files_are_written(tmp_path):
    summary, printed = summary_of(tmp_path, *SMALL, "--steps", "40")
    losses = summary["losses"]
    assert len(losses) == 40
    assert np.mean(losses[:3]) > 5.0  # close to ln 256 = 5.55 before anything is learned
    assert np.mean(losses[-3:]) < 4.0
    steps, held_out = zip(*summary["held_out"], strict=True)
    assert steps[-1] == 40
    assert held_out[-1] < held_out[0]
    assert summary["held_out_loss"] == held_out[-1]
    assert (tmp_path / "train_lm.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert summary["tokens_per_second"] > 0
    for figure in (summary["held_out_loss"], summary["held_out_unigram_entropy"]):
        assert f"{figure:.3f}" in printed


def test_summary_names_the_route_that_ran(tmp_path):
    summary, printed = summary_of(tmp_path, *SMALL, "--steps", "2", "--implementation", "xla")
    assert summary["implementation"] == "xla"
    assert summary["route"] == {"forward": "xla", "backward": "xla"}
    assert summary["custom_calls"] == []
    assert "forward xla, backward xla" in printed


def test_fused_says_why_it_cannot_run_on_a_cpu(tmp_path):
    done = run(tmp_path, *SMALL, "--steps", "2", "--implementation", "fused")
    assert done.returncode != 0
    assert "fused kernels" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_fused_on_a_gpu(tmp_path):
    summary, _ = summary_of(tmp_path, "--steps", "60", "--implementation", "fused", platform="cuda")
    assert "xla" not in summary["route"].values()
    assert len(summary["custom_calls"]) >= 2  # and those of the gradients' products, if faster
    assert summary["losses"][-1] < summary["losses"][0] - 1.0
