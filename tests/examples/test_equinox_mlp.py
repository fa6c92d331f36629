"""The Equinox example: the module's value, training, and what a frozen part spares."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from support import error

import equinox_mlp


def test_value_is_that_of_equinox_layers(rng):
    mlp = equinox_mlp.SwiGLU(12, 20, key=jax.random.key(int(rng.integers(2**31))))
    x = jnp.asarray(rng.standard_normal((7, 12)), jnp.float32)

    def plain(x):
        return mlp.down(jax.nn.silu(mlp.gate(x)) * mlp.up(x))

    want = np.asarray(jax.vmap(plain)(x), np.float64)
    assert error(mlp(x), want) <= 1e-5
    assert error(eqx.filter_vmap(mlp)(x), want) <= 1e-5


def test_training_lowers_the_loss_and_keeps_less_when_frozen():
    result = equinox_mlp.run(width=16, hidden=48, tokens=128, steps=60, seed=0)
    for got in result.values():
        assert got["losses"][-1] < 0.7 * got["losses"][0]
    hidden = 128 * 48 * 4
    assert result["all weights"]["kept"] == {"gate": hidden, "up": hidden, "x": 128 * 16 * 4}
    assert result["down alone"]["kept"] == {"h": hidden}


def test_frozen_weights_stay(rng):
    mlp = equinox_mlp.SwiGLU(8, 12, key=jax.random.key(int(rng.integers(2**31))))
    x = jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)
    fitted, _ = equinox_mlp.fit(mlp, equinox_mlp.down_alone(mlp), x, -x, steps=3)
    assert (fitted.gate.weight == mlp.gate.weight).all()
    assert (fitted.up.weight == mlp.up.weight).all()
    assert (fitted.down.weight != mlp.down.weight).any()
