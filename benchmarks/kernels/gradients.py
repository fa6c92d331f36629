"""Time the shipped SM90 kernels of input_gradient and weight_gradients against XLA's GEMMs.

    python benchmarks/kernels/gradients.py [M,H,I ...]      # on the GPU; needs the built package

XLA's side is what JAX users have: cuBLAS or whatever else its autotuning takes, one GEMM for each
product, dx's second one adding to the first. XLA and kernel take turns and each turn is compared
with XLA's turns around it, as in measure.py. One line for each kernel and shape: milliseconds, the
median ratio, the spread without the extremes, TFLOP/s and the largest difference between the two
results, relative to the largest value.
"""

import argparse
import functools
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiglu_jax import _native
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant, outputs_mask

SHAPES = ("8192,5120,17408", "8192,2048,8192", "32768,1024,3072", "2048,4096,14336")
PATTERN = "input_gradient.*bf16|weight_gradients.*oi_bf16|weight_gradients_w_gate_w_up_w_down.*bf16"
"""A weight's gradient in layout "IO" is the same kernel with its operands exchanged."""
TURN = 15e-3
"""Seconds of one turn: longer than the power controller's reaction."""
PRODUCTS = {"w_gate": ("dgate", "x"), "w_up": ("dup", "x"), "w_down": ("dy", "h")}
Arrays = dict[str, jax.Array]


def problem(m: int, h: int, i: int, dtype: str) -> Arrays:
    """Fresh operands by name; weights as "OI" and "IO" store them."""
    shapes = {"x": (m, h), "dy": (m, h), "dgate": (m, i), "dup": (m, i), "h": (m, i)}
    shapes |= {f"{layout} {name}": shape for layout, shape in (("OI", (i, h)), ("IO", (h, i)))
               for name in ("w_gate", "w_up")}  # fmt: skip
    keys = jax.random.split(jax.random.key(time.time_ns()), len(shapes))
    return {
        name: jax.random.normal(key, shape, jnp.dtype(dtype))
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def operands_of(variant: KernelVariant, data: Arrays) -> Arrays:
    """What the variant's entry takes, in its order."""
    if variant.stage == "input_gradient":
        layout = variant.weight_layout
        return {name.removeprefix(f"{layout} "): data[name]
                for name in ("dgate", "dup", f"{layout} w_gate", f"{layout} w_up")}  # fmt: skip
    read = {name for output in variant.outputs for name in PRODUCTS[output]}
    return {name: data[name] for name in ("x", "dgate", "dup", "h", "dy") if name in read}


def plain(variant: KernelVariant) -> Callable[..., list[jax.Array]]:
    """The same as a JAX user writes it."""
    oi = variant.weight_layout == "OI"

    def input_gradient(dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> list[jax.Array]:
        return [dgate @ w_gate + dup @ w_up if oi else dgate @ w_gate.T + dup @ w_up.T]

    def weight_gradients(**given: Any) -> list[jax.Array]:
        pairs = [PRODUCTS[output] if oi else PRODUCTS[output][::-1] for output in variant.outputs]
        return [given[a].T @ given[b] for a, b in pairs]

    return input_gradient if variant.stage == "input_gradient" else weight_gradients


def exported(variant: KernelVariant) -> Callable[..., list[jax.Array]]:
    """The kernel, called as the lowering of a stage calls it."""

    def call(**given: Any) -> list[jax.Array]:
        results = jax.eval_shape(plain(variant), **given)
        return jax.ffi.ffi_call(f"swiglu_jax_exported_{variant.stage}", results)(
            *given.values(),
            outputs=np.int64(outputs_mask(variant.stage, variant.outputs)),
            weight_layout=variant.weight_layout,
            kernel=variant.name,
        )

    return call


def positional(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """``function`` of named arguments as one of positions: jit would sort the names."""
    ordered = tuple(names)
    return lambda *values: function(**dict(zip(ordered, values, strict=True)))


def bound(function: Callable[..., Any], given: Arrays) -> Callable[[], Any]:
    """``function`` compiled, as a call of no arguments; it is given them in ``given``'s order."""
    values = tuple(given.values())
    return functools.partial(jax.jit(positional(function, given)).lower(*values).compile(), *values)


def turn(call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one call, of ``repeats`` that were enqueued behind one that does not count.

    The first call is there so that the GPU is busy while the host enqueues the others.
    """
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(repeats - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) * 1e3 / repeats


def difference(got: list[jax.Array], want: list[jax.Array]) -> float:
    """Largest difference of any element, relative to the largest element."""
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in zip(got, want, strict=True)]
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in wide)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=SHAPES, help="M,H,I")
    parser.add_argument("--pattern", default=PATTERN, help="of the kernels' names")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    _native.register()
    kernels = [
        kernel.variant
        for kernel in _manifest.installed().kernels
        if kernel.variant.stage in ("input_gradient", "weight_gradients")
        and re.search(arguments.pattern, kernel.variant.name)
    ]
    began = time.monotonic()
    for shape in arguments.shapes:
        m, h, i = map(int, shape.split(","))
        data = {dtype: problem(m, h, i, dtype) for dtype in {v.dtype for v in kernels}}
        baselines: dict[tuple, Callable] = {}
        for variant in kernels:
            given = operands_of(variant, data[variant.dtype])
            key = (variant.stage, variant.outputs, variant.weight_layout, variant.dtype)
            if key not in baselines:
                baselines[key] = bound(plain(variant), given)
            ours, theirs = bound(exported(variant), given), baselines[key]
            apart = difference(ours(), theirs())
            repeats = min(200, max(4, int(TURN / (turn(theirs, 4) * 1e-3))))
            turn(theirs, repeats)
            xla, fused = [], []
            for _ in range(arguments.turns):
                xla.append(turn(theirs, repeats))
                fused.append(turn(ours, repeats))
            after = [*xla[1:], xla[-1]]
            ratios = sorted(2 * f / (p + q) for f, p, q in zip(fused, xla, after, strict=True))
            milliseconds = statistics.median(fused)
            products = 2 if variant.stage == "input_gradient" else len(variant.outputs)
            print(
                f"{shape:>16} {variant.name:<60} {milliseconds:8.4f} ms "
                f"{statistics.median(ratios):6.3f} of XLA [{ratios[1]:.3f}, {ratios[-2]:.3f}] "
                f"{2e-9 * products * m * h * i / milliseconds:4.0f} TFLOP/s, apart {apart:.1e}",
                flush=True,
            )
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
