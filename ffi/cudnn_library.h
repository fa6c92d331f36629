// libcudnn, opened when first needed.
#pragma once

#include <string>

namespace swiglu_jax::cudnn {

// Where to find libcudnn.so.9 (a path or a soname). Has no effect once the library is open.
void set_library_path(const std::string& path);

// Opens libcudnn if it isn't open, and returns its version (91900 for 9.19.0). Throws Refused with
// the loader's reason if it can't be opened or is older than kOldestVersion.
long open_library();

// Device descriptions came with 9.8; 9.10 is the first whose graphs this library was tried with.
inline constexpr long kOldestVersion = 91000;

}  // namespace swiglu_jax::cudnn
