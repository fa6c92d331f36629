#include "ffi/exported/runtime.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <utility>

#include "ffi/driver.h"

namespace swiglu_jax::exported {
namespace {

thread_local EntryCall* current = nullptr;

// No exception may pass through a kernel's host code: a missing driver or entry point becomes a
// status, and its text is kept.
template <typename Function>
int status_of(const Function& function) {
  try {
    return static_cast<int>(function());
  } catch (const std::exception& error) {
    if (current != nullptr) current->error = error.what();
    return CUDA_ERROR_NOT_FOUND;
  }
}

int get_device(int* ordinal) {
  *ordinal = current->ordinal;
  return CUDA_SUCCESS;
}

// An entry switches to its tensors' device. The launcher has made that one current already.
int set_device(int ordinal) {
  return ordinal == current->ordinal ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUdevice device_of(int ordinal) {
  CUdevice device;
  driver::check(SWIGLU_JAX_CU(cuDeviceGet)(&device, ordinal), "cuDeviceGet");
  return device;
}

int device_get_attribute(int* value, int attribute, int ordinal) {
  return status_of([&] {
    return SWIGLU_JAX_CU(cuDeviceGetAttribute)(
        value, static_cast<CUdevice_attribute>(attribute), device_of(ordinal));
  });
}

int library_load_data(void** library, const void* image) {
  return status_of([&] {
    return SWIGLU_JAX_CU(cuLibraryLoadData)(reinterpret_cast<CUlibrary*>(library), image, nullptr,
                                            nullptr, 0, nullptr, nullptr, 0);
  });
}

// `kernel` is the host code's own, of all devices: a launch on one may read it while another is
// prepared, so it is written once, whole.
int library_get_kernel(void** kernel, void* library, const char* name) {
  return status_of([&] {
    CUkernel found = nullptr;
    const CUresult status =
        SWIGLU_JAX_CU(cuLibraryGetKernel)(&found, static_cast<CUlibrary>(library), name);
    if (status == CUDA_SUCCESS) {
      reinterpret_cast<std::atomic<void*>*>(kernel)->store(found, std::memory_order_release);
    }
    return status;
  });
}

int kernel_get_attribute(int* value, int attribute, void* kernel, int ordinal) {
  return status_of([&] {
    return SWIGLU_JAX_CU(cuKernelGetAttribute)(value, static_cast<CUfunction_attribute>(attribute),
                                               static_cast<CUkernel>(kernel), device_of(ordinal));
  });
}

int kernel_set_attribute(void* kernel, int attribute, int value, int ordinal) {
  return status_of([&] {
    return SWIGLU_JAX_CU(cuKernelSetAttribute)(static_cast<CUfunction_attribute>(attribute), value,
                                               static_cast<CUkernel>(kernel), device_of(ordinal));
  });
}

int tensor_map_encode_tiled(void* map, int dtype, uint32_t rank, void* address,
                            const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                            const uint32_t* element_strides, int interleave, int swizzle,
                            int l2_promotion, int fill) {
  if (current->rehearsal) {
    std::memset(map, 0, sizeof(CUtensorMap));
    return CUDA_SUCCESS;
  }
  static_assert(sizeof(cuuint64_t) == sizeof(uint64_t));
  return status_of([&] {
    return SWIGLU_JAX_CU(cuTensorMapEncodeTiled)(
        static_cast<CUtensorMap*>(map), static_cast<CUtensorMapDataType>(dtype), rank, address,
        reinterpret_cast<const cuuint64_t*>(sizes), reinterpret_cast<const cuuint64_t*>(strides),
        box, element_strides, static_cast<CUtensorMapInterleave>(interleave),
        static_cast<CUtensorMapSwizzle>(swizzle),
        static_cast<CUtensorMapL2promotion>(l2_promotion),
        static_cast<CUtensorMapFloatOOBfill>(fill));
  });
}

// cudaLaunchConfig_t, which the CUDA runtime keeps binary compatible.
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  size_t shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

int launch_kernel(const void* config, void* kernel, void** arguments) {
  if (current->failed != CUDA_SUCCESS) return current->failed;
  return status_of([&] {
    if (current->rehearsal) {
      // Modules load lazily; this loads the kernel into the current context. Drivers before 12.4
      // have no cuFuncLoad: there it is asking for the function that loads it.
      static const auto load =
          reinterpret_cast<CUresult (*)(CUfunction)>(dlsym(driver::library(), "cuFuncLoad"));
      CUfunction function;
      const CUresult status =
          SWIGLU_JAX_CU(cuKernelGetFunction)(&function, static_cast<CUkernel>(kernel));
      return status == CUDA_SUCCESS && load != nullptr ? load(function) : status;
    }
    const auto& given = *static_cast<const LaunchConfig*>(config);
    CUlaunchConfig launch{};
    launch.gridDimX = given.grid[0];
    launch.gridDimY = given.grid[1];
    launch.gridDimZ = given.grid[2];
    launch.blockDimX = given.block[0];
    launch.blockDimY = given.block[1];
    launch.blockDimZ = given.block[2];
    launch.sharedMemBytes = static_cast<unsigned>(given.shared_bytes);
    launch.hStream = given.stream;
    launch.attrs = given.attributes;
    launch.numAttrs = given.attribute_count;
    // The driver takes a CUkernel in the place of a CUfunction here.
    ++current->launches;
    return SWIGLU_JAX_CU(cuLaunchKernelEx)(&launch, static_cast<CUfunction>(kernel), arguments,
                                           nullptr);
  });
}

void expect_success(int status) {
  if (status != CUDA_SUCCESS && current->failed == CUDA_SUCCESS) {
    current->failed = static_cast<CUresult>(status);
  }
}

void raise(const char* kind, const char** parts, int32_t count) {
  std::string text = std::string(kind) + ": ";
  for (int32_t k = 0; k < count; ++k) {
    if (parts[k] != nullptr) text += parts[k];
  }
  current->error = std::move(text);
}

void raise_status(int status) {
  if (!current->error.empty()) return;  // status_of has kept the reason
  try {
    current->error = driver::describe(static_cast<CUresult>(status));
  } catch (const std::exception& error) {
    current->error = error.what();
  }
}

// Loads a kernel once for the process, and prepares it on the device that rehearses a call: other
// devices may be of an architecture that it is not for, or be somebody else's. A failure is an
// error of that device's call alone, and is tried again at its next.
int init_library_once(void** library, int (*load)(void**), int (*prepare)(void**, int)) {
  static std::mutex mutex;
  static auto& prepared = *new std::set<std::pair<void**, int>>;
  static_assert(sizeof(std::atomic<void*>) == sizeof(void*));
  auto* published = reinterpret_cast<std::atomic<void*>*>(library);
  if (!current->rehearsal && published->load(std::memory_order_acquire) != nullptr) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  void* loaded = published->load(std::memory_order_relaxed);
  int status = CUDA_SUCCESS;
  if (loaded == nullptr) {
    status = load(&loaded);
    if (status == CUDA_SUCCESS) published->store(loaded, std::memory_order_release);
  }
  const std::pair<void**, int> here{library, current->ordinal};
  if (status == CUDA_SUCCESS && prepared.count(here) == 0) {
    status = prepare(&loaded, current->ordinal);
    if (status == CUDA_SUCCESS) prepared.insert(here);
  }
  if (status != CUDA_SUCCESS) {
    raise_status(status);
    return -1;
  }
  return 0;
}

void* stream() { return current->stream; }

}  // namespace

CurrentCall::CurrentCall(EntryCall* call) : outer_(current) { current = call; }

CurrentCall::~CurrentCall() { current = outer_; }

const SwigluJaxRuntime& runtime() {
  static constexpr SwigluJaxRuntime table = {
      SWIGLU_JAX_KERNEL_LIBRARY_VERSION,
      get_device,
      set_device,
      device_get_attribute,
      library_load_data,
      library_get_kernel,
      kernel_get_attribute,
      kernel_set_attribute,
      tensor_map_encode_tiled,
      launch_kernel,
      expect_success,
      init_library_once,
      raise,
      raise_status,
      stream,
  };
  return table;
}

}  // namespace swiglu_jax::exported
