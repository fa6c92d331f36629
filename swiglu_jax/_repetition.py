"""A function called many times in one program, so that what it takes can be timed.

Dispatch from Python takes tens of microseconds a call, as long as a small call itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Sets = Sequence[Sequence[jax.Array]]
"""Operands of equal shapes, call by call."""


def repeated(function: Callable[..., Any], rounds: int) -> Callable[[Sets], Any]:
    """A jitted program that goes ``rounds`` times through sets of operands, call after call.

    A token goes through an optimization barrier with every call's operands, and through another
    with its results. Each barrier's outputs are all used (XLA takes from a barrier what is
    not, and what hangs on it), and each set's last results are the program's. So a compiler that
    keeps barriers, as XLA for GPUs does until all else is done, can neither drop a call, nor merge
    two, nor move one out of the loop. XLA for CPUs drops barriers early.

    Args:
        function: of one set's operands, traceable.
        rounds: at least 1.

    Returns:
        A function of the sets to the results of each.
    """

    @jax.jit
    def program(sets: Sets) -> Any:
        def once(_: Any, carry: Any) -> Any:
            token, _ = carry
            results = []
            for operands in sets:
                operands, token = lax.optimization_barrier((list(operands), token))
                made, token = lax.optimization_barrier((function(*operands), token))
                results.append(made)
            return token, results

        like = jax.eval_shape(function, *sets[0])
        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        # No trip of the loop reads the results of another, so they are written in place.
        return lax.fori_loop(0, rounds, once, (jnp.zeros((), jnp.int32), [empty] * len(sets)))[1]

    return program
