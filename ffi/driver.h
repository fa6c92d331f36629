// The CUDA driver API, opened when first needed.
//
// Nothing here links against libcuda: a machine without a GPU can load the library, and a test can
// put a recording libcuda.so.1 under it. There is no cudart either (it refuses any driver but
// NVIDIA's own, and it is a megabyte that this library does not need).
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

namespace swiglu_jax::driver {

// The driver, or an entry point of it, that is not there; or a call to it that failed.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void* library() {
  static void* const handle = [] {
    void* opened = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (opened == nullptr) throw Error(std::string("no CUDA driver: ") + dlerror());
    return opened;
  }();
  return handle;
}

inline void* entry(const char* name) {
  void* const found = dlsym(library(), name);
  if (found == nullptr) throw Error(std::string("the CUDA driver has no ") + name);
  return found;
}

}  // namespace swiglu_jax::driver

// SWIGLU_JAX_CU(cuStreamSynchronize)(stream): looked up once per call site, at its first use, so
// that a missing entry point fails the call that needs it and no other. cuda.h renames functions to
// their versioned symbols by macro; the two levels let that happen before the name is made a string.
#define SWIGLU_JAX_STRING(x) #x
#define SWIGLU_JAX_CU(function)                                                           \
  ([]() -> decltype(&function) {                                                          \
    static const auto found = reinterpret_cast<decltype(&function)>(                      \
        ::swiglu_jax::driver::entry(SWIGLU_JAX_STRING(function)));                        \
    return found;                                                                         \
  }())

namespace swiglu_jax::driver {

inline std::string describe(CUresult status) {
  const char* name = nullptr;
  const char* text = nullptr;
  SWIGLU_JAX_CU(cuGetErrorName)(status, &name);
  SWIGLU_JAX_CU(cuGetErrorString)(status, &text);
  return std::string(name != nullptr ? name : "unknown CUDA error ") +
         (name != nullptr ? "" : std::to_string(static_cast<int>(status))) +
         (text != nullptr ? std::string(": ") + text : "");
}

inline void check(CUresult status, const char* what) {
  if (status != CUDA_SUCCESS) throw Error(std::string(what) + " failed with " + describe(status));
}

// Makes a context current for one scope.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context) {
    check(SWIGLU_JAX_CU(cuCtxPushCurrent)(context), "cuCtxPushCurrent");
  }
  ~CurrentContext() {
    CUcontext popped;
    SWIGLU_JAX_CU(cuCtxPopCurrent)(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
};

// A device's primary context, the one XLA and cuDNN use. Retained once per device, since the driver
// counts, and never released: a captured graph or a cached plan can need it until the process ends.
inline CUcontext primary_context(int device_ordinal) {
  constexpr int kMostDevices = 64;
  static std::array<std::atomic<CUcontext>, kMostDevices> contexts{};
  static std::mutex mutex;
  if (device_ordinal < 0 || device_ordinal >= kMostDevices) {
    throw Error("device: expected 0 to " + std::to_string(kMostDevices - 1) + ", got " +
                std::to_string(device_ordinal));
  }
  std::atomic<CUcontext>& kept = contexts[static_cast<size_t>(device_ordinal)];
  if (CUcontext known = kept.load(std::memory_order_acquire)) return known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (CUcontext known = kept.load(std::memory_order_relaxed)) return known;
  check(SWIGLU_JAX_CU(cuInit)(0), "cuInit");
  CUdevice device;
  check(SWIGLU_JAX_CU(cuDeviceGet)(&device, device_ordinal), "cuDeviceGet");
  CUcontext context;
  check(SWIGLU_JAX_CU(cuDevicePrimaryCtxRetain)(&context, device), "cuDevicePrimaryCtxRetain");
  kept.store(context, std::memory_order_release);
  return context;
}

}  // namespace swiglu_jax::driver
