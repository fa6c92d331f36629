"""Every place where this package leans on JAX internals, or on names that moved between versions.

Tested with the versions that README.md names; tests/test_compat.py fails loudly when one moves.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval


def default_matmul_precision() -> str | None:
    """The precision that ``jax.default_matmul_precision`` has set here."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def jit_disabled() -> bool:
    """Whether ``jax.disable_jit`` is in force here."""
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


def register_dce_rule(primitive: core.Primitive, rule: Callable[..., Any]) -> None:
    """Register a jaxpr dead-code-elimination rule."""
    partial_eval.dce_rules[primitive] = rule


def varying_axes(a: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which ``a`` varies inside shard_map; empty elsewhere."""
    aval = jax.typeof(a)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", frozenset()))


def explicit_sharding(a: jax.Array) -> Any | None:
    """``a``'s sharding where its type carries one (a mesh with explicit axes), else None."""
    sharding = getattr(jax.typeof(a), "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    explicit = jax.sharding.AxisType.Explicit
    return sharding if explicit in sharding.mesh.axis_types else None
