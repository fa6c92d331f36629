"""AOT compilation, the persistent cache, donation, threads, debugging modes, profiles' names."""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh, op, place, training_step
from support import BOUNDS, check, float64, plain, problem

from swiglu_jax import swiglu_mlp
from swiglu_jax._stages import _partitioning

ROWS, WIDTH, HIDDEN = 8, 16, 32
BOUND = 20 * BOUNDS["float32"]
ROOT = Path(__file__).parents[1]


def test_lowered_and_compiled_ahead(rng, implementation):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    compiled = jax.jit(training_step(op("OI", implementation))).lower(*shapes).compile()
    got, want = compiled(*arrays), training_step(plain)(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


CACHE_PROGRAM = """
import contextlib, os, sys
import jax, numpy as np, pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from cpu_fused import fused_on_cpu
from meshes import mesh, op, training_step
from support import problem

pytestmark = pytest.mark.usefixtures("on_cpu")

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
with pytest.MonkeyPatch.context() as patch, fused_on_cpu(patch) as fused:
    arrays = problem(np.random.default_rng(0), (8,), 16, 32)
    on = mesh(dp=4, tp=2)
    specs = tuple(NamedSharding(on, s) for s in (P("dp"), P("tp"), P("tp"), P(None, "tp")))
    lowered = jax.jit(training_step(op()), in_shardings=specs).lower(*arrays)
    events.clear()
    compiled = lowered.compile()
    counts = [events.count(f"/jax/compilation_cache/cache_{k}") for k in ("hits", "misses")]
    got = compiled(*(jax.device_put(a, s) for a, s in zip(arrays, specs)))
    calls = fused.take_calls(got)
    print(len(calls), {c.sizes for c in calls}, float(got[0]))
print("hits={} misses={}".format(*counts))
"""


def test_the_persistent_cache_hits_on_eight_devices_in_another_process(tmp_path):
    """The call that the partitioner replaces names no Python object of the first process."""
    tests = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": tests}
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CACHE_PROGRAM, str(tmp_path)],
            env=env, cwd=tmp_path, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert said[0][0] == said[1][0]
    assert said[0][0].startswith("16 {(2, 16, 16)}")
    assert said[0][1] == "hits=0 misses=1"
    assert said[1][1] == "hits=1 misses=0"


@contextlib.contextmanager
def _text_of(rng):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    specs = tuple(NamedSharding(mesh(dp=4), s) for s in (P("dp"), P(), P(), P()))
    yield lambda: jax.jit(lambda *a: op()(*a), in_shardings=specs).lower(*arrays).as_text()


def test_the_text_changes_with_what_the_partitioner_s_choice_depends_on(
    rng, fused_cpu, monkeypatch
):
    """Else a cached executable would outlive the kernels, or the settings, it was chosen by."""
    with _text_of(rng) as text:
        texts = {text()}
        monkeypatch.setattr(_partitioning, "digest_of_artifacts", lambda: "other kernels")
        texts.add(text())
        config = dataclasses.replace(_partitioning.config, frost_backward=False)
        monkeypatch.setattr(_partitioning, "config", config)
        texts.add(text())
        monkeypatch.setattr(_partitioning, "lowering_target", lambda: "sm_100a")
        texts.add(text())
        assert len(texts) == 4
        assert text() in texts  # and only with that


def test_donated_arguments(rng, implementation):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    want = training_step(plain)(*arrays)[1]

    def update(*a):
        return jax.tree.map(lambda w, g: w - g, a, training_step(op("OI", implementation))(*a)[1])

    donated = [jnp.array(a) for a in arrays]
    got = jax.jit(update, donate_argnums=(0, 1, 2, 3))(*donated)
    assert all(d.is_deleted() for d in donated)
    check(got, [float64(a) - float64(g) for a, g in zip(arrays, want, strict=True)], BOUND)


def test_many_threads_compile_and_run(rng, fused_cpu):
    """Different shapes on different meshes at once: partitioner callbacks run side by side."""
    problems = [problem(rng, (8 * k,), WIDTH, HIDDEN) for k in range(1, 7)]

    def one(k):
        on = mesh(dp=4, tp=2) if k % 2 else mesh(dp=2)
        names = (P("dp"), P(), P(), P())
        placed = place(problems[k], [NamedSharding(on, s) for s in names])
        return jax.jit(training_step(op()))(*placed)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = list(pool.map(one, range(6)))
    for arrays, got in zip(problems, results, strict=True):
        want = training_step(plain)(*arrays)
        check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


