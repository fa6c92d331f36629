"""Every place where this package leans on JAX internals, or on names that moved between versions.

Tested with the versions that README.md names; tests/test_compat.py fails loudly when one moves.
"""

import enum
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import core as core_internal
from jax._src import dispatch, distributed, sharding_impls, xla_bridge
from jax._src.custom_partitioning_sharding_rule import (
    ArrayMapping,
    SdyShardingRule,
    sdy_sharding_rule_to_mlir,
)
from jax._src.interpreters import mlir as mlir_internal
from jax._src.interpreters import partial_eval as partial_eval_internal
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.extend import core
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import mlir, partial_eval

# Configuration in force at the call.


def default_matmul_precision() -> str | None:
    """The precision that ``jax.default_matmul_precision`` has set here."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def shardy_partitions() -> bool:
    """Whether JAX leaves the propagation of shardings to Shardy (its default)."""
    return jax.config.jax_use_shardy_partitioner  # pyright: ignore[reportAttributeAccessIssue]


def apply_primitive(primitive: core.Primitive, *operands: Any, **params: Any) -> Any:
    """Run a primitive by itself, compiled, as JAX runs its own: with ``jax_debug_nans`` and all."""
    return dispatch.apply_primitive(primitive, *operands, **params)


def coordination_client() -> Any | None:
    """The client of ``jax.distributed``'s key-value service; None where that is not running."""
    return distributed.global_state.client


# Types of arrays.


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


# Rules on jaxprs.


def register_dce_rule(primitive: core.Primitive, rule: Callable[..., Any]) -> None:
    """Register a jaxpr dead-code-elimination rule: (used outputs, equation) to its replacement."""

    # jax 0.12 passes which operands are live between the two; a stage has no effects to ask for.
    def adapted(used: list[bool], *live_and_eqn: Any) -> Any:
        return rule(used, live_and_eqn[-1])

    partial_eval.dce_rules[primitive] = adapted


def register_remat_rule(primitive: core.Primitive, rule: Callable[..., Any]) -> None:
    """Register what jax.checkpoint keeps of a primitive: see _stages/_remat.py."""
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


class Remat(enum.Enum):
    """A remat policy's answer, where it is not to offload."""

    SAVE = enum.auto()
    RECOMPUTE = enum.auto()


def remat_case(answer: Any) -> Any:
    """A remat policy's answer: a Remat, or JAX's own Offloadable."""
    case = partial_eval_internal.ensure_enum(answer)
    if isinstance(case, partial_eval_internal.Offloadable):
        return case
    save = isinstance(case, partial_eval_internal.SaveableType)
    return Remat.SAVE if save else Remat.RECOMPUTE


def offloaded_equations(eqn: Any, where: Any) -> tuple[Any, Any, list[core.Var]]:
    """Split an equation into one that also moves its results away and one that brings them back.

    Args:
        eqn: of a primitive with multiple results.
        where: an Offloadable: memory kinds to take from and to keep in.

    Returns:
        The equation for now, the one for later, and the variables that hold the moved results.
    """
    near, far = map(core_internal.mem_kind_to_space, (where.src, where.dst))

    def now(*operands: jax.Array) -> list[jax.Array]:
        results = eqn.primitive.bind(*operands, **eqn.params)
        return [*results, *(jax.device_put(r, far, may_alias=False) for r in results)]

    def later(*moved: jax.Array) -> list[jax.Array]:
        return [jax.device_put(m, near, may_alias=False) for m in moved]

    avals = [v.aval for v in eqn.outvars]
    far_avals = [aval.update(memory_space=far) for aval in avals]
    moved = [core.Var(aval) for aval in far_avals]

    def call(function: Callable[..., Any], invars: Any, outvars: Any) -> Any:
        jaxpr = jax.make_jaxpr(function)(*(v.aval for v in invars))
        return core.new_jaxpr_eqn(
            invars, outvars, closed_call_p, {"call_jaxpr": jaxpr}, core.no_effects
        )

    outvars = list(eqn.outvars)
    return call(now, list(eqn.invars), [*outvars, *moved]), call(later, moved, outvars), moved


