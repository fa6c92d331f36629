"""A residual that is not kept: nothing, made from the tensor that other sets would keep."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from swiglu_jax._compat import register_remat_rule

_primitive = core.Primitive("swiglu_absent")


def absent(like: jax.Array) -> jax.Array:
    """An empty array [..., 0] that vmap and shard_map treat as they treat ``like`` [..., n].

    Not a plain slice: jax.checkpoint would compute ``like`` again for the backward pass in order
    to slice nothing out of it.
    """
    return _primitive.bind(like)


def _slice(like: jax.Array) -> jax.Array:
    return lax.slice_in_dim(like, 0, 0, axis=-1)


def _make(like: jax.Array) -> jax.Array:
    return jnp.zeros((*like.shape[:-1], 0), like.dtype)


def _abstract(aval: Any) -> Any:
    (out,) = jax.make_jaxpr(_slice)(aval).out_avals
    return out


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return absent(*primals), _slice(ad.instantiate_zeros(tangents[0]))


def _batch(operands: Sequence[Any], dims: Sequence[int]) -> tuple[Any, int]:
    return absent(jnp.moveaxis(operands[0], dims[0], 0)), 0


def _remat(
    policy: Callable[..., Any], unknown: list[bool], instantiated: list[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Kept under every policy, since it has no bytes."""
    del policy, instantiated
    if unknown[0]:  # then it is instantiated: nothing else is needed
        return None, eqn, [True], [True], []
    return eqn, None, [False], [False], []


_primitive.def_impl(_make)
_primitive.def_abstract_eval(_abstract)
mlir.register_lowering(_primitive, mlir.lower_fun(_make, multiple_results=False))
ad.primitive_jvps[_primitive] = _jvp
batching.primitive_batchers[_primitive] = _batch
register_remat_rule(_primitive, _remat)
