#include "ffi/stage_call.h"

#include <array>
#include <sstream>

namespace swiglu_jax {
namespace {

namespace ffi = xla::ffi;

struct Description {
  const char* name;
  unsigned count;
  std::array<const char*, 3> outputs;  // `count` of them, in canonical order
};

const Description& describe(Stage stage) {
  // Constants: a call may come while the process exits, after destructors of statics.
  static constexpr Description all[] = {{"gate_up", 3, {"h", "gate", "up"}},
                                        {"down_dswiglu", 3, {"dgate", "dup", "h"}},
                                        {"input_gradient", 1, {"x"}},
                                        {"weight_gradients", 3, {"w_gate", "w_up", "w_down"}}};
  return all[static_cast<size_t>(stage)];
}

struct Mismatch {
  std::string text;
};

std::string shape(ffi::AnyBuffer::Dimensions dims) {
  std::ostringstream text;
  text << '[';
  for (size_t k = 0; k < dims.size(); ++k) text << (k == 0 ? "" : ", ") << dims[k];
  text << ']';
  return text.str();
}

std::string shape(std::initializer_list<int64_t> dims) {
  const std::vector<int64_t> all(dims);
  return shape(ffi::AnyBuffer::Dimensions(all.data(), all.size()));
}

// Reads one buffer after another, and throws a Mismatch that names the one that is wrong.
class Reader {
 public:
  explicit Reader(StageCall* call) : call_(call) {}

  // A buffer of tokens: any leading dimensions, then `width` (the call's own where it is -1).
  void* tokens(const char* name, const ffi::AnyBuffer& buffer, int64_t* width) {
    check_dtype(name, buffer);
    const auto dims = buffer.dimensions();
    if (dims.size() == 0) throw Mismatch{std::string(name) + ": expected rank 1 or more, got a scalar"};
    int64_t rows = 1;
    for (size_t k = 0; k + 1 < dims.size(); ++k) rows *= dims[k];
    const int64_t last = dims[dims.size() - 1];
    if (call_->m < 0) call_->m = rows;
    if (*width < 0) *width = last;
    if (rows != call_->m || last != *width) {
      throw Mismatch{std::string(name) + ": expected " + std::to_string(call_->m) +
                     " rows of width " + std::to_string(*width) + ", got shape " + shape(dims)};
    }
    return buffer.untyped_data();
  }

  // A weight [in, out], or [out, in] where the layout says so; `out` may not be known yet.
  void* weight(const char* name, const ffi::AnyBuffer& buffer, int64_t* in, int64_t* out,
               bool transposed) {
    check_dtype(name, buffer);
    const auto dims = buffer.dimensions();
    if (dims.size() != 2) throw Mismatch{std::string(name) + ": expected rank 2, got " + shape(dims)};
    if (*out < 0) *out = dims[transposed ? 0 : 1];
    const int64_t rows = transposed ? *out : *in;
    const int64_t columns = transposed ? *in : *out;
    if (dims[0] != rows || dims[1] != columns) {
      throw Mismatch{std::string(name) + ": expected shape " + shape({rows, columns}) + ", got " +
                     shape(dims)};
    }
    return buffer.untyped_data();
  }

 private:
  void check_dtype(const char* name, const ffi::AnyBuffer& buffer) {
    const ffi::DataType dtype = buffer.element_type();
    if (first_) call_->dtype = dtype;
    first_ = false;
    if (dtype != ffi::DataType::BF16 && dtype != ffi::DataType::F16) {
      throw Mismatch{std::string(name) + ": expected bf16 or f16, got " + name_of(dtype)};
    }
    if (dtype != call_->dtype) {
      throw Mismatch{std::string(name) + ": expected the dtype of the first operand, " +
                     name_of(call_->dtype) + ", got " + name_of(dtype)};
    }
  }

