"""float32 products in full precision: a GPU's default would differ by more than rounding."""

import jax
import pytest


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield
