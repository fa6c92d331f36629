"""Meshes of virtual CPU devices, ways to lay a problem out on them, and what XLA made of it."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from swiglu_jax import swiglu_mlp


def mesh(axis_type: AxisType = AxisType.Auto, **axes: int) -> jax.sharding.Mesh:
    """A mesh of the first CPU devices: ``mesh(dp=4, tp=2)``."""
    sizes = tuple(axes.values())
    count = 1
    for size in sizes:
        count *= size
    devices = jax.devices("cpu")[:count]
    return jax.make_mesh(sizes, tuple(axes), (axis_type,) * len(axes), devices=devices)


PLANS: dict[str, tuple[dict[str, int], tuple[P, P, P]]] = {
    # axes of the mesh; specs of x, of w_gate and w_up (I, H), and of w_down (H, I)
    "dp": ({"dp": 8}, (P("dp"), P(), P())),
    "tp": ({"tp": 4}, (P(), P("tp"), P(None, "tp"))),
    "dp x tp": ({"dp": 4, "tp": 2}, (P("dp"), P("tp"), P(None, "tp"))),
    "fsdp": ({"dp": 8}, (P("dp"), P("dp"), P(None, "dp"))),
    "fsdp on H": ({"dp": 8}, (P("dp"), P(None, "dp"), P("dp"))),
    "fsdp x tp": ({"dp": 4, "tp": 2}, (P("dp"), P("tp", "dp"), P("dp", "tp"))),
}


def shardings(plan: str, on: jax.sharding.Mesh, layout: str = "OI") -> list[NamedSharding]:
    """Shardings of x, w_gate, w_up, w_down under a plan."""
    x, first, second = PLANS[plan][1]
    if layout == "IO":
        first, second = (P(*reversed((*spec, None, None)[:2])) for spec in (first, second))
    return [NamedSharding(on, spec) for spec in (x, first, first, second)]


def place(arrays: Sequence[Any], on: Sequence[NamedSharding]) -> list[jax.Array]:
    return [jax.device_put(a, s) for a, s in zip(arrays, on, strict=True)]


def training_step(f: Callable[..., Any]) -> Callable[..., Any]:
    """Loss and all gradients, as a trainer computes them."""

    def step(*arrays: Any) -> Any:
        def loss(*a: Any) -> Any:
            y = f(*a)
            return (y.astype(jnp.promote_types(y.dtype, jnp.float32)) ** 2).mean()

        return jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays)

    return step


def op(layout: str = "OI", implementation: str | None = "fused") -> Callable[..., Any]:
    return lambda *a: swiglu_mlp(*a, weight_layout=layout, implementation=implementation)


def collectives(text: str) -> Counter[tuple[str, str]]:
    """Collectives of a compiled program: kind and shape of what each gives, counted.

    Sizes are sorted, since XLA may hold a weight's transpose.
    """
    found = re.findall(
        r"= (\([^)]*\)|\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
        r"(?:-start)?\(",
        text,
    )
    single: Counter[tuple[str, str]] = Counter()
    for shapes, kind in found:
        # XLA combines several collectives into one with a tuple of results.
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            ordered = sorted(int(size) for size in sizes.split(",") if size)
            single[kind, f"{dtype}[{','.join(map(str, ordered))}]"] += 1
    return single