  StageCall* call_;
  bool first_ = true;
};

ffi::AnyBuffer operand(const ffi::RemainingArgs& args, size_t index) {
  auto buffer = args.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) throw Mismatch{"operand " + std::to_string(index) + " is not a buffer"};
  return *buffer;
}

ffi::AnyBuffer result(const ffi::RemainingRets& rets, size_t index) {
  auto buffer = rets.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) throw Mismatch{"result " + std::to_string(index) + " is not a buffer"};
  return **buffer;
}

// Whether the call has the canonical output `bit`.
bool has(const StageCall& call, unsigned bit) { return (call.outputs >> bit & 1) != 0; }

// down_dswiglu: `up` is an operand only where dgate or the recomputed h is asked.
bool reads_up(const StageCall& call) { return has(call, 0) || has(call, 2); }

size_t operand_count(const StageCall& call) {
  switch (call.stage) {
    case Stage::kGateUp: return 3;
    case Stage::kDownDswiglu: return reads_up(call) ? 4 : 3;
    case Stage::kInputGradient: return 4;
    case Stage::kWeightGradients: break;
  }
  // x and the cotangent of each of gate and up; h and dy.
  const size_t first_layer = has(call, 0) + has(call, 1);
  return (first_layer == 0 ? 0 : 1 + first_layer) + (has(call, 2) ? 2 : 0);
}

void read_operands(const ffi::RemainingArgs& args, Reader& reader, StageCall* call) {
  size_t index = 0;
  int64_t* const h = &call->h;
  int64_t* const i = &call->i;
  const auto tokens = [&](const char* name, int64_t* width) {
    call->operands.push_back(reader.tokens(name, operand(args, index++), width));
  };
  const auto weight = [&](const char* name, int64_t* in, int64_t* out, bool transposed) {
    call->operands.push_back(reader.weight(name, operand(args, index++), in, out, transposed));
  };
  switch (call->stage) {
    case Stage::kGateUp:
      tokens("x", h);
      weight("w_gate", h, i, !call->in_out_weights);
      weight("w_up", h, i, !call->in_out_weights);
      break;
    case Stage::kDownDswiglu:
      tokens("dy", h);
      // w_down maps I to H, so as dy's right-hand side [H, I] it is the other way round.
      weight("w_down", h, i, call->in_out_weights);
      tokens("gate", i);
      if (reads_up(*call)) tokens("up", i);
      break;
    case Stage::kInputGradient:
      tokens("dgate", i);
      tokens("dup", i);
      // Likewise as right-hand sides [I, H].
      weight("w_gate", i, h, call->in_out_weights);
      weight("w_up", i, h, call->in_out_weights);
      break;
    case Stage::kWeightGradients:
      if (has(*call, 0) || has(*call, 1)) tokens("x", h);
      if (has(*call, 0)) tokens("dgate", i);
      if (has(*call, 1)) tokens("dup", i);
      if (has(*call, 2)) {
        tokens("h", i);
        tokens("dy", h);
      }
      break;
  }
}

void* read_result(const std::string& name, unsigned bit, const ffi::AnyBuffer& buffer,
                  Reader& reader, StageCall* call) {
  switch (call->stage) {
    case Stage::kGateUp:
    case Stage::kDownDswiglu: return reader.tokens(name.c_str(), buffer, &call->i);
    case Stage::kInputGradient: return reader.tokens(name.c_str(), buffer, &call->h);
    case Stage::kWeightGradients: break;
  }
  const bool down = bit == 2;
  int64_t* const in = down ? &call->i : &call->h;
  int64_t* const out = down ? &call->h : &call->i;
  return reader.weight(name.c_str(), buffer, in, out, !call->in_out_weights);
}

