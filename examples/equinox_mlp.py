"""The op in Equinox, which needs no wrapper: its linear layers store weights as `[out, in]`.

    python examples/equinox_mlp.py

Trains a student to imitate a random teacher, first whole and then with all but the down projection
frozen, and prints what each keeps for the backward pass. Needs `equinox` and `optax`.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from swiglu_jax import explain, swiglu_mlp


class SwiGLU(eqx.Module):
    """A SwiGLU MLP on `[..., width]`: no `jax.vmap` is needed over the leading dimensions."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, hidden: int, *, key: jax.Array):
        """Initialize the three layers from ``key``."""
        gate, up, down = jax.random.split(key, 3)
        self.gate = eqx.nn.Linear(width, hidden, use_bias=False, key=gate)
        self.up = eqx.nn.Linear(width, hidden, use_bias=False, key=up)
        self.down = eqx.nn.Linear(hidden, width, use_bias=False, key=down)

    @property
    def weights(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gate and up `[hidden, width]`, down `[width, hidden]`."""
        return self.gate.weight, self.up.weight, self.down.weight

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[..., width]` to the same shape."""
        return swiglu_mlp(x, *self.weights)


def down_alone(mlp: SwiGLU) -> SwiGLU:
    """A filter for ``eqx.partition``: true for the down projection's weight."""
    nothing = jax.tree.map(lambda _: False, mlp)
    return eqx.tree_at(lambda m: m.down.weight, nothing, True)


def fit(
    mlp: SwiGLU, filter_spec: SwiGLU, x: jax.Array, y: jax.Array, steps: int
) -> tuple[SwiGLU, list[float]]:
    """Train the weights that ``filter_spec`` marks; the rest is not even differentiated."""
    trained, frozen = eqx.partition(mlp, filter_spec)
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(trained, state):
        def loss(trained):
            return jnp.mean(jnp.square(eqx.combine(trained, frozen)(x) - y))

        value, grads = eqx.filter_value_and_grad(loss)(trained)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(trained, updates), state, value

    state = optimizer.init(trained)
    losses = []
    for _ in range(steps):
        trained, state, value = step(trained, state)
        losses.append(float(value))
    return eqx.combine(trained, frozen), losses


def run(width: int, hidden: int, tokens: int, steps: int, seed: int) -> dict:
    """Fit the whole student, then its down projection alone; return losses and bytes kept."""
    keys = jax.random.split(jax.random.key(seed), 3)
    teacher, student = (SwiGLU(width, hidden, key=key) for key in keys[:2])
    x = jax.random.normal(keys[2], (tokens, width))
    y = teacher(x)
    result = {}
    for name, filter_spec, wrt in (
        ("all weights", jax.tree.map(eqx.is_array, student), ("w_gate", "w_up", "w_down")),
        ("down alone", down_alone(student), ("w_down",)),
    ):
        _, losses = fit(student, filter_spec, x, y, steps)
        kept = explain(x, *student.weights, wrt=wrt).residuals
        result[name] = {
            "losses": losses,
            "kept": {r.name: r.bytes for r in kept},
        }
    return result


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = (("width", 32), ("hidden", 96), ("tokens", 512), ("steps", 200), ("seed", 0))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, got in run(**vars(parser.parse_args())).items():
        kept = ", ".join(f"{tensor} {size:,} bytes" for tensor, size in got["kept"].items())
        first, last = got["losses"][0], got["losses"][-1]
        print(f"{name:<12} loss {first:.5f} to {last:.5f}; kept for the backward pass: {kept}")


if __name__ == "__main__":
    main()
