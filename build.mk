# The native library, built in place: its artifacts land in swiglu_jax/lib. Included by the Makefile.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
BUILD_DIR ?= build/native
# CMake and ninja from the interpreter's own environment, where pip puts them, or else from PATH.
NATIVE_PATH := $(dir $(abspath $(shell command -v $(PYTHON)))):$(PATH)

.PHONY: build native
build: native

native:
	PATH="$(NATIVE_PATH)" cmake -S . -B $(BUILD_DIR) -G Ninja -DCMAKE_BUILD_TYPE=Release \
		-DPython_EXECUTABLE="$$(command -v $(PYTHON))"
	PATH="$(NATIVE_PATH)" cmake --build $(BUILD_DIR)
	PATH="$(NATIVE_PATH)" cmake --install $(BUILD_DIR) --prefix . --strip
