"""JAX internals that the package leans on: each is used here, so that a move fails by name."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as policies
from jax._src.lib import xla_client
from jax.extend import core
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh

import swiglu_jax
from swiglu_jax import _compat
from swiglu_jax._stages import STAGES

pytestmark = pytest.mark.usefixtures("on_cpu")

PACKAGE = Path(swiglu_jax.__file__).parent


def test_only_compat_imports_jax_internals():
    offenders = [
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*.py")
        if path.name != "_compat.py"
        and re.search(r"jax\._src|(from|import) jaxlib", path.read_text())
    ]
    assert offenders == []


def test_configuration_reads_what_is_in_force():
    assert _compat.default_matmul_precision() is None
    with jax.default_matmul_precision("highest"):
        assert _compat.default_matmul_precision() == "highest"
    assert _compat.shardy_partitions()


def test_types_of_arrays():
    x = jnp.ones((4, 2))
    assert _compat.varying_axes(x) == frozenset()
    assert _compat.explicit_sharding(x) is None
    seen = []
    on = mesh(a=2, b=2)

    def look(x, y):
        seen.extend([_compat.varying_axes(x), _compat.varying_axes(y)])
        return x + y

    jax.shard_map(look, mesh=on, in_specs=(P("a"), P(None)), out_specs=P("a"))(x, x[:2])
    assert seen == [{"a"}, frozenset()]
    explicit = mesh(AxisType.Explicit, a=2)
    placed = jax.device_put(x, NamedSharding(explicit, P("a")))
    with jax.set_mesh(explicit):
        assert _compat.explicit_sharding(placed).spec == P("a", None)


# Every way to divide two leading dimensions and I over a mesh of three axes, with some axes
# left out (copies) and some shared by a dimension.
DIVISIONS = [P("a", None, "b"), P("a", "b", "c"), P(("a", "c"), None, "b"), P(None, "c"), P(),
             P(None, None, ("b", "a")), P("b"), P(("c", "b"), "a")]  # fmt: skip


def _hlo(spec, rank):
    return NamedSharding(mesh(a=2, b=2, c=2), spec)._to_xla_hlo_sharding(rank)


@pytest.mark.parametrize("spec", DIVISIONS, ids=str)
def test_a_division_gives_each_tensor_its_named_sharding(spec):
    names = ("l0", "l1", "i")
    division = _compat.Division.of(_hlo(spec, 3), names)
    full = dict(zip(names, (*spec, None, None, None), strict=False))
    shape = {"l0": 8, "l1": 16, "i": 32, "h": 64}
    for wanted in (("l0", "l1", "h"), ("i", "h"), ("h", "i"), ("l0", "l1", "i"), ("h",)):
        got = division.of_tensor(wanted)
        want = _hlo(P(*(full.get(name) for name in wanted)), len(wanted))
        struct = jax.ShapeDtypeStruct([shape[n] for n in wanted], jnp.bfloat16)
        assert _compat.local_shape(got, struct) == _compat.local_shape(want, struct)
        assert _devices_by_tile(got, len(wanted)) == _devices_by_tile(want, len(wanted))


def _devices_by_tile(sharding, rank):
    """For each tile, the set of devices that hold it."""
    if sharding.is_replicated():
        return {(0,) * rank: set(range(8))}
    dims = sharding.tile_assignment_dimensions()
    devices = np.array(sharding.tile_assignment_devices()).reshape(*dims[:rank], -1)
    tiles = itertools.product(*map(range, dims[:rank]))
    return {tile: set(devices[tile].tolist()) for tile in tiles}


def test_a_division_keeps_manual_axes_apart():
    kind = xla_client.OpSharding.Type
    devices = np.arange(8).reshape(2, 1, 2, 2)  # l0 by two, i whole; copies by two, manual by two
    sharding = xla_client.HloSharding.subgroup_with_device_ordering(
        devices, [kind.REPLICATED, kind.MANUAL]
    )
    got = _compat.Division.of(sharding, ("l0", "i")).of_tensor(("i", "h"))
    struct = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    assert _compat.local_shape(got, struct).shape == (6, 4)
    # Device numbers of one manual position stay together, wherever XLA puts that axis.
    axis = 2 + list(got.subgroup_types()).index(kind.MANUAL)
    tiles = np.array(got.tile_assignment_devices()).reshape(got.tile_assignment_dimensions())
    assert set(np.take(tiles, 0, axis).ravel().tolist()) == {0, 2, 4, 6}


def test_a_sharding_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="cannot read sharding"):
        _compat.Division.of(_hlo(P("a", "b"), 2), ("l0", "l1", "i"))


def test_answers_of_remat_policies():
    shape = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    numbers = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    ask = lambda policy: _compat.remat_case(policy(dot_general_p, shape, shape, **numbers))  # noqa: E731
    assert ask(policies.dots_saveable) is _compat.Remat.SAVE
    assert ask(policies.dots_with_no_batch_dims_saveable) is _compat.Remat.SAVE
    assert ask(policies.nothing_saveable) is _compat.Remat.RECOMPUTE
    offload = ask(policies.offload_dot_with_no_batch_dims("device", "pinned_host"))
    assert (offload.src, offload.dst) == ("device", "pinned_host")


def test_rules_are_where_jax_looks_for_them():
    from jax._src import ad_checkpoint  # noqa: F401, PLC0415 (must still be importable)
    from jax._src.interpreters import partial_eval  # noqa: PLC0415

    for stage in STAGES.values():
        assert stage.primitive in partial_eval.dce_rules
        assert stage.primitive in partial_eval.partial_eval_jaxpr_custom_rules


def test_partitioners_of_plugins_are_registered_when_those_load():
    from jax._src import xla_bridge  # noqa: PLC0415

    names = {
        callback.keywords.get("name")
        for callback in xla_bridge._plugin_callbacks
        if hasattr(callback, "keywords")
    }
    assert {f"swiglu_jax_{name}_partitioned" for name in STAGES} <= names


def test_where_programs_are_left_to_the_partitioner():
    """One device, wholly manual shard_map: no; several devices, partly manual: yes."""
    seen = []
    probe = core.Primitive("probe")
    probe.def_abstract_eval(lambda x: x)

    counts = []
    platforms = []

    def lower(ctx, x):
        platforms.append(_compat.lowering_platforms(ctx))
        seen.append(_compat.left_to_partitioner(ctx))
        counts.append(_compat.device_count(ctx))
        return [x]

    mlir.register_lowering(probe, lower)
    x = jnp.ones((4, 4))
    on = mesh(a=2, b=2)

    def left(f, **options):
        seen.clear()
        jax.jit(f, **options).lower(x)
        return seen[-1]

    sharded = NamedSharding(on, P("a"))
    assert left(probe.bind) is False
    assert left(probe.bind, in_shardings=sharded) is True
    manual = jax.shard_map(probe.bind, mesh=on, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    assert left(manual) is False
    partly = jax.shard_map(
        probe.bind,
        mesh=on,
        in_specs=P("a"),
        out_specs=P("a"),
        axis_names={"a"},
        check_vma=False,
    )
    assert left(partly, in_shardings=sharded) is True
    assert counts == [1, 4, 4, 4]

    platforms.clear()
    jax.jit(probe.bind).trace(x).lower(lowering_platforms=("cuda", "cpu"))
    assert platforms == [("cuda", "cpu")]
    mlir.register_lowering(probe, lambda ctx, x: [x], platform="cuda")
    jax.jit(lambda x: probe.bind(x)).trace(x).lower(lowering_platforms=("cuda", "cpu"))
    assert platforms[-1] == ("cpu",)


def test_a_clean_thread_sees_no_context_and_hands_back_errors():
    def look():
        return jnp.zeros(2).dtype, jax.sharding.get_abstract_mesh().empty

    with jax.enable_x64(True), jax.set_mesh(mesh(a=2)):
        dtype, no_mesh = _compat.in_clean_thread(look)
    assert dtype == jnp.float32
    assert no_mesh

    def fail():
        raise NotImplementedError("why")

    with pytest.raises(NotImplementedError, match="why"):
        _compat.in_clean_thread(fail)


def test_modules_for_one_device_are_bytecode():
    shape = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    module = _compat.lower_to_bytecode(lambda a: a + 1, [shape], "cuda")
    assert module.startswith(b"ML\xefR")
