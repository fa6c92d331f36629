"""Sharded training gives the losses of one device, with every kernel split."""

import jax
import numpy as np

import train_sharded


def test_losses_are_those_of_one_device(rng):
    seed = int(rng.integers(2**31))
    result = train_sharded.run(layers=2, width=32, hidden=64, batch=64, steps=8, seed=seed)
    losses = np.asarray(result["losses"])
    np.testing.assert_allclose(losses, result["losses_on_one_device"], rtol=1e-4)
    assert losses[-1] < losses[0]
    assert np.prod(list(result["mesh"].values())) == jax.device_count()
    tensor = result["mesh"]["tensor"]
    assert result["kernel_on_one_device"] == (64 // tensor, 32)
