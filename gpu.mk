# What needs a GPU: tests, where a skipped one counts as failed, and the benchmark. Included by the
# Makefile; scripts/gpu.sh says which variables it takes.
.PHONY: gpu
gpu:
	scripts/gpu.sh
