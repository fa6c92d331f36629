#include "ffi/cudnn_library.h"

#include <dlfcn.h>

#include <mutex>

#include "ffi/refused.h"

namespace cudnn_frontend {
// The frontend's header looks every cuDNN function up in this handle.
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace swiglu_jax::cudnn {
namespace {

std::mutex mutex;
std::string path = "libcudnn.so.9";  // NOLINT: a handle that lives as long as the process

}  // namespace

void set_library_path(const std::string& chosen) {
  std::lock_guard<std::mutex> lock(mutex);
  path = chosen;
}

long open_library() {
  std::lock_guard<std::mutex> lock(mutex);
  if (cudnn_frontend::cudnn_dlhandle == nullptr) {
    // The copy that the process already holds (JAX loads one before it touches a GPU) comes first:
    // two cuDNNs in one process would each bring their own engines.
    void* opened = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
    if (opened == nullptr) opened = dlopen(path.c_str(), RTLD_NOW);
    if (opened == nullptr) throw Refused(std::string("cuDNN can't be opened: ") + dlerror());
    cudnn_frontend::cudnn_dlhandle = opened;
  }
  const auto get_version =
      reinterpret_cast<size_t (*)()>(dlsym(cudnn_frontend::cudnn_dlhandle, "cudnnGetVersion"));
  if (get_version == nullptr) throw Refused("cuDNN has no cudnnGetVersion");
  const long version = static_cast<long>(get_version());
  if (version < kOldestVersion) {
    throw Refused("cuDNN " + std::to_string(version) + " is older than " +
                  std::to_string(kOldestVersion) + "; install nvidia-cudnn-cu13");
  }
  return version;
}

}  // namespace swiglu_jax::cudnn
