// The C ABI that swiglu_jax/_native.py calls through ctypes.
//
// Functions that return text return a string that the caller frees with swiglu_jax_free; where the
// text is JSON, {"error": "..."} says why there is no answer.
#pragma once

#include <stdint.h>

#define SWIGLU_JAX_EXPORT __attribute__((visibility("default")))
// Raised whenever a signature, an attribute or the meaning of one changes, so that a library from
// another checkout is refused instead of misread.
#define SWIGLU_JAX_ABI_VERSION 1

extern "C" {

// One graph, as the FFI targets speak of it.
typedef struct {
  // "gate_up", "down_dswiglu", or a step of the two-step form: "dgrad", "dswiglu".
  const char* graph;
  int64_t outputs;            // bitmask
  const char* weight_layout;  // "OI" or "IO"
  const char* dtype;          // "bfloat16" or "float16"
  int64_t m, h, i;
} swiglu_jax_graph;

SWIGLU_JAX_EXPORT int swiglu_jax_abi_version();
SWIGLU_JAX_EXPORT void swiglu_jax_free(char* text);

// Where libcudnn.so.9 is, if the process has none open when it is first needed.
SWIGLU_JAX_EXPORT void swiglu_jax_cudnn_set_library(const char* path);
// {"version": 91900}
SWIGLU_JAX_EXPORT char* swiglu_jax_cudnn_version();
// Builds a plan of a graph for a GPU that need not be here. `description`: a cuDNN device
// description (JSON). `plan`: a plan's name, or empty for the first of the heuristics' that builds.
// {"plan": "e7;12=21", "tag": ..., "workspace": 0, "names": of all plans,
//  "buffers": [{"name", "dims", "strides"}, ...] in the order in which a run takes them}
SWIGLU_JAX_EXPORT char* swiglu_jax_cudnn_build(const swiglu_jax_graph* graph,
                                               const char* description, int sm_version,
                                               const char* plan);
// Times a graph's plans on a GPU that is here.
// {"plan": fastest, "tag": ..., "us": median, "rows": M timed, "cudnn": version,
//  "trials": [{"plan", "tag", "us", "passed_over": reason or ""}, ...]}
SWIGLU_JAX_EXPORT char* swiglu_jax_cudnn_tune(const swiglu_jax_graph* graph, int device,
                                              int64_t most_plans, int64_t memory_cap);
// The pool of a graph and plan on a device: {"plan": the one it runs, "pairs": how many are built,
//  "leases": how often a call enqueued it, "captured": how many of these were being captured}
SWIGLU_JAX_EXPORT char* swiglu_jax_cudnn_pool(const swiglu_jax_graph* graph, int device,
                                              const char* plan);
}
