"""Programs that make a call many times: every call runs, on its own set, and gives its results."""

import jax
import jax.numpy as jnp
import pytest
from support import float64

from swiglu_jax._repetition import repeated


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("sets", [1, 3])
def test_each_call_runs_and_gives_its_results(rng, sets, rounds):
    runs = []

    def function(a, b):
        jax.debug.callback(lambda b: runs.append(float(b)), b, ordered=False)
        return {"sum": a + b, "more": [a * 2]}

    operands = [(jnp.asarray(rng.normal(size=4)), jnp.float32(k)) for k in range(sets)]
    results = jax.block_until_ready(repeated(function, rounds)(operands))
    jax.effects_barrier()
    assert sorted(runs) == sorted(float(k) for k in range(sets) for _ in range(rounds))
    for (a, b), got in zip(operands, results, strict=True):
        assert float64(got["sum"]).tolist() == float64(a + b).tolist()
        assert float64(got["more"][0]).tolist() == float64(a * 2).tolist()


def test_all_that_a_barrier_gives_is_used(rng):
    """XLA takes from a barrier what is not, and drops what only that depended on."""
    operands = [(jnp.ones(4), jnp.ones(4) * k) for k in range(3)]
    jaxpr = jax.make_jaxpr(repeated(jnp.multiply, 2))(operands)
    (program,) = (e.params["jaxpr"].jaxpr for e in jaxpr.eqns if "jaxpr" in e.params)
    (loop,) = (e for e in program.eqns if e.primitive.name in ("scan", "while"))
    body = loop.params["jaxpr" if loop.primitive.name == "scan" else "body_jaxpr"].jaxpr
    barriers = [e for e in body.eqns if e.primitive.name == "optimization_barrier"]
    used = {v for e in body.eqns for v in e.invars if not hasattr(v, "val")} | set(body.outvars)
    assert len(barriers) == 2 * len(operands)
    assert all(v in used for e in barriers for v in e.outvars)
