"""The benchmark of unmeasured tiles outlives a kernel that hangs or fails."""

import sys
import time

import pytest

from benchmarks.kernels.try_tiles import candidates, watch
from swiglu_jax.kernels import _manifest

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


def test_candidates() -> None:
    """Shipped kernels come first, and no cluster is asked for that is not resident."""
    if not any(kernel.variant.arch == "sm_90a" for kernel in _manifest.installed().kernels):
        pytest.skip("make kernels has not run for sm_90a")
    names = [v.name for v in candidates("down_dswiglu", 1024, "", 32)]
    assert names[0] == "sm90_down_dswiglu_dgate_dup_h_large_oi_bf16"
    assert "trial_down_dswiglu_ring_128_2x2_32" in names
    assert "trial_down_dswiglu_large_prefetch" not in names, "for long contractions"
    assert [v.name for v in candidates("down_dswiglu", 1024, "ring_128_1x1", 32)][-2:] == [
        "sm90_down_dswiglu_dgate_dup_h_narrow_oi_bf16",
        "trial_down_dswiglu_ring_128_1x1",
    ]
    for resident, wanted, other in ((33, 32, 30), (32, 32, 30), (31, 30, 32), (29, 0, 30)):
        names = [v.name for v in candidates("gate_up", 5120, "", resident)]
        assert (f"trial_gate_up_large_2x2_{wanted}" in names) == bool(wanted)
        assert f"trial_gate_up_large_2x2_{other}" not in names
