"""Fine-tuning trains the adapters, leaves the weights alone, and needs less memory."""

from dataclasses import replace

import pytest

import finetune_frozen
from lm.model import ModelConfig
from lm.train import TrainConfig


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def test_adapters_learn_and_weights_stay(rng, dtype):
    config = ModelConfig(256, 2, 32, 64, 2, dtype)
    base = TrainConfig(20, 4, 64, learning_rate=3e-3, seed=int(rng.integers(2**31)))
    result = finetune_frozen.run(config, base, replace(base, learning_rate=1e-2), rank=4)
    assert result["target_loss_after"] < result["target_loss_before"]
    assert not result["frozen_parameters_moved"]
    assert result["adapter_parameters"] == 2 * (32 * 4 + 4 * 96)
    sizes = result["step_bytes"]
    everything = sizes.pop("everything")
    assert all(size < everything for size in sizes.values())
    assert sizes["the last layer's norm, the head"] == min(sizes.values())
