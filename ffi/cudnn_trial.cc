#include "ffi/cudnn_trial.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "ffi/driver.h"
#include "ffi/refused.h"

namespace swiglu_jax::cudnn {
namespace {

constexpr int64_t kElement = 2;  // bytes of bf16 and f16
// The noise repeats after a prime number of elements, so no row or column equals its neighbour.
constexpr size_t kPeriod = 524287;
// Rounding gate, up or dh to 16 bits costs a few thousandths; a wrong plan is off by about one.
constexpr double kTolerance = 2e-2;
constexpr int kRows = 4;
constexpr int kColumns = 24;

double to_double(uint16_t bits, Dtype dtype) {
  if (dtype == Dtype::kBf16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 1023;
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(fraction, -24)
                               : std::ldexp(1024 + fraction, exponent - 25));
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// `count` places of 0..size-1: the first, the last, and some between that fit no tile.
std::vector<int64_t> places(int64_t size, int count) {
  std::vector<int64_t> found;
  for (int k = 0; k < count; ++k) found.push_back((size - 1) * k / std::max(1, count - 1));
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

const char* result_name(Kind kind, unsigned bit) {
  static const char* const kForward[] = {"h", "gate", "up"};
  static const char* const kBackward[] = {"dgate", "dup", "h"};
  if (kind == Kind::kDgrad) return "dh";
  return (kind == Kind::kGateUp ? kForward : kBackward)[bit];
}

}  // namespace

TrialBuffers::TrialBuffers(const GraphSpec& spec, CUstream stream) : spec_(spec) {
  for (int64_t bytes : spec.buffer_bytes()) {
    offsets_.push_back(total_);
    total_ += (bytes + 255) / 256 * 256;
  }
  for (unsigned bit = 0; bit < 3; ++bit) results_ += spec.outputs >> bit & 1;

  // Random signs and mantissas, magnitudes from 2^-7 to 1.
  const int mantissa = spec.dtype == Dtype::kBf16 ? 7 : 10;
  const unsigned one = spec.dtype == Dtype::kBf16 ? 127 : 15;
  std::minstd_rand random(1);
  noise_.resize(kPeriod);
  for (uint16_t& x : noise_) {
    const auto bits = static_cast<unsigned>(random());
    const unsigned exponent = one - 1 - (bits >> 16) % 7;
    x = static_cast<uint16_t>((bits & 1) << 15 | exponent << mantissa |
                              (bits >> 1 & ((1u << mantissa) - 1)));
  }

  const auto total = static_cast<size_t>(total_);
  const CUresult status = SWIGLU_JAX_CU(cuMemAlloc)(&base_, total);
  if (status != CUDA_SUCCESS) {
    throw Refused("no room for the " + std::to_string(total_ >> 20) +
                  " MiB that timing cuDNN's plans takes: " + driver::describe(status));
  }
  try {
    fill(stream);
  } catch (...) {
    // No destructor runs for an object that was never whole.
    SWIGLU_JAX_CU(cuMemFree)(base_);
    throw;
  }
}

void TrialBuffers::fill(CUstream stream) {
  const auto total = static_cast<size_t>(total_);
  for (int64_t offset : offsets_) {
    buffers_.push_back(reinterpret_cast<void*>(base_ + static_cast<CUdeviceptr>(offset)));
  }
  // The first period from the host, then doubling: what is copied is always whole periods.
  size_t done = std::min(total, noise_.size() * kElement);
  driver::check(SWIGLU_JAX_CU(cuMemcpyHtoDAsync)(base_, noise_.data(), done, stream),
                "cuMemcpyHtoDAsync");
  while (done < total) {
    const size_t more = std::min(done, total - done);
    driver::check(SWIGLU_JAX_CU(cuMemcpyDtoDAsync)(base_ + done, base_, more, stream),
                  "cuMemcpyDtoDAsync");
    done += more;
  }
  driver::check(SWIGLU_JAX_CU(cuStreamSynchronize)(stream), "cuStreamSynchronize");
}

TrialBuffers::~TrialBuffers() { SWIGLU_JAX_CU(cuMemFree)(base_); }

void TrialBuffers::poison(CUstream stream) const {
  const int64_t begin = offsets_[offsets_.size() - results_];
  driver::check(SWIGLU_JAX_CU(cuMemsetD8Async)(base_ + static_cast<CUdeviceptr>(begin), 0xff,
                                               static_cast<size_t>(total_ - begin), stream),
                "cuMemsetD8Async");
}

double TrialBuffers::operand(size_t buffer, int64_t index) const {
  const auto element = static_cast<size_t>(offsets_[buffer] / kElement + index);
  return to_double(noise_[element % kPeriod], spec_.dtype);
}

std::vector<uint16_t> TrialBuffers::result_row(size_t number, int64_t row) const {
  const size_t buffer = offsets_.size() - results_ + number;
  std::vector<uint16_t> bits(static_cast<size_t>(spec_.i));
  const auto at = static_cast<CUdeviceptr>(offsets_[buffer] + row * spec_.i * kElement);
  driver::check(SWIGLU_JAX_CU(cuMemcpyDtoH)(bits.data(), base_ + at, bits.size() * kElement),
                "cuMemcpyDtoH");
  return bits;
}

std::vector<double> TrialBuffers::expected(int64_t row, int64_t column) const {
  const auto product = [&](size_t weight) {
    const bool row_major = spec_.in_out_weights != (spec_.kind != Kind::kGateUp);
    double sum = 0;
    for (int64_t k = 0; k < spec_.h; ++k) {
      const int64_t at = row_major ? k * spec_.i + column : column * spec_.h + k;
      sum += operand(0, row * spec_.h + k) * operand(weight, at);
    }
    return sum;
  };
  double values[3] = {0, 0, 0};
  const int64_t at = row * spec_.i + column;
  if (spec_.kind == Kind::kDgrad) {
    values[0] = product(1);
  } else if (spec_.kind == Kind::kGateUp) {
    const double gate = product(1);
    const double up = product(2);
    values[0] = gate * sigmoid(gate) * up;
    values[1] = gate;
    values[2] = up;
  } else {
    const size_t first = spec_.kind == Kind::kDownDswiglu ? 2 : 1;
    const double dh = spec_.kind == Kind::kDownDswiglu ? product(1) : operand(0, at);
    const double gate = operand(first, at);
    const double up = spec_.reads_up() ? operand(first + 1, at) : 0;
    const double s = sigmoid(gate);
    values[0] = dh * up * s * (1 + gate * (1 - s));
    values[1] = dh * gate * s;
    values[2] = gate * s * up;
  }
  std::vector<double> wanted;
  for (unsigned bit = 0; bit < 3; ++bit) {
    if (spec_.outputs >> bit & 1) wanted.push_back(values[bit]);
  }
  return wanted;
}

std::string TrialBuffers::verdict(CUstream stream) const {
  driver::check(SWIGLU_JAX_CU(cuStreamSynchronize)(stream), "cuStreamSynchronize");
  std::vector<double> off(results_, 0);
  std::vector<double> size(results_, 0);
  for (int64_t row : places(spec_.m, kRows)) {
    std::vector<std::vector<uint16_t>> found;
    for (size_t number = 0; number < results_; ++number) found.push_back(result_row(number, row));
    for (int64_t column : places(spec_.i, kColumns)) {
      const std::vector<double> wanted = expected(row, column);
      for (size_t number = 0; number < results_; ++number) {
        const uint16_t bits = found[number][static_cast<size_t>(column)];
        const double difference = to_double(bits, spec_.dtype) - wanted[number];
        off[number] += difference * difference;
        size[number] += wanted[number] * wanted[number];
      }
    }
  }
  size_t number = 0;
  for (unsigned bit = 0; bit < 3; ++bit) {
    if ((spec_.outputs >> bit & 1) == 0) continue;
    const double error = std::sqrt(off[number] / size[number]);
    ++number;
    // Not `error > kTolerance`: a NaN is wrong too.
    if (!(error <= kTolerance)) {
      return std::string("computes a wrong ") + result_name(spec_.kind, bit) +
             ": relative error " + std::to_string(error);
    }
  }
  return "";
}

}  // namespace swiglu_jax::cudnn
