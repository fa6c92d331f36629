"""How far a program in a narrow dtype may be from the same program in float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from support import error, float64


def check_narrow(
    program: Callable[..., Any], ours: Any, theirs: Any, arrays: Sequence[Any]
) -> None:
    """``program(ours)`` of these arrays is as near to float32 as ``program(theirs)`` is.

    Rounding grows from step to step, so that no bound of its own fits every program.
    """
    wide = [a.astype(jnp.float32) for a in arrays]
    want = [float64(a) for a in jax.tree.leaves(jax.jit(program(theirs))(*wide))]
    got = jax.tree.leaves(jax.jit(program(ours))(*arrays))
    others = jax.tree.leaves(jax.jit(program(theirs))(*arrays))
    for k, (a, b, exact) in enumerate(zip(got, others, want, strict=True)):
        assert a.dtype == b.dtype
        e, bound = error(a, exact), 1.4 * error(b, exact) + 3e-3
        assert e <= bound, f"array {k}: relative L2 error {e:.3g} over {bound:.3g}"
