"""The parts of `examples/train_lm.py`: data, model, training loop, plot."""
