# Exported kernels: compiled where an object is missing (build/kernels keeps them under a digest of
# their sources and compilers), then linked into swiglu_jax/lib. Included by the Makefile.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
KERNEL_PROCESSES ?= 2

.PHONY: kernels
kernels:
	$(PYTHON) swiglu_jax/kernels/export.py --objects build/kernels --lib swiglu_jax/lib \
		--processes $(KERNEL_PROCESSES) $(addprefix --arch ,$(KERNEL_ARCHS))

# They are part of what `make build` puts into swiglu_jax/lib.
build: kernels