def test_many_threads_share_one_jitted_function(rng, implementation):
    f = jax.jit(training_step(op("OI", implementation)))
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    want = [float64(a) for a in jax.tree.leaves(training_step(plain)(*arrays))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: f(*arrays), range(16)):
            check(jax.tree.leaves(got), want, BOUND)


def test_linearized_once_used_twice(rng, implementation):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    step = jax.jit(lambda *a: jax.vjp(op("OI", implementation), *a))
    _, pull = step(*arrays)  # a vjp function is a pytree: it can leave a jit
    _, plain_pull = jax.vjp(plain, *arrays)
    for scale in (1.0, -2.0):
        dy = scale * arrays[0]
        check(jax.jit(lambda p, dy: p(dy))(pull, dy), [float64(g) for g in plain_pull(dy)], BOUND)


def test_float64(rng):
    with jax.enable_x64(True):
        arrays = problem(rng, (ROWS,), WIDTH, HIDDEN, jnp.float64)
        got = jax.jit(training_step(op("OI", "xla")))(*arrays)
        want = training_step(plain)(*arrays)
        check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], 1e-12)


@pytest.mark.parametrize("x64", [True, False])
def test_narrow_dtypes_under_either_x64_mode_and_on_a_mesh(rng, fused_cpu, x64):
    with jax.enable_x64(x64):
        arrays = problem(rng, (ROWS,), WIDTH, HIDDEN, jnp.bfloat16)
        specs = tuple(NamedSharding(mesh(dp=4), s) for s in (P("dp"), P(), P(), P()))
        got = jax.jit(op(), in_shardings=specs)(*arrays)
        assert got.dtype == jnp.bfloat16
        wide = [a.astype(jnp.float32) for a in arrays]
        check([got], [float64(plain(*wide))], 1.5 * BOUNDS["bfloat16"])


def test_debug_nans(rng, implementation):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    step = jax.jit(training_step(op("OI", implementation)))
    with jax.debug_nans(True):
        step(*arrays)
        with pytest.raises(FloatingPointError, match="nan"):
            step(arrays[0].at[0, 0].set(jnp.nan), *arrays[1:])


@pytest.mark.parametrize("value", [float("inf"), 3e38])
@pytest.mark.parametrize("how", ["eager", "jit", "grad", "jit of grad"])
def test_debug_nans_names_what_makes_one(rng, implementation, how, value):
    """Of inputs that are numbers: JAX runs the program again, piece by piece, to find it."""
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    run = op("OI", implementation)
    if "grad" in how:
        run = jax.grad(lambda *a, f=run: f(*a).sum(), (0, 1, 2, 3))
    if "jit" in how:
        run = jax.jit(run)
    x = arrays[0].at[0].set(value)
    assert not all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(run(x, *arrays[1:])))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        run(x, *arrays[1:])


def test_no_tracer_leaks(rng):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    with jax.checking_leaks():
        jax.jit(training_step(lambda *a: swiglu_mlp(*a)))(*arrays)


def test_disable_jit(rng):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    want = training_step(plain)(*arrays)
    with jax.disable_jit():
        got = training_step(op("OI", "xla"))(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


@pytest.mark.parametrize("devices", [1, 8])
def test_scopes_and_stages_are_named_in_the_compiled_program(rng, implementation, devices):
    """What a profile shows: the user's scope, the op, and the stage."""
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    on = mesh(dp=devices)
    specs = tuple(NamedSharding(on, s) for s in (P("dp"), P(), P(), P()))

    def scoped(*a):
        with jax.named_scope("layer_7"):
            return op("OI", implementation)(*a)

    compiled = jax.jit(training_step(scoped), in_shardings=specs).lower(*arrays).compile()
    names = set(re.findall(r'op_name="([^"]*)"', compiled.as_text()))
    for stage in ("swiglu_gate_up", "swiglu_down_dswiglu"):
        assert any("layer_7" in n and "swiglu_mlp" in n and stage in n for n in names), stage
    for gemm in ("swiglu_down", "swiglu_dx", "swiglu_dw_gate", "swiglu_dw_up", "swiglu_dw_down"):
        assert any("layer_7" in n and f"/{gemm}/" in n for n in names), gemm


def test_the_tracing_cache_is_hit(rng):
    """A second call with the same shapes traces nothing again."""
    traced = []

    def f(*a):
        traced.append(1)
        return swiglu_mlp(*a)

    step = jax.jit(training_step(f))
    for _ in range(3):
        step(*problem(rng, (ROWS,), WIDTH, HIDDEN))
    assert len(traced) == 1
