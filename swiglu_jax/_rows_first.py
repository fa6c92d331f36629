"""A function of rows and weights as one primitive, which vmap sees before custom_vjp does.

vmap of a custom_vjp function runs its backward rule for each example and sums the gradients of
what the examples share afterwards: a weight gradient for every example in memory, where the
transpose of a plain dot_general sums in the GEMM. This primitive's batching rule makes the
examples rows instead. Differentiated, it is the custom_vjp function; to a remat policy, what is
inside.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from swiglu_jax._compat import register_remat_rule
from swiglu_jax._stages import _remat

Levels = tuple[tuple[bool, ...], ...]
"""For each axis over weights, the outermost first: which operands have it, in front."""


def rows_first(name: str, of: Callable[[Any], Callable[..., jax.Array]]) -> Callable[..., Any]:
    """Make the primitive.

    Args:
        name: the primitive's.
        of: options (hashable) to a custom_vjp or custom_jvp function of x [..., H] and weights,
            with a result of x's shape.

    Returns:
        A function of the same arguments, and of ``options``.
    """
    primitive = core.Primitive(name)

    @functools.cache
    def function(options: Any, levels: Levels) -> Any:
        # Its own jit lets eager, undifferentiated calls inside shard_map through, which
        # custom_vjp with symbolic_zeros refuses.
        return jax.jit(_mapped(of(options), levels))

    @functools.cache
    def undifferentiated(options: Any, levels: Levels) -> Any:
        return _mapped(inspect.unwrap(of(options)), levels)

    def evaluate(*operands: Any, options: Any, levels: Levels) -> Any:
        return function(options, levels)(*operands)

    def abstract(*avals: Any, options: Any, levels: Levels) -> Any:
        (out,) = jax.make_jaxpr(function(options, levels))(*avals).out_avals
        return out

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, options: Any, levels: Levels
    ) -> tuple[Any, Any]:
        moving = [not isinstance(t, ad.Zero) for t in tangents]

        def of_moving(*moved: Any) -> Any:
            given = iter(moved)
            full = [next(given) if m else p for p, m in zip(primals, moving, strict=True)]
            return function(options, levels)(*full)

        primals_in = tuple(p for p, m in zip(primals, moving, strict=True) if m)
        tangents_in = tuple(t for t, m in zip(tangents, moving, strict=True) if m)
        return jax.jvp(of_moving, primals_in, tangents_in)

    def batch(
        operands: Sequence[Any], dims: Sequence[int | None], *, options: Any, levels: Levels
    ) -> tuple[Any, int]:
        mapped = tuple(d is not None for d in dims)
        rows_alone = mapped[0] and not any(mapped[1:])
        # More rows go behind the axes over weights that x has.
        at = sum(level[0] for level in levels) if rows_alone else 0
        moved = [
            jnp.moveaxis(a, d, at) if d is not None else a
            for a, d in zip(operands, dims, strict=True)
        ]
        if not rows_alone:
            levels = (mapped, *levels)
        result = primitive.bind(*moved, options=options, levels=levels)
        return result, len(levels) if rows_alone else 0

    def keep(
        policy: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
    ) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
        """What jax.checkpoint keeps of an undifferentiated call, as _stages/_remat.py returns it.

        The policy is asked about what is inside; the call stays whole where that lets it, for
        vmap and derivatives of higher order to find.
        """
        needs = [v for v, there in zip(eqn.invars, instantiated, strict=True) if not there]
        if any(unknown):
            return None, eqn, [True], [True], needs
        inside = _remat.called(undifferentiated(**eqn.params), eqn.invars, eqn.outvars)
        now, later, _, (again,), kept = _remat.split(policy, unknown, instantiated, inside)
        if not again:
            return eqn, None, [False], [False], []
        if all(v in eqn.invars for v in kept):
            return eqn, eqn, [False], [True], needs
        return now, later, [False], [True], kept

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=False))
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    register_remat_rule(primitive, keep)

    def bind(*operands: Any, options: Any) -> Any:
        return primitive.bind(*operands, options=options, levels=())

    return bind


def _mapped(f: Callable[..., Any], levels: Levels) -> Callable[..., Any]:
    """``f`` under a vmap for each of the levels."""
    for mapped in reversed(levels):
        f = jax.vmap(f, tuple(0 if m else None for m in mapped))
    return f
