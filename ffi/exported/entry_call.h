// A stage's call as the call of a kernel's entry.
#pragma once

#include <cuda.h>

#include "ffi/exported/kernel_registry.h"
#include "ffi/stage_call.h"

namespace swiglu_jax::exported {

// Checks that `kernel` serves `call`: stage, outputs, layout, dtype, divisibility. Throws Refused.
void check_serves(const SwigluJaxKernel& kernel, const StageCall& call);

// Checks the addresses of `call` for `kernel`: null, alignment. Throws Refused.
void check_addresses(const SwigluJaxKernel& kernel, const StageCall& call);

// Calls the kernel's entry on a device whose context is current. `rehearsal`: everything but the
// launch, with made-up addresses (runtime.h). Throws Refused with the entry's own text where it
// refuses its arguments or a CUDA call fails.
void call_entry(const SwigluJaxKernel& kernel, const StageCall& call, int ordinal, CUstream stream,
                bool rehearsal);

}  // namespace swiglu_jax::exported
