// The two fused stages as XLA FFI handlers for the CPU, so that the fused lowering of every
// transformation can run on virtual CPU devices. Plain loops in float32: for tests only.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Every call made, as lines of "stage outputs layout MxHxI".
std::mutex calls_mutex;
std::string calls;

void Record(const char* stage, int64_t outputs, std::string_view layout, int64_t m, int64_t h,
            int64_t i) {
  std::lock_guard<std::mutex> lock(calls_mutex);
  calls += std::string(stage) + " " + std::to_string(outputs) + " " + std::string(layout) + " " +
           std::to_string(m) + "x" + std::to_string(h) + "x" + std::to_string(i) + "\n";
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float HalfToFloat(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1f;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp(float(mantissa), -24);
  if (exponent == 31) return FromBits(sign | 0x7f800000u | (mantissa << 13));
  return FromBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t FloatToHalf(float value) {
  const uint16_t sign = uint16_t((ToBits(value) >> 16) & 0x8000u);
  if (std::isnan(value)) return sign | 0x7e00u;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00u;
  if (magnitude < std::ldexp(1.0f, -14)) {
    return sign | uint16_t(std::nearbyint(std::ldexp(magnitude, 24)));
  }
  // Round to nearest even by adding to the bits that fall away.
  const uint32_t bits = ToBits(magnitude);
  const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u);
  return sign | uint16_t((rounded - (112u << 23)) >> 13);
}

float Load(ffi::DataType type, const void* data, int64_t k) {
  switch (type) {
    case ffi::DataType::F32:
      return static_cast<const float*>(data)[k];
    case ffi::DataType::BF16:
      return FromBits(uint32_t(static_cast<const uint16_t*>(data)[k]) << 16);
    default:
      return HalfToFloat(static_cast<const uint16_t*>(data)[k]);
  }
}

void Store(ffi::DataType type, void* data, int64_t k, float value) {
  switch (type) {
    case ffi::DataType::F32:
      static_cast<float*>(data)[k] = value;
      break;
    case ffi::DataType::BF16: {
      const uint32_t bits = ToBits(value);
      static_cast<uint16_t*>(data)[k] =
          std::isnan(value) ? 0x7fc0u : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
      break;
    }
    default:
      static_cast<uint16_t*>(data)[k] = FloatToHalf(value);
  }
}

// A matrix given by its buffer, read as float32.
struct Matrix {
  std::vector<float> values;
  int64_t row, column;
  float operator()(int64_t r, int64_t c) const { return values[r * row + c * column]; }
};

std::vector<float> Read(const ffi::AnyBuffer& buffer) {
  std::vector<float> values(buffer.element_count());
  for (size_t k = 0; k < values.size(); ++k) {
    values[k] = Load(buffer.element_type(), buffer.untyped_data(), int64_t(k));
  }
  return values;
}

// The weight as [inputs, outputs of the first layer]: indexed by (h, i) in either layout.
Matrix Weight(const ffi::AnyBuffer& buffer, bool rows_are_h) {
  const int64_t columns = buffer.dimensions()[1];
  return {Read(buffer), rows_are_h ? columns : 1, rows_are_h ? 1 : columns};
}

struct Outputs {
  explicit Outputs(ffi::RemainingRets rets, int64_t mask) {
    for (int bit = 0, k = 0; bit < 3; ++bit) {
      if (mask >> bit & 1) buffers[bit] = *rets.get<ffi::AnyBuffer>(k++);
    }
  }
  void Write(int bit, int64_t k, float value) {
    if (buffers[bit].has_value()) {
      auto buffer = *buffers[bit];
      Store(buffer->element_type(), buffer->untyped_data(), k, value);
    }
  }
  std::optional<ffi::Result<ffi::AnyBuffer>> buffers[3];
};

bool Known(ffi::DataType type) {
  return type == ffi::DataType::F32 || type == ffi::DataType::BF16 || type == ffi::DataType::F16;
}

float Rounded(ffi::DataType type, float value) {
  uint32_t storage = 0;
  Store(type, &storage, 0, value);
  return Load(type, &storage, 0);
}

ffi::Error GateUp(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t mask,
                  std::string_view layout) {
  const auto x = *args.get<ffi::AnyBuffer>(0);
  if (args.size() != 3) return ffi::Error::InvalidArgument("gate_up takes three operands");
  if (!Known(x.element_type())) return ffi::Error::InvalidArgument("gate_up: unknown dtype");
  const bool io = layout == "IO";
  const auto gate_buffer = *args.get<ffi::AnyBuffer>(1);
  const int64_t h_size = x.dimensions().back();
  const int64_t m_size = h_size ? int64_t(x.element_count()) / h_size : 0;
  const int64_t i_size = gate_buffer.dimensions()[io ? 1 : 0];
  Record("gate_up", mask, layout, m_size, h_size, i_size);
  const std::vector<float> rows = Read(x);
  const Matrix w_gate = Weight(gate_buffer, io);
  const Matrix w_up = Weight(*args.get<ffi::AnyBuffer>(2), io);
  Outputs outputs(rets, mask);
  for (int64_t m = 0; m < m_size; ++m) {
    for (int64_t i = 0; i < i_size; ++i) {
      float gate = 0, up = 0;
      for (int64_t h = 0; h < h_size; ++h) {
        gate += rows[m * h_size + h] * w_gate(h, i);
        up += rows[m * h_size + h] * w_up(h, i);
      }
      gate = Rounded(x.element_type(), gate);
      up = Rounded(x.element_type(), up);
      const int64_t k = m * i_size + i;
      outputs.Write(0, k, gate / (1 + std::exp(-gate)) * up);
      outputs.Write(1, k, gate);
      outputs.Write(2, k, up);
    }
  }
  return ffi::Error::Success();
}

ffi::Error DownDswiglu(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t mask,
                       std::string_view layout) {
  const auto dy = *args.get<ffi::AnyBuffer>(0);
  const size_t expected = mask & 5 ? 4 : 3;
  if (args.size() != expected) {
    return ffi::Error::InvalidArgument("down_dswiglu: wrong number of operands");
  }
  if (!Known(dy.element_type())) return ffi::Error::InvalidArgument("down_dswiglu: unknown dtype");
  const bool io = layout == "IO";
  const auto gate_buffer = *args.get<ffi::AnyBuffer>(2);
  const int64_t h_size = dy.dimensions().back();
  const int64_t m_size = h_size ? int64_t(dy.element_count()) / h_size : 0;
  const int64_t i_size = gate_buffer.dimensions().back();
  Record("down_dswiglu", mask, layout, m_size, h_size, i_size);
  const std::vector<float> rows = Read(dy), gate = Read(gate_buffer);
  const std::vector<float> up =
      expected == 4 ? Read(*args.get<ffi::AnyBuffer>(3)) : std::vector<float>();
  const Matrix w_down = Weight(*args.get<ffi::AnyBuffer>(1), !io);
  Outputs outputs(rets, mask);
  for (int64_t m = 0; m < m_size; ++m) {
    for (int64_t i = 0; i < i_size; ++i) {
      float dh = 0;
      for (int64_t h = 0; h < h_size; ++h) dh += rows[m * h_size + h] * w_down(h, i);
      const int64_t k = m * i_size + i;
      const float g = gate[k], s = 1 / (1 + std::exp(-g));
      if (mask & 1) outputs.Write(0, k, dh * up[k] * s * (1 + g * (1 - s)));
      outputs.Write(1, k, dh * s * g);
      if (mask & 4) outputs.Write(2, k, s * g * up[k]);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(test_gate_up, GateUp,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("outputs")
                                  .Attr<std::string_view>("weight_layout"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(test_down_dswiglu, DownDswiglu,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("outputs")
                                  .Attr<std::string_view>("weight_layout"));

// Hands over the record of calls, and forgets it. Returns the length that it needs; writes at
// most `size` bytes.
extern "C" int64_t test_take_calls(char* text, int64_t size) {
  std::lock_guard<std::mutex> lock(calls_mutex);
  const int64_t length = int64_t(calls.size());
  if (length > size) return length;
  std::memcpy(text, calls.data(), calls.size());
  calls.clear();
  return length;
}
