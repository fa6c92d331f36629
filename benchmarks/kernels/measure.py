"""Time kernels that build.py made against cuBLAS's plain GEMMs of the same size, in pairs.

gate_up is compared with two GEMMs, down_dswiglu with one; gradients.py has the other stages.
Baseline and kernel take turns and each turn is compared with the baseline turns around it, so that
clock and temperature (the GPU is power-limited) fall out of the ratio. Prints the median ratio and
the spread without the extremes.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

TURN = 15e-3
"""Seconds of one turn: longer than the power controller's reaction."""


def problem(m: int, h: int, i: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Fresh operands by name; weights as "OI" and "IO" store them."""

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    data = {"x": normal(m, h), "gate": normal(m, i), "up": normal(m, i)}
    for name in ("w_gate", "w_up"):
        data[f"OI {name}"] = normal(i, h, scale=h**-0.5)
        data[f"IO {name}"] = data[f"OI {name}"].t().contiguous()
    data["OI w_down"] = normal(h, i, scale=h**-0.5)
    data["IO w_down"] = data["OI w_down"].t().contiguous()
    return data


def calls(
    kernel: dict[str, Any], entry: Any, data: dict[str, torch.Tensor], outs: list[torch.Tensor]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The kernel's call and its baseline's."""
    layout, outputs = kernel["weight_layout"], kernel["outputs"]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    written = outs[: len(outputs)]
    if kernel["stage"] == "gate_up":
        weights = [data[f"{layout} w_gate"], data[f"{layout} w_up"]]
        plain = [w.t() if layout == "OI" else w for w in weights]

        def baseline() -> None:
            torch.mm(data["x"], plain[0], out=outs[0])
            torch.mm(data["x"], plain[1], out=outs[1])

        return lambda: entry(data["x"], *weights, *written, stream), baseline
    weight = data[f"{layout} w_down"]
    right = weight if layout == "OI" else weight.t()
    read = [data["gate"]] if list(outputs) == ["dup"] else [data["gate"], data["up"]]
    return (
        lambda: entry(data["x"], weight, *read, *written, stream),
        lambda: torch.mm(data["x"], right, out=outs[0]),
    )


def turn(call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one call, of ``repeats`` after one that does not count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="+", help="M,H,I")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    listed = json.loads((arguments.folder / "kernels.json").read_text())
    kernels = [kernel for kernel in listed if kernel["stage"] in ("gate_up", "down_dswiglu")]
    entries = {}
    for kernel in kernels:
        module = tvm_ffi.load_module(str(arguments.folder / f"{kernel['name']}.so"))
        entries[kernel["name"]] = getattr(module, kernel["name"])
    found = []
    for shape in arguments.shapes:
        m, h, i = map(int, shape.split(","))
        for dtype in sorted({kernel["dtype"] for kernel in kernels}):
            data = problem(m, h, i, getattr(torch, dtype))
            outs = [torch.empty_like(data["gate"]) for _ in range(3)]
            for kernel in kernels:
                if kernel["dtype"] != dtype:
                    continue
                call, baseline = calls(kernel, entries[kernel["name"]], data, outs)
                call()
                warm = time.monotonic()
                while time.monotonic() - warm < 0.2:
                    baseline()
                    torch.cuda.synchronize()
                repeats = min(200, max(3, int(TURN / (turn(baseline, 3) * 1e-3))))
                plain, fused = [], []
                for _ in range(arguments.turns):
                    plain.append(turn(baseline, repeats))
                    fused.append(turn(call, repeats))
                after = [*plain[1:], plain[-1]]
                ratios = sorted(
                    2 * f / (p + q) for f, p, q in zip(fused, plain, after, strict=True)
                )
                ratio = statistics.median(ratios)
                found.append({"kernel": kernel["name"], "shape": [m, h, i], "ratio": ratio,
                              "ms": fused, "baseline_ms": plain})  # fmt: skip
                print(
                    f"{shape:>18} {kernel['name']:<52} {statistics.median(fused):8.4f} ms "
                    f"{ratio:6.3f} of cuBLAS [{ratios[1]:.3f}, {ratios[-2]:.3f}]",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
