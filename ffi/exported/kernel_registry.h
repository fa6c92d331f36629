// The kernel libraries of this process.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "kernel_library.h"

namespace swiglu_jax::exported {

// A kernel of an open library; lives until the process ends.
class Kernel {
 public:
  explicit Kernel(const SwigluJaxKernel& description) : description_(description) {}

  const SwigluJaxKernel& description() const { return description_; }

  // Whether the kernel is loaded on a device.
  bool ready(int ordinal);
  void set_ready(int ordinal);

 private:
  const SwigluJaxKernel& description_;
  std::mutex mutex_;
  std::set<int> devices_;
};

// Adds a library to those that `find` looks in, in this order. It is opened when first needed.
void add_library(const std::string& path);

// The kernel of that name. Throws Refused where no library has it, naming the libraries, with the
// reason of each that cannot be opened or is of another version.
Kernel& find(std::string_view name);

}  // namespace swiglu_jax::exported
