#include "ffi/exported/entry_call.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>

#include "ffi/driver.h"
#include "ffi/exported/runtime.h"
#include "ffi/refused.h"

namespace swiglu_jax::exported {
namespace {

constexpr int kMostTensors = 8;    // weight_gradients: 5 operands, 3 outputs
constexpr int kMostIntegers = 22;  // frost's dual GEMM with 3 outputs: 4 + 3 * 6

// An entry's arguments and the memory behind them.
class Arguments {
 public:
  Arguments(int ordinal, uint8_t dlpack_code) : ordinal_(ordinal), dlpack_code_(dlpack_code) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void integer(int64_t value) {
    TVMFFIAny& item = integers_[integer_count_++];
    item = {};
    item.type_index = kTVMFFIInt;
    item.v_int64 = value;
  }

  // All integers so far, as a tvm-ffi Array: an object header and a cell that points to the items.
  void integer_array() {
    array_.header = {};
    // One strong and one weak reference, ours: whoever takes another and drops it frees nothing.
    array_.header.combined_ref_count = uint64_t{1} << 32 | 1;
    array_.header.type_index = kTVMFFIArray;
    array_.cell.data = integers_.data();
    array_.cell.size = array_.cell.capacity = integer_count_;
    array_.cell.data_deleter = nullptr;
    TVMFFIAny& argument = next(kTVMFFIArray);
    argument.v_obj = &array_.header;
  }

  void tensor(void* data, std::initializer_list<int64_t> shape,
              std::initializer_list<int64_t> strides) {
    Tensor& made = tensors_[tensor_count_++];
    int64_t* extent = made.shape.data();
    for (const int64_t size : shape) *extent++ = size;
    int64_t* step = made.strides.data();
    for (const int64_t stride : strides) *step++ = stride;
    made.tensor = {};
    made.tensor.data = data;
    made.tensor.device = {kDLCUDA, ordinal_};
    made.tensor.ndim = static_cast<int32_t>(shape.size());
    made.tensor.dtype = {dlpack_code_, 16, 1};
    made.tensor.shape = made.shape.data();
    made.tensor.strides = made.strides.data();
    next(kTVMFFIDLTensorPtr).v_ptr = &made.tensor;
  }

  void pointer(void* value) { next(kTVMFFIOpaquePtr).v_ptr = value; }

  const TVMFFIAny* data() const { return arguments_.data(); }
  int32_t count() const { return argument_count_; }

 private:
  struct Tensor {
    DLTensor tensor;
    std::array<int64_t, 3> shape;
    std::array<int64_t, 3> strides;
  };
  struct IntegerArray {
    TVMFFIObject header;
    TVMFFISeqCell cell;
  };
  // What the compiler of the kernels emits code for. Other headers would misread every argument.
  static_assert(sizeof(TVMFFIAny) == 16 && offsetof(TVMFFIAny, v_int64) == 8);
  static_assert(sizeof(TVMFFIObject) == 24 && offsetof(TVMFFIObject, type_index) == 8);
  static_assert(sizeof(TVMFFISeqCell) == 32 && offsetof(TVMFFISeqCell, size) == 8);
  static_assert(sizeof(IntegerArray) == sizeof(TVMFFIObject) + sizeof(TVMFFISeqCell));
  static_assert(sizeof(DLTensor) == 48 && offsetof(DLTensor, shape) == 24);
  static_assert(kTVMFFIInt == 1 && kTVMFFIOpaquePtr == 4 && kTVMFFIDLTensorPtr == 7 &&
                kTVMFFIArray == 71);

  TVMFFIAny& next(int32_t type_index) {
    TVMFFIAny& argument = arguments_[argument_count_++];
    argument = {};
    argument.type_index = type_index;
    return argument;
  }

