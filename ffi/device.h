// The device of the current context.
#pragma once

#include <string>

#include "ffi/cudnn_graph.h"
#include "ffi/driver.h"

namespace swiglu_jax {

inline int current_device_ordinal() {
  CUdevice device;
  driver::check(SWIGLU_JAX_CU(cuCtxGetDevice)(&device), "cuCtxGetDevice");
  return device;
}

namespace cudnn {

// The current context's device with a new cuDNN handle for it.
inline Device current_device_with_handle() {
  const CUdevice ordinal = current_device_ordinal();
  int major = 0;
  int minor = 0;
  driver::check(SWIGLU_JAX_CU(cuDeviceGetAttribute)(
                    &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ordinal),
                "cuDeviceGetAttribute");
  driver::check(SWIGLU_JAX_CU(cuDeviceGetAttribute)(
                    &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, ordinal),
                "cuDeviceGetAttribute");
  Device device;
  device.handle = create_handle();
  device.sm_version = 10 * major + minor;
  return device;
}

}  // namespace cudnn
}  // namespace swiglu_jax
