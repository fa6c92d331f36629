"""swiglu_mlp: checks, and how it is differentiated: the custom_vjp, or in both modes."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from swiglu_jax._arguments import as_arrays, check_arrays, check_options
from swiglu_jax._compat import default_matmul_precision, explicit_sharding, varying_axes
from swiglu_jax._dot import contract
from swiglu_jax._forward_mode import tangent
from swiglu_jax._residuals import ARGUMENTS, residual_plan
from swiglu_jax._rows_first import rows_first
from swiglu_jax._stages import (
    Stage,
    StageParams,
    absent,
    down_dswiglu,
    gate_up,
    input_gradient,
    weight_gradients,
)


def swiglu_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    weight_layout: str = "OI",
    implementation: str | None = None,
    forward_mode: bool = False,
) -> jax.Array:
    """SwiGLU MLP: ``(silu(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T``.

    GEMMs accumulate in float32 or wider. gate = x @ w_gate.T and up = x @ w_up.T are rounded to
    x's dtype before the activation on every route, so that routes agree to rounding; SiLU is
    evaluated in float32 or wider. The formula is SwiGLU of Shazeer, 2020, arXiv:2002.05202.

    Args:
        x: activations [..., H], of any rank from 1; leading dimensions may be empty.
        w_gate: [I, H] in layout "OI", [H, I] in "IO".
        w_up: as w_gate.
        w_down: [H, I] in layout "OI", [I, H] in "IO".
        weight_layout: "OI" as ``torch.nn.Linear`` stores weights, "IO" as a Flax kernel; both
            are read in place.
        implementation: None picks the best route that serves the call (or the environment's
            SWIGLU_JAX_IMPLEMENTATION), "xla" forces XLA, "fused" forces the fused kernels.
        forward_mode: whether ``jax.jvp``, ``jax.linearize`` and ``jax.jacfwd`` work too, which
            JAX refuses for a custom_vjp function. Reverse mode then keeps the same tensors, but
            its backward pass runs through XLA, whatever ``implementation`` says.

    Returns:
        An array of x's shape and dtype. All four arrays share one floating dtype; gradients have
        their argument's shape and dtype.

    Raises:
        TypeError: an argument is no array, is not floating, or differs from x in dtype.
        ValueError: a wrong shape or option; the error names the argument.
        NotImplementedError: "fused", where no fused kernel serves the call; lists why. Raised
            when the call is lowered: at once in eager mode, at compilation under ``jax.jit``.
    """
    implementation = check_options(weight_layout, implementation, forward_mode)
    check_arrays(x, w_gate, w_up, w_down, weight_layout)
    arguments = _varying_alike(as_arrays(x, w_gate, w_up, w_down))
    precision = default_matmul_precision()
    return _operator(
        *arguments, options=_Options(weight_layout, implementation, precision, forward_mode)
    )


def _varying_alike(arguments: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Inside shard_map, let every argument vary over the axes that any of them varies over.

    Done outside the custom_vjp, so that JAX itself sums a cotangent over the axes that its
    argument did not vary over.
    """
    axes = [varying_axes(a) for a in arguments]
    union = frozenset().union(*axes)
    return tuple(
        jax.lax.pcast(a, tuple(sorted(union - own)), to="varying") if union - own else a
        for a, own in zip(arguments, axes, strict=True)
    )


@dataclass(frozen=True)
class _Options:
    weight_layout: str
    implementation: str | None
    precision: str | None
    forward_mode: bool

    def stage(self, outputs: tuple[str, ...]) -> StageParams:
        return StageParams(outputs, self.weight_layout, self.implementation, self.precision)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Shardings:
    """On meshes with explicit axes, the sharding that each argument's cotangent must have."""

    x: Any
    w_gate: Any
    w_up: Any
    w_down: Any


def _down(options: _Options, h: jax.Array, w_down: jax.Array, sharding: Any) -> jax.Array:
    """The down projection; on meshes with explicit axes ``sharding`` is x's, and the result's."""
    side = 0 if options.weight_layout == "IO" else 1
    with jax.named_scope("swiglu_down"):
        return contract(h, -1, w_down, side, precision=options.precision, out_sharding=sharding)


def _differentiable(options: _Options) -> Any:
    """The custom_vjp function for one set of options; with forward mode, the custom_jvp one."""

    def swiglu_mlp(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> jax.Array:
        h = gate_up.bind(x, w_gate, w_up, params=options.stage(("h",)))["h"]
        return _down(options, h, w_down, explicit_sharding(x))

    if options.forward_mode:
        in_both_modes = jax.custom_jvp(swiglu_mlp)
        in_both_modes.defjvp(functools.partial(_jvp, options), symbolic_zeros=True)
        return in_both_modes
    in_reverse_mode = jax.custom_vjp(swiglu_mlp)
    in_reverse_mode.defvjp(
        functools.partial(_forward, options),
        functools.partial(_backward, options),
        symbolic_zeros=True,
    )
    return in_reverse_mode


_operator = rows_first("swiglu_mlp", _differentiable)


def _jvp(options: _Options, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The rule of both modes: the transpose of the tangent is reverse mode."""
    arguments: dict[str, Any] = dict(zip(ARGUMENTS, primals, strict=True))
    moving: dict[str, Any] = {
        name: t
        for name, t in zip(ARGUMENTS, tangents, strict=True)
        if not isinstance(t, SymbolicZero)
    }
    plan = residual_plan(frozenset(moving))
    x = arguments["x"]
    down = functools.partial(_down, options, sharding=explicit_sharding(x))
    made = _named_gate_up(options, plan.forward, arguments)
    y = down(made["h"], arguments["w_down"])
    if not moving:
        return y, jnp.zeros_like(y)
    kept = {name: (made | {"x": x})[name] for name in plan.kept}
    of_result = functools.partial(
        tangent,
        weight_layout=options.weight_layout,
        precision=options.precision,
        down=down,
    )
    # Under checkpoint its transpose computes the activation's derivatives from what is kept.
    weights = {name: arguments[name] for name in ARGUMENTS[1:]}
    return y, jax.checkpoint(of_result)(kept, weights, moving)


def _named_gate_up(
    options: _Options, outputs: tuple[str, ...], arguments: dict[str, Any]
) -> dict[str, jax.Array]:
    """The forward stage, which itself tells remat policies its results' names."""
    operands = (arguments[name] for name in ("x", "w_gate", "w_up"))
    return gate_up.bind(*operands, params=options.stage(outputs))


def _forward(options: _Options, *primals: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    """The forward rule.

    JAX keeps one residual tree per traced call and reads it when the call is transposed, even if
    it traced the call several times with different sets of differentiated arguments (a layer
    used twice under jit, scan or checkpoint). A tree that depends on the set can then give
    gradients of zero without a word. So the tree is fixed: an absent tensor is a zero-size
    array, the set travels in a shape, a kept x is a variable of its own and never a forwarded
    input in one set and not in another, and the weights are always there. Which leaves vmap has
    mapped is remembered like the tree: so a leaf is made from the same arguments in every set.
    """
    perturbed = tuple(bool(p.perturbed) for p in primals)
    x, w_gate, w_up, w_down = (p.value for p in primals)
    plan = residual_plan(frozenset(n for n, p in zip(ARGUMENTS, perturbed, strict=True) if p))

    arguments: dict[str, Any] = dict(zip(ARGUMENTS, (x, w_gate, w_up, w_down), strict=True))
    made = _named_gate_up(options, plan.forward, arguments)
    y = _down(options, made["h"], w_down, explicit_sharding(x))

    made["x"] = checkpoint_name(x, "swiglu_x") if "x" in plan.kept else x
    kept = tuple(
        made[name] if name in plan.kept else absent(made.get(name, made["h"]))
        for name in ("h", "gate", "up", "x")
    )
    the_set = jnp.zeros((0, *map(int, perturbed)), jnp.int8)
    shardings = _Shardings(*map(explicit_sharding, (x, w_gate, w_up, w_down)))
    return y, (shardings, the_set, *kept, w_gate, w_up, w_down)


def _backward(
    options: _Options, residuals: tuple[Any, ...], dy: jax.Array | SymbolicZero
) -> tuple[jax.Array | None, ...]:
    shardings, the_set, h, gate, up, x, w_gate, w_up, w_down = residuals
    if isinstance(dy, SymbolicZero):
        return None, None, None, None
    asked = frozenset(n for n, k in zip(ARGUMENTS, the_set.shape[1:], strict=True) if k)
    plan = residual_plan(asked)
    if plan.backward:
        made = down_dswiglu.bind(dy, w_down, gate, up, params=options.stage(plan.backward))
        h = made.get("h", h)
        dgate, dup = made.get("dgate"), made.get("dup")
    else:
        dgate = dup = None

    gradients: dict[str, jax.Array] = {}
    if "x" in asked:
        operands = (dgate, dup, w_gate, w_up)
        gradients |= _gradients(options, input_gradient, ("x",), operands, shardings)
    weights = tuple(name for name in ARGUMENTS[1:] if name in asked)
    if weights:
        operands = (x, dgate, dup, h, dy)
        gradients |= _gradients(options, weight_gradients, weights, operands, shardings)
    return tuple(gradients.get(name) for name in ARGUMENTS)


def _gradients(
    options: _Options,
    stage: Stage,
    outputs: tuple[str, ...],
    operands: tuple[Any, ...],
    shardings: _Shardings,
) -> dict[str, jax.Array]:
    """The gradients in ``outputs``; on meshes with explicit axes as plain products, laid out."""
    params = options.stage(outputs)
    explicit = tuple((name, getattr(shardings, name)) for name in outputs)
    if any(sharding is not None for _, sharding in explicit):
        return stage.inline(*operands, params=replace(params, out_shardings=explicit))
    return stage.bind(*operands, params=params)
