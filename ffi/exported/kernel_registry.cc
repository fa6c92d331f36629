#include "ffi/exported/kernel_registry.h"

#include <dlfcn.h>

#include <algorithm>
#include <list>
#include <map>
#include <set>
#include <vector>

#include "ffi/exported/runtime.h"
#include "ffi/refused.h"

namespace swiglu_jax::exported {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::string> paths;
  std::set<std::string> opened;  // of them
  std::list<Kernel> kernels;
  std::map<std::string, Kernel*, std::less<>> by_name;
};

Registry& registry() {
  static auto* const made = new Registry;  // calls may come while the process exits
  return *made;
}

const SwigluJaxKernelLibrary& open_library(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Refused(std::string("cannot open a kernel library: ") + dlerror());
  const auto bind = reinterpret_cast<TVMFFISafeCallType>(
      dlsym(handle, "__tvm_ffi_swiglu_jax_kernel_library"));
  if (bind == nullptr) throw Refused(path + " is not a library of exported kernels");
  TVMFFIAny given{};
  given.type_index = kTVMFFIOpaquePtr;
  given.v_ptr = const_cast<SwigluJaxRuntime*>(&runtime());
  TVMFFIAny result{};
  if (bind(nullptr, &given, 1, &result) != 0) {
    throw Refused(path + " was built by another version of this package; build the kernels again");
  }
  const auto& library = *static_cast<const SwigluJaxKernelLibrary*>(result.v_ptr);
  if (library.version != SWIGLU_JAX_KERNEL_LIBRARY_VERSION) {
    throw Refused(path + " describes its kernels in another version's form");
  }
  return library;
}

}  // namespace

bool Kernel::ready(int ordinal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return devices_.count(ordinal) != 0;
}

void Kernel::set_ready(int ordinal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_.insert(ordinal);
}

void add_library(const std::string& path) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (std::find(all.paths.begin(), all.paths.end(), path) == all.paths.end()) {
    all.paths.push_back(path);
  }
}

Kernel& find(std::string_view name) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.by_name.find(name);
  if (known != all.by_name.end()) return *known->second;
  // A library that cannot be opened, perhaps of an architecture that is not here, hides no other.
  std::string problems;
  for (const std::string& path : all.paths) {
    if (all.opened.count(path) != 0) continue;
    try {
      const SwigluJaxKernelLibrary& library = open_library(path);
      for (int32_t k = 0; k < library.count; ++k) {
        all.kernels.emplace_back(library.kernels[k]);
        all.by_name.emplace(library.kernels[k].name, &all.kernels.back());
      }
    } catch (const Refused& refused) {
      problems += std::string("; ") + refused.what();
      continue;
    }
    all.opened.insert(path);
    const auto found = all.by_name.find(name);
    if (found != all.by_name.end()) return *found->second;
  }
  std::string where;
  for (const std::string& path : all.paths) where += (where.empty() ? "" : ", ") + path;
  throw Refused("no kernel " + std::string(name) + " in " +
                (where.empty() ? "any library: none is registered" : where) + problems);
}

}  // namespace swiglu_jax::exported
