// What the host code of an exported kernel calls, over the driver API.
#pragma once

#include <cuda.h>

#include <string>

#include "kernel_library.h"

namespace swiglu_jax::exported {

// One call of an entry, from the side of the functions that it calls back.
struct EntryCall {
  int ordinal = 0;
  CUstream stream = nullptr;
  // Everything but the launch: the kernel's module is loaded and its attributes are set, so that
  // none of that happens inside a stream capture. Addresses may be made up.
  bool rehearsal = false;

  // Filled by the callbacks.
  int launches = 0;
  CUresult failed = CUDA_SUCCESS;  // a status that the entry itself does not look at
  std::string error;               // what the entry raised
};

// Makes `call` the one that callbacks on this thread belong to.
class CurrentCall {
 public:
  explicit CurrentCall(EntryCall* call);
  ~CurrentCall();
  CurrentCall(const CurrentCall&) = delete;
  CurrentCall& operator=(const CurrentCall&) = delete;

 private:
  EntryCall* outer_;
};

// The table that kernel libraries are given. Its functions may only be called by an entry, within a
// CurrentCall and with the device's context current.
const SwigluJaxRuntime& runtime();

}  // namespace swiglu_jax::exported
