// The contract between a library of exported kernels and the process that launches them.
//
// A kernel library holds compiled kernels and nothing that talks to a GPU. The one symbol beside its
// kernels, __tvm_ffi_swiglu_jax_kernel_library, takes the functions that it needs (`Runtime`) and
// hands back what it holds (`Library`). So it needs neither libcuda nor cudart nor libtvm_ffi, can be
// opened anywhere, and the launcher sees every call that a kernel's host code makes.
#pragma once

#include <stdint.h>
#include <tvm/ffi/c_api.h>

// Raised whenever a struct below changes.
#define SWIGLU_JAX_KERNEL_LIBRARY_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

// What the host code of exported kernels calls: CUDA runtime calls and the CuTe DSL's own helpers.
// Statuses are CUDA's: 0 is success. The names follow the calls that they stand for.
typedef struct SwigluJaxRuntime {
  int32_t version;
  int (*get_device)(int* ordinal);
  int (*set_device)(int ordinal);
  int (*device_get_attribute)(int* value, int attribute, int ordinal);
  int (*library_load_data)(void** library, const void* image);
  int (*library_get_kernel)(void** kernel, void* library, const char* name);
  int (*kernel_get_attribute)(int* value, int attribute, void* kernel, int ordinal);
  int (*kernel_set_attribute)(void* kernel, int attribute, int value, int ordinal);
  int (*tensor_map_encode_tiled)(void* map, int dtype, uint32_t rank, void* address,
                                 const uint64_t* sizes, const uint64_t* strides,
                                 const uint32_t* box, const uint32_t* element_strides,
                                 int interleave, int swizzle, int l2_promotion, int fill);
  int (*launch_kernel)(const void* config, void* kernel, void** arguments);
  // Called with every status that host code does not hand on itself.
  void (*expect_success)(int status);
  // Fills *library once per process with load, and calls prepare once for each device that calls.
  int (*init_library_once)(void** library, int (*load)(void** library),
                           int (*prepare)(void** library, int ordinal));
  void (*raise)(const char* kind, const char** parts, int32_t count);
  void (*raise_status)(int status);
  void* (*stream)(void);
} SwigluJaxRuntime;

enum {
  kSwigluJaxGateUp = 0,
  kSwigluJaxDownDswiglu = 1,
  kSwigluJaxInputGradient = 2,
  kSwigluJaxWeightGradients = 3
};
enum { kSwigluJaxCute2d = 0, kSwigluJaxFrost = 1, kSwigluJaxFrostStg = 2 };

// One kernel, as swiglu_jax/kernels/_variant.py describes it.
typedef struct SwigluJaxKernel {
  const char* name;
  TVMFFISafeCallType entry;
  int32_t architecture;      // 90, 100, ...
  int32_t stage;
  int32_t abi;
  int32_t outputs;           // bit 0 for the stage's first output in canonical order
  int32_t entry_outputs[3];  // canonical index of each output in the entry's order, then -1
  int32_t layout_oi;         // 1 for weight_layout "OI", 0 for "IO"
  int32_t dlpack_code;       // kDLBfloat or kDLFloat, 16 bits
  int64_t m_multiple;
  int64_t h_multiple;
  int64_t i_multiple;
  int64_t alignment;
  int64_t residual_alignment;  // of gate and up where they are operands
  int64_t fixed_i;           // 0: any
} SwigluJaxKernel;

typedef struct SwigluJaxKernelLibrary {
  int32_t version;
  int32_t count;
  const SwigluJaxKernel* kernels;
} SwigluJaxKernelLibrary;

#ifdef __cplusplus
}
#endif