  int ordinal_;
  uint8_t dlpack_code_;
  std::array<TVMFFIAny, kMostIntegers> integers_;
  int integer_count_ = 0;
  IntegerArray array_;
  std::array<Tensor, kMostTensors> tensors_;
  int tensor_count_ = 0;
  std::array<TVMFFIAny, kMostTensors + 2> arguments_;
  int argument_count_ = 0;
};

// An address to rehearse with: never dereferenced, as well aligned as an allocation.
void* made_up_address(int index) {
  return reinterpret_cast<void*>(uintptr_t{0x100000} * static_cast<uintptr_t>(index + 1));
}

struct Addresses {
  std::vector<void*> operands;
  std::vector<void*> outputs;  // by canonical index; null where not written
};

Addresses addresses_of(const StageCall& call, bool rehearsal) {
  Addresses found{call.operands, std::vector<void*>(3, nullptr)};
  size_t result = 0;
  for (unsigned bit = 0; bit < 3; ++bit) {
    if ((call.outputs >> bit & 1) != 0) found.outputs[bit] = call.results[result++];
  }
  if (rehearsal) {
    int index = 0;
    for (void*& address : found.operands) address = made_up_address(index++);
    for (void*& address : found.outputs) address = made_up_address(index++);
  }
  return found;
}

struct Matrix {
  int64_t rows, columns;
};

// A weight as it is stored: w_gate and w_up are [I, H] in layout "OI", w_down is [H, I].
Matrix weight_of(const StageCall& call, bool down) {
  const bool hidden_first = down == call.in_out_weights;
  return hidden_first ? Matrix{call.i, call.h} : Matrix{call.h, call.i};
}

// What each operand is once its leading dimensions are one.
std::vector<Matrix> operands_of(const StageCall& call) {
  const Matrix wide{call.m, call.h};
  const Matrix hidden{call.m, call.i};
  const Matrix first = weight_of(call, false);
  switch (call.stage) {
    case Stage::kGateUp: return {wide, first, first};
    case Stage::kDownDswiglu: {
      std::vector<Matrix> all{wide, weight_of(call, true)};
      all.resize(call.operands.size(), hidden);
      return all;
    }
    case Stage::kInputGradient: return {hidden, hidden, first, first};
    case Stage::kWeightGradients: break;
  }
  std::vector<Matrix> all;
  if ((call.outputs & 3) != 0) all.push_back(wide);  // x
  if ((call.outputs & 1) != 0) all.push_back(hidden);  // dgate
  if ((call.outputs & 2) != 0) all.push_back(hidden);  // dup
  if ((call.outputs & 4) != 0) all.insert(all.end(), {hidden, wide});  // h, dy
  return all;
}

// Likewise a result, by its canonical index.
Matrix result_of(const StageCall& call, int32_t index) {
  switch (call.stage) {
    case Stage::kGateUp:
    case Stage::kDownDswiglu: return {call.m, call.i};
    case Stage::kInputGradient: return {call.m, call.h};
    case Stage::kWeightGradients: break;
  }
  return weight_of(call, index == 2);
}

// Tensors 2-D and row-major, as they are stored.
void pack_cute2d(const SwigluJaxKernel& kernel, const StageCall& call, const Addresses& at,
                 CUstream stream, Arguments* arguments) {
  const auto matrix = [&](void* data, const Matrix& of) {
    arguments->tensor(data, {of.rows, of.columns}, {of.columns, 1});
  };
  const std::vector<Matrix> operands = operands_of(call);
  for (size_t k = 0; k < operands.size(); ++k) matrix(at.operands[k], operands[k]);
  for (const int32_t output : kernel.entry_outputs) {
    if (output >= 0) matrix(at.outputs[output], result_of(call, output));
  }
  arguments->pointer(stream);
}

// One problem of C[M, N] = A[M, K] B[K, N] with N = I, K = H and a batch of 1: its sizes and every
// stride as integers, then A as (M, K, 1), B as (N, K, 1), gate and up as (1, M, N), C as (M, N, 1);
// C before gate and up in the second form.
void pack_frost(const SwigluJaxKernel& kernel, const StageCall& call, const Addresses& at,
                CUstream stream, Arguments* arguments) {
  const int64_t m = call.m;
  const int64_t k = call.h;
  const int64_t n = call.i;
  const bool gate_up = call.stage == Stage::kGateUp;
  const bool hidden_first = gate_up != call.in_out_weights;  // a weight is stored [I, H]
  const int64_t b_n = hidden_first ? k : 1;
  const int64_t b_k = hidden_first ? 1 : n;
  const size_t weights = gate_up ? 2 : 1;

  for (const int64_t size : {m, n, k, int64_t{1}}) arguments->integer(size);
  for (const int64_t stride : {k, int64_t{1}, m * k}) arguments->integer(stride);
  for (size_t w = 0; w < weights; ++w) {
    for (const int64_t stride : {b_n, b_k, n * k}) arguments->integer(stride);
  }
  for (const int32_t output : kernel.entry_outputs) {
    if (output < 0) continue;
    for (const int64_t stride : {n, int64_t{1}, m * n}) arguments->integer(stride);
  }
  arguments->integer_array();

  arguments->tensor(at.operands[0], {m, k, 1}, {k, 1, m * k});
  for (size_t w = 0; w < weights; ++w) {
    arguments->tensor(at.operands[1 + w], {n, k, 1}, {b_n, b_k, n * k});
  }
  const auto residuals = [&] {
    for (size_t r = 2; !gate_up && r < at.operands.size(); ++r) {
      arguments->tensor(at.operands[r], {1, m, n}, {m * n, n, 1});
    }
  };
  const auto outputs = [&] {
    for (const int32_t output : kernel.entry_outputs) {
      if (output >= 0) arguments->tensor(at.outputs[output], {m, n, 1}, {n, 1, m * n});
    }
  };
  if (kernel.abi == kSwigluJaxFrostStg) {
    outputs();
    residuals();
  } else {
    residuals();
    outputs();
  }
  arguments->pointer(stream);
}

Stage stage_of(const SwigluJaxKernel& kernel) {
  switch (kernel.stage) {
    case kSwigluJaxGateUp: return Stage::kGateUp;
    case kSwigluJaxDownDswiglu: return Stage::kDownDswiglu;
    case kSwigluJaxInputGradient: return Stage::kInputGradient;
    case kSwigluJaxWeightGradients: return Stage::kWeightGradients;
  }
  throw Refused("the kernel's stage has the unknown number " + std::to_string(kernel.stage));
}

const char* layout_name(bool in_out) { return in_out ? "\"IO\"" : "\"OI\""; }

void check_size(const char* name, int64_t size, int64_t multiple) {
  // Kernels count rows and columns in 32 bits, one tile beyond the end included.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;
  if (size < 1 || size > kMost) {
    throw Refused(std::string(name) + ": expected 1 to " + std::to_string(kMost) + ", got " +
                  std::to_string(size));
  }
  if (size % multiple != 0) {
    throw Refused(std::string(name) + ": expected a multiple of " + std::to_string(multiple) +
                  ", got " + std::to_string(size));
  }
}

void check_address(const std::string& name, const void* address, int64_t alignment) {
  if (address == nullptr || reinterpret_cast<uintptr_t>(address) % alignment != 0) {
    throw Refused(name + ": expected an address that is a multiple of " +
                  std::to_string(alignment) + ", got " +
                  std::to_string(reinterpret_cast<uintptr_t>(address)));
  }
}

}  // namespace

void check_serves(const SwigluJaxKernel& kernel, const StageCall& call) {
  if (stage_of(kernel) != call.stage) {
    throw Refused(std::string("the kernel is of another stage: expected ") + name_of(call.stage) +
                  ", got " + name_of(stage_of(kernel)));
  }
  const bool forward = call.stage == Stage::kGateUp || call.stage == Stage::kDownDswiglu;
  if (kernel.abi != kSwigluJaxCute2d && !forward) {
    throw Refused(std::string("no kernel of ") + name_of(call.stage) + " has frost's arguments");
  }
  if (kernel.outputs != static_cast<int32_t>(call.outputs)) {
    throw Refused("attribute outputs: the kernel writes " + std::to_string(kernel.outputs) +
                  ", got " + std::to_string(call.outputs));
  }
  if ((kernel.layout_oi != 0) == call.in_out_weights) {
    throw Refused(std::string("attribute weight_layout: the kernel reads ") +
                  layout_name(kernel.layout_oi == 0) + ", got " +
                  layout_name(call.in_out_weights));
  }
  const auto code = call.dtype == xla::ffi::DataType::BF16 ? kDLBfloat : kDLFloat;
  if (kernel.dlpack_code != code) {
    throw Refused(std::string("the kernel's dtype is ") +
                  (kernel.dlpack_code == kDLBfloat ? "bf16" : "f16") + ", got " +
                  name_of(call.dtype));
  }
  check_size("M", call.m, kernel.m_multiple);
  check_size("H", call.h, kernel.h_multiple);
  check_size("I", call.i, kernel.i_multiple);
  if (kernel.fixed_i != 0 && kernel.fixed_i != call.i) {
    throw Refused("I: the kernel serves " + std::to_string(kernel.fixed_i) + " only, got " +
                  std::to_string(call.i));
  }
}

void check_addresses(const SwigluJaxKernel& kernel, const StageCall& call) {
  for (size_t k = 0; k < call.operands.size(); ++k) {
    const bool residual = call.stage == Stage::kDownDswiglu && k >= 2;
    check_address("operand " + std::to_string(k), call.operands[k],
                  residual ? kernel.residual_alignment : kernel.alignment);
  }
  for (size_t k = 0; k < call.results.size(); ++k) {
    check_address("result " + std::to_string(k), call.results[k], kernel.alignment);
  }
}

void call_entry(const SwigluJaxKernel& kernel, const StageCall& call, int ordinal, CUstream stream,
                bool rehearsal) {
  Arguments arguments(ordinal, static_cast<uint8_t>(kernel.dlpack_code));
  const auto pack = kernel.abi == kSwigluJaxCute2d ? pack_cute2d : pack_frost;
  pack(kernel, call, addresses_of(call, rehearsal), stream, &arguments);

  EntryCall entry_call;
  entry_call.ordinal = ordinal;
  entry_call.stream = stream;
  entry_call.rehearsal = rehearsal;
  TVMFFIAny result{};
  int status;
  {
    const CurrentCall current(&entry_call);
    status = kernel.entry(nullptr, arguments.data(), arguments.count(), &result);
  }
  if (entry_call.failed != CUDA_SUCCESS) {
    // What the entry raised, if anything, says more than the status: what the driver lacks.
    const std::string failed = driver::describe(entry_call.failed);
    const bool more = !entry_call.error.empty() && entry_call.error != failed;
    throw Refused(more ? failed + ": " + entry_call.error : failed);
  }
  if (status != 0) {
    throw Refused(entry_call.error.empty() ? "it failed and gave no reason" : entry_call.error);
  }
  if (!rehearsal && entry_call.launches == 0) throw Refused("it succeeded but launched nothing");
}

}  // namespace swiglu_jax::exported
