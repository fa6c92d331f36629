"""The benchmark of unmeasured tiles outlives a kernel that hangs or fails."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.kernels import try_tiles
from benchmarks.kernels.trials import build, listed, parse
from benchmarks.kernels.try_tiles import candidates, watch
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels.sm90._tile import Tile

WORKER = """
import json, sys, time
skip = sys.argv[sys.argv.index("--skip") + 1:]
print("a line of XLA's")
for name in ("right", "hangs", "fails", "wrong"):
    if name in skip:
        continue
    print(json.dumps({"starts": name}), flush=True)
    if name == "hangs":
        time.sleep(60)
    if name == "fails":
        sys.exit(3)
    apart = 0.5 if name == "wrong" else 0.0
    print(json.dumps({"done": name, "shape": "1,2,3", "kernel": name, "ms": 1.0, "ratio": 0.9,
                      "spread": [0.8, 1.0], "apart": apart}), flush=True)
"""


def test_watch(capsys: pytest.CaptureFixture[str]) -> None:
    found = watch([sys.executable, "-c", WORKER], time.time() + 60, hang=1.5)
    assert [fields["kernel"] for fields in found] == ["right", "wrong"]
    text = capsys.readouterr().out
    assert "GIVEN UP (exit -9): hangs" in text and "GIVEN UP (exit 3): fails" in text
    assert text.count("WRONG") == 1 and "same bits" in text and "a line of XLA's" in text


SPEC = "down_dswiglu:n=128,stages=5,cluster=2x1,raster=4,in_place=True"


def test_parse() -> None:
    trial = parse(SPEC)
    assert (trial.stage, trial.tile) == ("down_dswiglu", Tile(128, 5, raster=4, in_place=True))
    assert (
        trial.variant.name == "trial_down_dswiglu_n_128_stages_5_cluster_2x1_raster_4_in_place_True"
    )
    assert trial.variant.tile == (128, 128, 64)
    assert parse("gate_up:n=256,stages=4").variant.tile == (128, 128, 64), "gate beside up"
    for text, named in (
        ("gate:n=256,stages=4", "stage: .*'gate'"),
        ("gate_up:n=256,depth=4", "field: .*'depth'"),
        ("gate_up:n=wide,stages=4", "n: .*'wide'"),
    ):
        with pytest.raises(ValueError, match=named):
            parse(text)


def test_listing_names_what_was_built(tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="the compiler is the build's")
    with pytest.raises(FileNotFoundError, match="no kernels"):
        listed(tmp_path)
    build(tmp_path, [parse(SPEC)], 1)
    assert listed(tmp_path) == [parse(SPEC).variant]
    assert (tmp_path / _manifest.library_name("sm_90a")).exists()


def test_candidates() -> None:
    """Shipped kernels come first; the pattern is for trials alone."""
    if not any(kernel.variant.arch == "sm_90a" for kernel in _manifest.installed().kernels):
        pytest.skip("make kernels has not run for sm_90a")
    trials = [parse(SPEC).variant, parse("gate_up:n=128,stages=5").variant]
    names = [v.name for v in candidates("down_dswiglu", "", trials)]
    assert names[0] == "sm90_down_dswiglu_dgate_dup_h_large_oi_bf16"
    assert [name for name in names if name.startswith("trial")] == [trials[0].name]
    assert candidates("down_dswiglu", "raster_8", trials)[-1].name.startswith("sm90_")


def test_a_spread_needs_two_turns(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["try_tiles", "folder", "--turns", "1"])
    with pytest.raises(SystemExit):
        try_tiles.main()
    assert "--turns: expected at least 2, got 1" in capsys.readouterr().err
