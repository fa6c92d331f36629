#include "ffi/stage_call.h"

#include <sstream>

namespace swiglu_jax {
namespace {

namespace ffi = xla::ffi;

constexpr unsigned kAllOutputs = 7;
// down_dswiglu: `up` is an operand only where dgate (bit 0) or the recomputed h (bit 2) is asked.
constexpr unsigned kOutputsThatReadUp = 1 | 4;

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
      throw Mismatch{std::string(name) + ": expected bf16 or f16, got XLA's dtype number " +
                     std::to_string(static_cast<int>(dtype))};
    }
    if (dtype != call_->dtype) {
      throw Mismatch{std::string(name) + ": expected the dtype of the first operand"};
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

void decode_or_throw(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t outputs,
                     std::string_view weight_layout, StageCall* call) {
  if (outputs < 1 || outputs > kAllOutputs) {
    throw Mismatch{"attribute outputs: expected a set of three as a bitmask, got " +
                   std::to_string(outputs)};
  }
  if (weight_layout != "OI" && weight_layout != "IO") {
    throw Mismatch{"attribute weight_layout: expected \"OI\" or \"IO\", got \"" +
                   std::string(weight_layout) + "\""};
  }
  call->outputs = static_cast<unsigned>(outputs);
  call->in_out_weights = weight_layout == "IO";
  call->m = call->h = call->i = -1;

  const bool gate_up = call->stage == Stage::kGateUp;
  const bool reads_up = !gate_up && (call->outputs & kOutputsThatReadUp) != 0;
  const size_t operands = gate_up ? 3 : 3 + (reads_up ? 1 : 0);
  if (args.size() != operands) {
    throw Mismatch{"expected " + std::to_string(operands) + " operands, got " +
                   std::to_string(args.size())};
  }
  Reader reader(call);
  if (gate_up) {
    call->operands = {
        reader.tokens("x", operand(args, 0), &call->h),
        reader.weight("w_gate", operand(args, 1), &call->h, &call->i, !call->in_out_weights),
        reader.weight("w_up", operand(args, 2), &call->h, &call->i, !call->in_out_weights)};
  } else {
    call->operands = {
        reader.tokens("dy", operand(args, 0), &call->h),
        // w_down maps I to H, so as dy's right-hand side [H, I] it is the other way round.
        reader.weight("w_down", operand(args, 1), &call->h, &call->i, call->in_out_weights),
        reader.tokens("gate", operand(args, 2), &call->i)};
    if (reads_up) call->operands.push_back(reader.tokens("up", operand(args, 3), &call->i));
  }

  static constexpr const char* kNames[2][3] = {{"h", "gate", "up"}, {"dgate", "dup", "h"}};
  size_t count = 0;
  for (unsigned bit = 0; bit < 3; ++bit) count += call->outputs >> bit & 1;
  if (rets.size() != count && rets.size() != count + 1) {
    throw Mismatch{"expected " + std::to_string(count) + " results and perhaps scratch, got " +
                   std::to_string(rets.size())};
  }
  size_t index = 0;
  for (unsigned bit = 0; bit < 3; ++bit) {
    if ((call->outputs >> bit & 1) == 0) continue;
    const std::string name = std::string("result ") + kNames[gate_up ? 0 : 1][bit];
    call->results.push_back(reader.tokens(name.c_str(), result(rets, index++), &call->i));
  }
  if (rets.size() == count + 1) {
    const ffi::AnyBuffer scratch = result(rets, count);
    if (scratch.element_type() != ffi::DataType::U8) throw Mismatch{"scratch: expected uint8"};
    call->scratch = scratch.untyped_data();
    call->scratch_bytes = static_cast<int64_t>(scratch.element_count());
  }
}

}  // namespace

std::optional<ffi::Error> decode(Stage stage, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                 int64_t outputs, std::string_view weight_layout, StageCall* call) {
  call->stage = stage;
  try {
    decode_or_throw(args, rets, outputs, weight_layout, call);
  } catch (const Mismatch& mismatch) {
    return ffi::Error::InvalidArgument(
        std::string(stage == Stage::kGateUp ? "gate_up: " : "down_dswiglu: ") + mismatch.text);
  }
  return std::nullopt;
}

std::optional<ffi::Error> check_addresses(const StageCall& call) {
  const auto bad = [](const void* address) {
    return address == nullptr || reinterpret_cast<uintptr_t>(address) % 16 != 0;
  };
  for (size_t k = 0; k < call.operands.size(); ++k) {
    if (bad(call.operands[k])) {
      return ffi::Error::InvalidArgument("operand " + std::to_string(k) +
                                         ": expected a 16-byte aligned address");
    }
  }
  for (size_t k = 0; k < call.results.size(); ++k) {
    if (bad(call.results[k])) {
      return ffi::Error::InvalidArgument("result " + std::to_string(k) +
                                         ": expected a 16-byte aligned address");
    }
  }
  if (call.scratch_bytes > 0 && bad(call.scratch)) {
    return ffi::Error::InvalidArgument("scratch: expected a 16-byte aligned address");
  }
  return std::nullopt;
}

}  // namespace swiglu_jax