# Lowering and partitioning.


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule is asked to lower for: some of the program's."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def left_to_partitioner(ctx: Any) -> bool:
    """Whether XLA will divide what is being lowered among devices.

    False on one device, and inside a shard_map that is manual over every axis longer than one:
    there shapes are already those that one device sees.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext):
        sizes = context.mesh.shape
        return any(sizes[name] > 1 for name in sizes if name not in context.manual_axes)
    return context.num_devices > 1


def device_count(ctx: Any) -> int:
    """How many devices the program that is being lowered is for."""
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext):
        return context.mesh.size
    return context.num_devices


def lower_partitioned_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    message: str,
    *,
    operand_factors: Sequence[Sequence[str]],
    result_factors: Sequence[Sequence[str]],
    replicated_factors: Sequence[str],
) -> Sequence[Any]:
    """Lower to a custom call with a Shardy rule, for a registered partitioner to replace.

    Args:
        ctx: the lowering rule's context.
        target: the name that the partitioner is registered for.
        operands: values.
        message: text for the partitioner.
        operand_factors, result_factors: the rule: a name for each dimension of each tensor;
            dimensions of one name are divided alike.
        replicated_factors: names that must not be divided.
    """
    # Operands and results are of one dtype; a function for this changed its signature.
    element = mlir.ir.RankedTensorType(operands[0].type).element_type
    types: list[Any] = [mlir.ir.RankedTensorType.get(aval.shape, element) for aval in ctx.avals_out]
    call = mlir_internal.custom_call(
        target, result_types=types, operands=operands, backend_config=message
    )
    rule = SdyShardingRule(
        tuple(ArrayMapping(*names) for names in operand_factors),
        tuple(ArrayMapping(*names) for names in result_factors),
        need_replication_factors=tuple(replicated_factors),
    )
    call.attributes["sdy.sharding_rule"] = sdy_sharding_rule_to_mlir(
        rule, [operand.type for operand in operands], types
    )
    return [
        mlir_internal.lower_with_sharding_in_types(ctx, value, aval)
        for value, aval in zip(call.results, ctx.avals_out, strict=True)
    ]


def register_partitioner(target: str, partition: Callable[..., Any]) -> None:
    """Have XLA partition calls of ``target`` by ``partition``, on the CPU and on any plugin.

    Args:
        target: the custom call's name.
        partition: (operand shapes, result shapes, sharding of the first result, message) to
            (module bytecode for one device, operand shardings, sharding of every result).
    """

    def callback(
        arg_shapes: Any, arg_shardings: Any, result_shape: Any, result_sharding: Any, message: Any
    ) -> tuple[bytes, Sequence[Any], Any]:
        shapes, sharding = [result_shape], result_sharding
        if result_shape.is_tuple():
            shapes, sharding = result_shape.tuple_shapes(), result_sharding.tuple_elements()[0]
        text = message.decode() if isinstance(message, bytes) else message
        module, operands, result = partition(
            [_shape(s) for s in arg_shapes], [_shape(s) for s in shapes], sharding, text
        )
        if result_shape.is_tuple():
            result = xla_client.HloSharding.tuple_sharding(result_shape, [result] * len(shapes))
        return module, operands, result

    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        name=target,
        # The two that GSPMD's propagation asks; Shardy propagates by the rule in the call.
        prop_user_sharding=lambda sharding, *_: sharding,
        infer_sharding_from_operands=lambda *_: xla_client.HloSharding.replicate(),
        partition=callback,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)


def _shape(shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.dimensions(), shape.numpy_dtype())


def local_shape(sharding: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What one device sees of a tensor of this HloSharding."""
    tile = sharding.tile(xla_client.Shape.array_shape(shape.dtype, shape.shape))
    return jax.ShapeDtypeStruct(tile.dimensions(), shape.dtype)


@dataclass(frozen=True)
class Division:
    """How a tensor's named dimensions are divided among devices, as XLA's HloSharding says it.

    Held at that level, since the partitioner may hand over a sharding that no mesh describes.
    """

    names: tuple[str, ...]
    devices: np.ndarray | None
    """Device numbers: one axis for each name, then one for each subgroup; None: not divided."""
    subgroups: tuple[Any, ...] = ()
    """Types of the trailing axes: copies, or manual axes of a surrounding shard_map."""

    @classmethod
    def of(cls, sharding: Any, names: Sequence[str]) -> "Division":
        """Read an HloSharding of a tensor whose dimensions have these names."""
        names = tuple(names)
        if sharding.is_replicated() or sharding.is_maximal() or sharding.is_unknown():
            return cls(names, None)
        subgroups = tuple(sharding.subgroup_types())
        if not subgroups and sharding.replicate_on_last_tile_dim():
            subgroups = (xla_client.OpSharding.Type.REPLICATED,)
        tiles = sharding.tile_assignment_dimensions()
        devices = np.asarray(sharding.tile_assignment_devices(), np.int64).reshape(tiles)
        if devices.ndim != len(names) + len(subgroups):
            raise ValueError(f"cannot read sharding {sharding} of dimensions {names}")
        return cls(names, devices, subgroups)

    def of_tensor(self, names: Sequence[str]) -> Any:
        """The HloSharding of another tensor; names that this one lacks are not divided."""
        if self.devices is None:
            return xla_client.HloSharding.replicate()
        rank = len(self.names)
        shared = [self.names.index(name) for name in names if name in self.names]
        free = [k for k in range(rank) if k not in shared]
        order = [*shared, *free, *range(rank, self.devices.ndim)]
        moved = np.transpose(self.devices, order)
        sizes = iter(moved.shape)
        tiles = [next(sizes) if name in self.names else 1 for name in names]
        subgroup_sizes = self.devices.shape[rank:]
        moved = moved.reshape(*tiles, -1, *subgroup_sizes)
        types = [xla_client.OpSharding.Type.REPLICATED, *self.subgroups]
        return xla_client.HloSharding.subgroup_with_device_ordering(moved, types)


def lower_to_bytecode(function: Callable[..., Any], avals: Sequence[Any], platform: str) -> bytes:
    """``function`` of these shapes as a StableHLO module for one device, in MLIR bytecode.

    The module takes every argument, also one that ``function`` does not use.
    """
    lowered = (
        jax.jit(function, keep_unused=True).trace(*avals).lower(lowering_platforms=(platform,))
    )
    module: Any = lowered.compiler_ir("stablehlo")
    return mlir.module_to_bytecode(module)


def in_clean_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run in a thread of its own, where no mesh, default device or x64 context is in force."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="swiglu_jax-partitioning", daemon=True).start()
    return future.result()
