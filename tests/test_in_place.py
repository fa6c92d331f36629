"""The backward stage writes dgate and dup in gate's and up's memory, and spoils neither.

On a CPU that poses as a GPU: XLA aliases buffers by what the lowering says, whatever the platform.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from support import BOUNDS, LAYOUTS, check, float64, plain, problem

from swiglu_jax import swiglu_mlp

pytestmark = pytest.mark.usefixtures("on_cpu")

LEAD, WIDTH, HIDDEN = (2, 5), 16, 24
BOUND = 20 * BOUNDS["float32"]
STAGE = "swiglu_jax_test_down_dswiglu"
ALL = ("x", "w_gate", "w_up", "w_down")


def _op(layout="OI"):
    return functools.partial(swiglu_mlp, weight_layout=layout, implementation="fused")


def _step(f, names=ALL):
    def step(dy, *arrays):
        full = dict(zip(ALL, arrays, strict=True))
        y, pull = jax.vjp(lambda some: f(*(full | some).values()), {n: full[n] for n in names})
        return y, pull(dy)

    return step


def _backward_call(text: str) -> str:
    (line,) = (x for x in text.splitlines() if "custom-call(" in x and STAGE in x)
    return line


def _compare(got, want):
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_takes_no_memory_for_dgate_and_dup(rng, fused_cpu, layout):
    rows, hidden = 64, 512
    arrays = problem(rng, (rows,), WIDTH, hidden, layout=layout)
    arguments = (jnp.cos(arrays[0]), *arrays)
    compiled = jax.jit(_step(_op(layout))).lower(*arguments).compile()
    text = compiled.as_text()
    assert "output_to_operand_aliasing={{0}: (2, {}), {1}: (3, {})}" in _backward_call(text)
    assert not re.search(rf"f32\[{rows},{hidden}\]\S* copy\(", text)
    fused_cpu.overwrites = False
    jax.clear_caches()
    other = jax.jit(_step(_op(layout))).lower(*arguments).compile()
    assert "output_to_operand_aliasing" not in _backward_call(other.as_text())
    took, takes = (c.memory_analysis().temp_size_in_bytes for c in (other, compiled))
    assert took - takes == 2 * 4 * rows * hidden
    want = jax.jit(_step(functools.partial(plain, layout=layout)))(*arguments)
    _compare(compiled(*arguments), want)


@pytest.mark.parametrize("superset", [False, True], ids=["exact", "all outputs"])
@pytest.mark.parametrize(
    "names", [("x",), ("w_gate",), ("w_up",), ("w_up", "w_down"), ALL], ids="+".join
)
def test_each_set_of_outputs(rng, fused_cpu, names, superset):
    fused_cpu.superset = superset
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    arguments = (jnp.cos(arrays[0]), *arrays)
    compiled = jax.jit(_step(_op(), names)).lower(*arguments).compile()
    assert "output_to_operand_aliasing" in _backward_call(compiled.as_text())
    _compare(compiled(*arguments), jax.jit(_step(plain, names))(*arguments))


def _pulled_twice(f):
    def run(dy, *arrays):
        y, pull = jax.vjp(f, *arrays)
        return y, pull(dy), pull(jnp.sin(dy))

    return run


def _pulled_by_two_programs(f):
    def run(dy, *arrays):
        y, pull = jax.jit(lambda *a: jax.vjp(f, *a))(*arrays)
        again = jax.jit(lambda pull, dy: pull(dy))
        return y, again(pull, dy), again(pull, jnp.sin(dy))

    return run


def _residual_kept(f):
    """The hidden tensors named, saved by a policy and read again by a second derivative."""
    policy = jax.checkpoint_policies.save_only_these_names("swiglu_gate", "swiglu_up")
    kept = jax.checkpoint(f, policy=policy)

    def run(dy, *arrays):
        loss = lambda *a: (kept(*a) * dy).sum()  # noqa: E731
        gradient = jax.grad(loss, (0, 2))
        return gradient(*arrays), jax.grad(lambda *a: (gradient(*a)[0] ** 2).sum())(*arrays)

    return run


def _cotangents_mapped(f):
    def run(dy, *arrays):
        _, pull = jax.vjp(f, *arrays)
        return jax.vmap(pull)(jnp.stack([dy, jnp.cos(dy), dy * dy]))

    return run


def _scanned(f):
    def run(dy, x, *w):
        layers = [jnp.stack([a, a * 0.5, jnp.sin(a)]) for a in w]

        def loss(x, layers):
            y, _ = jax.lax.scan(lambda x, w: (x + f(x, *w), None), x, layers)
            return (y * dy).sum()

        return jax.grad(loss, (0, 1))(x, layers)

    return run


PROGRAMS = [_pulled_twice, _residual_kept, _cotangents_mapped, _scanned]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__.strip("_"))
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_what_is_read_again_is_not_written_over(rng, fused_cpu, program, jitted):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    arguments = (jnp.cos(arrays[0]), *arrays)
    run = program(_op())
    got = (jax.jit(run) if jitted else run)(*arguments)
    _compare(got, jax.jit(program(plain))(*arguments))


def test_residuals_outlive_the_program_that_reads_them(rng, fused_cpu):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    arguments = (jnp.cos(arrays[0]), *arrays)
    _compare(_pulled_by_two_programs(_op())(*arguments), _pulled_twice(plain)(*arguments))
