#include "ffi/swiglu_jax.h"

extern "C" int swiglu_jax_abi_version() { return SWIGLU_JAX_ABI_VERSION; }
