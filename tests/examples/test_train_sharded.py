"""The demo's model trains alike on every kind of mesh, with its weights really split."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import train_sharded
from lm.model import ModelConfig
from lm.train import TrainConfig

MODEL = ModelConfig(vocabulary=256, layers=1, width=32, hidden=64, heads=4, dtype="float32")
HELD = {
    "fsdp=8": (32, 8),
    "dp=4,tp=2": (32, 32),
    "fsdp=4,tp=2": (8, 32),
}


@pytest.fixture(scope="module")
def alone():
    training = TrainConfig(steps=6, batch=16, length=16, learning_rate=3e-3, seed=11)
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    return training, text, train_sharded.run({"dp": 1}, MODEL, training, text)["losses"]


@pytest.mark.parametrize("mesh", HELD)
def test_losses_are_those_of_one_device(alone, mesh):
    training, text, want = alone
    result = train_sharded.run(train_sharded.parse_mesh(mesh), MODEL, training, text)
    np.testing.assert_allclose(result["losses"], want, rtol=2e-4)
    assert result["losses"][-1] < result["losses"][0] - 0.2
    assert result["held"]["blocks.0.mlp.up_proj.kernel"] == HELD[mesh]
    assert result["custom_calls"] == []  # on a CPU XLA serves


@pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=2,dp=2", "pp=2", "dp=x"])
def test_other_texts_for_a_mesh_are_refused(text):
    with pytest.raises(ValueError, match="mesh: expected axes of dp, fsdp, tp"):
        train_sharded.parse_mesh(text)


def test_the_script_prints_the_curves_side_by_side(monkeypatch, capsys):
    small = {"steps": 3, "batch": 8, "length": 16, "layers": 1, "width": 32, "hidden": 64}
    arguments = [f"--{name}={value}" for name, value in small.items()]
    arguments += ["--heads=4", "--mesh=dp=1", "--mesh=dp=2,tp=4"]
    monkeypatch.setattr("sys.argv", ["train_sharded.py", *arguments])
    monkeypatch.setattr(
        train_sharded, "load_corpus", lambda: SimpleNamespace(train=np.arange(999).astype(np.uint8))
    )
    train_sharded.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[3].split() == ["step", "dp=1", "dp=2,tp=4"]
    first, second = map(float, printed[4].split()[1:])
    assert abs(first - second) < 1e-3 * first
    assert float(printed[-1].split()[-4]) < 1e-3
