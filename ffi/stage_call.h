// A stage's custom call, decoded and checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace swiglu_jax {

enum class Stage { kGateUp, kDownDswiglu, kInputGradient, kWeightGradients };

// Operands in stage order and results in canonical order, leading dimensions flattened into M.
struct StageCall {
  Stage stage;
  unsigned outputs;      // bit n for the n-th output of the stage's canonical order
  bool in_out_weights;   // layout "IO"
  xla::ffi::DataType dtype;
  int64_t m, h, i;
  std::vector<void*> operands;
  std::vector<void*> results;  // as many as `outputs` has bits
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
};

// "gate_up", "down_dswiglu", ...
const char* name_of(Stage stage);

// "bf16", "f16", or the number of another of XLA's dtypes.
std::string name_of(xla::ffi::DataType dtype);

// Whether no result has an element, so that there is nothing to do.
bool writes_nothing(const StageCall& call);

// Checks the call against the stage's contract: number of operands and results, one dtype (bf16 or
// f16), shapes that agree, at most one trailing uint8 scratch. Returns the error that names what is
// wrong, or nothing and fills `call`. Addresses are not looked at: they may not be known yet.
std::optional<xla::ffi::Error> decode(Stage stage, xla::ffi::RemainingArgs args,
                                      xla::ffi::RemainingRets rets, int64_t outputs,
                                      std::string_view weight_layout, StageCall* call);

// Checks that every address is there and on a 16-byte boundary, which vector loads and tensor maps
// rely on.
std::optional<xla::ffi::Error> check_addresses(const StageCall& call);

}  // namespace swiglu_jax
