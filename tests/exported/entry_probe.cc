// Calls a kernel's entry with tensors that no XLA program could make, to see what it refuses.
//
// The CUDA calls that the entry makes are answered here with success, and launches are counted: an
// entry that refuses an argument must do so before it launches.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernel_library.h"

namespace {

std::string raised;
int launches = 0;
int object;

const SwigluJaxRuntime kRuntime = {
    SWIGLU_JAX_KERNEL_LIBRARY_VERSION,
    [](int* ordinal) { return *ordinal = 0; },
    [](int) { return 0; },
    [](int* value, int, int) { return *value = 232448, 0; },
    [](void** library, const void*) { return *library = &object, 0; },
    [](void** kernel, void*, const char*) { return *kernel = &object, 0; },
    [](int* value, int, void*, int) { return *value = 0; },
    [](void*, int, int, int) { return 0; },
    [](void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
       const uint32_t*, int, int, int, int) { return 0; },
    [](const void*, void*, void**) { return ++launches, 0; },
    [](int) {},
    [](void** library, int (*load)(void**), int (*prepare)(void**, int)) {
      return load(library) != 0 || prepare(library, 0) != 0 ? -1 : 0;
    },
    [](const char* kind, const char** parts, int32_t count) {
      raised = std::string(kind) + ": ";
      for (int32_t k = 0; k < count; ++k) raised += parts[k] != nullptr ? parts[k] : "";
    },
    [](int status) { raised = "status " + std::to_string(status); },
    []() -> void* { return nullptr; },
};

struct IntegerArray {
  TVMFFIObject header;
  TVMFFISeqCell cell;
};

}  // namespace

extern "C" {

struct ProbeTensor {
  int64_t data;
  int64_t rank;
  int64_t shape[3];
  int64_t strides[3];
  int64_t dtype_code;
  int64_t bits;
  int64_t device_type;
  int64_t device_id;
};

// The entry's error, or an empty text; `launched`: how many kernels it launched.
char* probe(const char* library, const char* name, int64_t integer_count, const int64_t* integers,
            int64_t tensor_count, const ProbeTensor* tensors, int64_t* launched) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return strdup(dlerror());
  const auto bind = reinterpret_cast<TVMFFISafeCallType>(
      dlsym(handle, "__tvm_ffi_swiglu_jax_kernel_library"));
  TVMFFIAny table{};
  table.type_index = kTVMFFIOpaquePtr;
  table.v_ptr = const_cast<SwigluJaxRuntime*>(&kRuntime);
  TVMFFIAny result{};
  if (bind(nullptr, &table, 1, &result) != 0) return strdup("the library refuses this version");
  const auto entry = reinterpret_cast<TVMFFISafeCallType>(
      dlsym(handle, (std::string("__tvm_ffi_") + name).c_str()));
  if (entry == nullptr) return strdup(dlerror());

  std::vector<TVMFFIAny> items(integer_count), arguments(tensor_count + 2);
  for (int64_t k = 0; k < integer_count; ++k) {
    items[k] = {};
    items[k].type_index = kTVMFFIInt;
    items[k].v_int64 = integers[k];
  }
  IntegerArray array{};
  array.header.type_index = kTVMFFIArray;
  array.cell.data = items.data();
  array.cell.size = array.cell.capacity = integer_count;
  arguments[0].type_index = kTVMFFIArray;
  arguments[0].v_obj = &array.header;
  std::vector<DLTensor> views(tensor_count);
  for (int64_t k = 0; k < tensor_count; ++k) {
    const ProbeTensor& given = tensors[k];
    views[k] = {};
    views[k].data = reinterpret_cast<void*>(given.data);
    views[k].device = {static_cast<DLDeviceType>(given.device_type),
                       static_cast<int32_t>(given.device_id)};
    views[k].ndim = static_cast<int32_t>(given.rank);
    views[k].dtype = {static_cast<uint8_t>(given.dtype_code), static_cast<uint8_t>(given.bits), 1};
    views[k].shape = const_cast<int64_t*>(given.shape);
    views[k].strides = const_cast<int64_t*>(given.strides);
    arguments[1 + k].type_index = kTVMFFIDLTensorPtr;
    arguments[1 + k].v_ptr = &views[k];
  }
  arguments.back().type_index = kTVMFFIOpaquePtr;
  arguments.back().v_ptr = &object;
  raised.clear();
  launches = 0;
  const int status = entry(nullptr, arguments.data(), static_cast<int32_t>(arguments.size()), &result);
  *launched = launches;
  return strdup(status == 0 ? "" : raised.empty() ? "no reason" : raised.c_str());
}

void probe_free(char* text) { std::free(text); }
}
