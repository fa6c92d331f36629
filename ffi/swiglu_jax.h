// The C ABI that swiglu_jax/_native.py calls through ctypes.
//
// Functions that return text return a string that the caller frees with swiglu_jax_free.
#pragma once

#define SWIGLU_JAX_EXPORT __attribute__((visibility("default")))
// Raised whenever a signature, an attribute or the meaning of one changes, so that a library from
// another checkout is refused instead of misread.
#define SWIGLU_JAX_ABI_VERSION 1

extern "C" {
SWIGLU_JAX_EXPORT int swiglu_jax_abi_version();
}
