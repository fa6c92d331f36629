// The scratch that a plan is tried on, and whether what it wrote is right.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/cudnn_graph.h"

namespace swiglu_jax::cudnn {

// One allocation that holds every operand and result of a graph. Operands are filled with noise: a
// GPU's clocks depend on the bits that flip, so zeros would flatter; and the noise is known on the
// host, so that samples of the results can be computed there.
class TrialBuffers {
 public:
  // Allocates in the current context. Throws Refused if there is no room.
  TrialBuffers(const GraphSpec& spec, CUstream stream);
  ~TrialBuffers();
  TrialBuffers(const TrialBuffers&) = delete;
  TrialBuffers& operator=(const TrialBuffers&) = delete;

  void* const* buffers() const { return buffers_.data(); }

  // Fills the results with NaN, so that an element that nobody writes shows.
  void poison(CUstream stream) const;

  // Compares samples of the results, corners included, with float64. Returns what is wrong, or an
  // empty text. cuDNN has engines that take a graph of these and compute another (docs/cudnn.md).
  std::string verdict(CUstream stream) const;

 private:
  // Sets the buffers' addresses, and their contents to noise.
  void fill(CUstream stream);
  // Operand `buffer` at `index`, as the GPU has it.
  double operand(size_t buffer, int64_t index) const;
  // Result number `index` in `spec_`'s order, for every result.
  std::vector<double> expected(int64_t row, int64_t column) const;
  // One row of a result, as it is on the GPU.
  std::vector<uint16_t> result_row(size_t number, int64_t row) const;

  GraphSpec spec_;
  std::vector<uint16_t> noise_;
  size_t results_ = 0;  // how many of the buffers, the last ones, are results
  std::vector<int64_t> offsets_;
  int64_t total_ = 0;
  CUdeviceptr base_ = 0;
  std::vector<void*> buffers_;
};

}  // namespace swiglu_jax::cudnn
