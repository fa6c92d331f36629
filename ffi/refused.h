#pragma once

#include <stdexcept>

namespace swiglu_jax {

// cuDNN, or this library, will not serve what was asked. The text is the reason, for a person.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace swiglu_jax
