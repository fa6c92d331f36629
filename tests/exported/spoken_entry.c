// A kernel library whose entries launch nothing: each refuses its call with a text that says, as
// JSON, what it was given. Linked with kernel_library.c in the place of a real library's table.
#include <stdio.h>

#include "kernel_library.h"

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);

static int spoken_always(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  (void)self, (void)result;
  char text[4096];
  int at = snprintf(text, sizeof text, "<<[");
  for (int32_t k = 0; k < count; ++k) {
    const TVMFFIAny* given = &arguments[k];
    at += snprintf(text + at, sizeof text - at, "%s", k ? ", " : "");
    if (given->type_index == kTVMFFIOpaquePtr) {
      at += snprintf(text + at, sizeof text - at, "%lld", (long long)given->v_ptr);
    } else if (given->type_index == kTVMFFIDLTensorPtr) {
      const DLTensor* t = given->v_ptr;
      at += snprintf(text + at, sizeof text - at,
                     "{\"data\": %lld, \"device\": [%d, %d], \"dtype\": [%d, %d, %d], \"offset\": "
                     "%lld, \"dims\": [",
                     (long long)t->data, t->device.device_type, t->device.device_id, t->dtype.code,
                     t->dtype.bits, t->dtype.lanes, (long long)t->byte_offset);
      for (int d = 0; d < t->ndim; ++d) {
        at += snprintf(text + at, sizeof text - at, "%s[%lld, %lld]", d ? ", " : "",
                       (long long)t->shape[d], (long long)t->strides[d]);
      }
      at += snprintf(text + at, sizeof text - at, "]}");
    } else {
      at += snprintf(text + at, sizeof text - at, "\"type %d\"", given->type_index);
    }
  }
  snprintf(text + at, sizeof text - at, "]>>");
  TVMFFIErrorSetRaisedFromCStr("ValueError", text);
  return -1;
}

// Lets a rehearsal pass, whose addresses are low.
static int spoken(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  const DLTensor* first = arguments[0].v_ptr;
  return (uintptr_t)first->data >> 32 == 0 ? 0 : spoken_always(self, arguments, count, result);
}

static int idle(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  (void)self, (void)arguments, (void)count, (void)result;
  return 0;
}

#define KERNEL(kernel_name, spoken_entry, kernel_stage, mask, order, oi, divisor)      \
  {.name = kernel_name, .entry = spoken_entry, .architecture = 100,                    \
   .stage = kernel_stage, .abi = kSwigluJaxCute2d, .outputs = mask,                    \
   .entry_outputs = order, .layout_oi = oi, .dlpack_code = kDLBfloat,                  \
   .m_multiple = divisor, .h_multiple = 8, .i_multiple = 8, .alignment = 16,           \
   .residual_alignment = 16}
#define ORDER(a, b, c) {a, b, c}

static const SwigluJaxKernel kernels[] = {
    KERNEL("gate_up_oi", spoken, kSwigluJaxGateUp, 7, ORDER(0, 1, 2), 1, 1),
    KERNEL("gate_up_io", spoken, kSwigluJaxGateUp, 7, ORDER(0, 1, 2), 0, 1),
    KERNEL("gate_up_h_last", spoken, kSwigluJaxGateUp, 3, ORDER(1, 0, -1), 1, 1),
    KERNEL("down_oi", spoken, kSwigluJaxDownDswiglu, 7, ORDER(0, 1, 2), 1, 1),
    KERNEL("down_rehearsed", spoken_always, kSwigluJaxDownDswiglu, 7, ORDER(0, 1, 2), 1, 1),
    KERNEL("down_idle", idle, kSwigluJaxDownDswiglu, 7, ORDER(0, 1, 2), 1, 1),
    KERNEL("down_io", spoken, kSwigluJaxDownDswiglu, 3, ORDER(0, 1, -1), 0, 1),
    KERNEL("input_oi", spoken, kSwigluJaxInputGradient, 1, ORDER(0, -1, -1), 1, 1),
    KERNEL("input_io", spoken, kSwigluJaxInputGradient, 1, ORDER(0, -1, -1), 0, 1),
    KERNEL("weights_oi", spoken, kSwigluJaxWeightGradients, 7, ORDER(0, 1, 2), 1, 1),
    KERNEL("weights_io", spoken, kSwigluJaxWeightGradients, 7, ORDER(0, 1, 2), 0, 1),
    KERNEL("weights_first", spoken, kSwigluJaxWeightGradients, 3, ORDER(0, 1, -1), 1, 1),
    KERNEL("weights_up", spoken, kSwigluJaxWeightGradients, 2, ORDER(1, -1, -1), 0, 1),
    KERNEL("weights_down", spoken, kSwigluJaxWeightGradients, 4, ORDER(2, -1, -1), 0, 1),
    KERNEL("down_dup", spoken, kSwigluJaxDownDswiglu, 2, ORDER(1, -1, -1), 0, 64),
};
const SwigluJaxKernelLibrary swiglu_jax_kernel_library = {
    SWIGLU_JAX_KERNEL_LIBRARY_VERSION, sizeof(kernels) / sizeof(kernels[0]), kernels};
