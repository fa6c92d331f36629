// Linked into every library of exported kernels: forwards what their host code calls to the process
// that opened the library. See kernel_library.h.
#include "kernel_library.h"

#include <stddef.h>
#include <tvm/ffi/extra/c_env_api.h>

extern const SwigluJaxKernelLibrary swiglu_jax_kernel_library;

static const SwigluJaxRuntime* runtime;

// tvm-ffi signature: one opaque pointer in (SwigluJaxRuntime), one out (SwigluJaxKernelLibrary).
// Returns -1 for another version of the contract.
__attribute__((visibility("default"))) int __tvm_ffi_swiglu_jax_kernel_library(
    void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  (void)self;
  if (count != 1 || args[0].type_index != kTVMFFIOpaquePtr) return -1;
  const SwigluJaxRuntime* given = (const SwigluJaxRuntime*)args[0].v_ptr;
  if (given == NULL || given->version != SWIGLU_JAX_KERNEL_LIBRARY_VERSION) return -1;
  runtime = given;
  result->type_index = kTVMFFIOpaquePtr;
  result->v_ptr = (void*)&swiglu_jax_kernel_library;
  return 0;
}

int _cudaGetDevice(int* ordinal) { return runtime->get_device(ordinal); }
int _cudaSetDevice(int ordinal) { return runtime->set_device(ordinal); }

int _cudaDeviceGetAttribute(int* value, int attribute, int ordinal) {
  return runtime->device_get_attribute(value, attribute, ordinal);
}

// The DSL passes no options (the six arguments after the image are null or 0).
int _cudaLibraryLoadData(void** library, const void* image, void* jit_options, void** jit_values,
                         unsigned jit_count, void* options, void** values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  if (jit_count != 0 || count != 0) return 801;  // CUDA_ERROR_NOT_SUPPORTED
  return runtime->library_load_data(library, image);
}

int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  return runtime->library_get_kernel(kernel, library, name);
}

int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int ordinal) {
  return runtime->kernel_get_attribute(value, attribute, kernel, ordinal);
}

int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int ordinal) {
  return runtime->kernel_set_attribute(kernel, attribute, value, ordinal);
}

int _cuTensorMapEncodeTiled(void* map, int dtype, uint32_t rank, void* address,
                            const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                            const uint32_t* element_strides, int interleave, int swizzle,
                            int l2_promotion, int fill) {
  return runtime->tensor_map_encode_tiled(map, dtype, rank, address, sizes, strides, box,
                                          element_strides, interleave, swizzle, l2_promotion, fill);
}

int _cudaLaunchKernelEx(const void* config, void* kernel, void** arguments) {
  return runtime->launch_kernel(config, kernel, arguments);
}

// The DSL's own aborts the process here.
void cuda_dialect_assert_success(int status) { runtime->expect_success(status); }

// raise_text is TVMFFIErrorSetRaisedFromCStr, which the runtime does not need to be told.
int cuda_dialect_init_library_once(void** library, int (*load)(void**), int (*prepare)(void**, int),
                                   void (*raise_text)(const char*, const char*)) {
  (void)raise_text;
  return runtime->init_library_once(library, load, prepare);
}

// Runs when the process ends, when the driver may be gone already and everything is freed anyhow.
void cuda_dialect_unload_library_once(void** library) { (void)library; }

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) {
  runtime->raise(kind, &message, 1);
}

void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  runtime->raise(kind, parts, count);
}

void CuteDSLRT_TVMFFISetRaisedCudaError(void* raise_parts, int status) {
  (void)raise_parts;
  runtime->raise_status(status);
}

TVMFFIStreamHandle TVMFFIEnvGetStream(int32_t device_type, int32_t ordinal) {
  (void)device_type, (void)ordinal;
  return runtime->stream();
}