void decode_or_throw(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t outputs,
                     std::string_view weight_layout, StageCall* call) {
  const Description& stage = describe(call->stage);
  if (outputs < 1 || outputs >= int64_t{1} << stage.count) {
    throw Mismatch{"attribute outputs: expected a set of " + std::to_string(stage.count) +
                   " as a bitmask, got " + std::to_string(outputs)};
  }
  if (weight_layout != "OI" && weight_layout != "IO") {
    throw Mismatch{"attribute weight_layout: expected \"OI\" or \"IO\", got \"" +
                   std::string(weight_layout) + "\""};
  }
  call->outputs = static_cast<unsigned>(outputs);
  call->in_out_weights = weight_layout == "IO";
  call->m = call->h = call->i = -1;

  const size_t operands = operand_count(*call);
  if (args.size() != operands) {
    throw Mismatch{"expected " + std::to_string(operands) + " operands, got " +
                   std::to_string(args.size())};
  }
  Reader reader(call);
  read_operands(args, reader, call);

  size_t count = 0;
  for (unsigned bit = 0; bit < stage.count; ++bit) count += has(*call, bit);
  if (rets.size() != count && rets.size() != count + 1) {
    throw Mismatch{"expected " + std::to_string(count) + " results and perhaps scratch, got " +
                   std::to_string(rets.size())};
  }
  size_t index = 0;
  for (unsigned bit = 0; bit < stage.count; ++bit) {
    if (!has(*call, bit)) continue;
    const std::string name = std::string("result ") + stage.outputs[bit];
    call->results.push_back(read_result(name, bit, result(rets, index++), reader, call));
  }
  if (rets.size() == count + 1) {
    const ffi::AnyBuffer scratch = result(rets, count);
    if (scratch.element_type() != ffi::DataType::U8) {
      throw Mismatch{"scratch: expected uint8, got " + name_of(scratch.element_type())};
    }
    call->scratch = scratch.untyped_data();
    call->scratch_bytes = static_cast<int64_t>(scratch.element_count());
  }
}

}  // namespace

const char* name_of(Stage stage) { return describe(stage).name; }

std::string name_of(ffi::DataType dtype) {
  if (dtype == ffi::DataType::BF16) return "bf16";
  if (dtype == ffi::DataType::F16) return "f16";
  return "XLA's dtype number " + std::to_string(static_cast<int>(dtype));
}

bool writes_nothing(const StageCall& call) {
  switch (call.stage) {
    case Stage::kGateUp:
    case Stage::kDownDswiglu: return call.m == 0 || call.i == 0;
    case Stage::kInputGradient: return call.m == 0 || call.h == 0;
    case Stage::kWeightGradients: break;
  }
  return call.h == 0 || call.i == 0;
}

std::optional<ffi::Error> decode(Stage stage, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                 int64_t outputs, std::string_view weight_layout, StageCall* call) {
  call->stage = stage;
  try {
    decode_or_throw(args, rets, outputs, weight_layout, call);
  } catch (const Mismatch& mismatch) {
    return ffi::Error::InvalidArgument(std::string(name_of(stage)) + ": " + mismatch.text);
  }
  return std::nullopt;
}

std::optional<ffi::Error> check_addresses(const StageCall& call) {
  const auto bad = [](const void* address) {
    return address == nullptr || reinterpret_cast<uintptr_t>(address) % 16 != 0;
  };
  const auto refusal = [](const std::string& name, const void* address) {
    return ffi::Error::InvalidArgument(name + ": expected a 16-byte aligned address, got " +
                                       std::to_string(reinterpret_cast<uintptr_t>(address)));
  };
  for (size_t k = 0; k < call.operands.size(); ++k) {
    if (bad(call.operands[k])) return refusal("operand " + std::to_string(k), call.operands[k]);
  }
  for (size_t k = 0; k < call.results.size(); ++k) {
    if (bad(call.results[k])) return refusal("result " + std::to_string(k), call.results[k]);
  }
  if (call.scratch_bytes > 0 && bad(call.scratch)) return refusal("scratch", call.scratch);
  return std::nullopt;
}

}  // namespace swiglu_jax
