#include <cstdlib>
#include <cstring>
#include <cudnn_frontend/thirdparty/nlohmann/json.hpp>
#include <limits>
#include <map>
#include <mutex>
#include <string>

#include "ffi/cudnn_library.h"
#include "ffi/cudnn_pool.h"
#include "ffi/cudnn_tuning.h"
#include "ffi/device.h"
#include "ffi/driver.h"
#include "ffi/refused.h"
#include "ffi/swiglu_jax.h"

namespace {

using nlohmann::json;
using swiglu_jax::Refused;
namespace cudnn = swiglu_jax::cudnn;
namespace driver = swiglu_jax::driver;

// No exception crosses the C ABI: it becomes the answer.
template <typename Function>
char* answer(const Function& function) {
  json result;
  try {
    result = function();
  } catch (const std::exception& error) {
    result = {{"error", error.what()}};
  }
  return strdup(result.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
}

// One handle per device for all tuning, which is done one graph at a time: two that are timed at
// once would time each other.
std::mutex tuning_mutex;

const cudnn::Device& tuning_device(int ordinal) {
  static auto& devices = *new std::map<int, cudnn::Device>;
  const auto found = devices.find(ordinal);
  if (found != devices.end()) return found->second;
  return devices.emplace(ordinal, cudnn::current_device_with_handle()).first->second;
}

cudnn::GraphSpec spec_of(const swiglu_jax_graph& graph) {
  const std::string name = graph.graph;
  const std::string layout = graph.weight_layout;
  const std::string dtype = graph.dtype;
  cudnn::GraphSpec spec{};
  if (name == "gate_up") {
    spec.kind = cudnn::Kind::kGateUp;
  } else if (name == "down_dswiglu") {
    spec.kind = cudnn::Kind::kDownDswiglu;
  } else if (name == "dgrad") {
    spec.kind = cudnn::Kind::kDgrad;
  } else if (name == "dswiglu") {
    spec.kind = cudnn::Kind::kDswiglu;
  } else {
    throw Refused("graph: expected gate_up, down_dswiglu, dgrad or dswiglu, got " + name);
  }
  if (layout != "OI" && layout != "IO") {
    throw Refused("weight_layout: expected OI or IO, got " + layout);
  }
  if (dtype != "bfloat16" && dtype != "float16") {
    throw Refused("dtype: expected bfloat16 or float16, got " + dtype);
  }
  const int64_t all = spec.kind == cudnn::Kind::kDgrad ? 1 : 7;
  if (graph.outputs < 1 || graph.outputs > all) {
    throw Refused("outputs: expected a bitmask of 1 to " + std::to_string(all) + ", got " +
                  std::to_string(graph.outputs));
  }
  // Products of two sizes, in bytes, then fit 63 bits.
  const int64_t most = std::numeric_limits<int32_t>::max();
  const auto check_size = [most](const char* what, int64_t size, int64_t least) {
    if (size >= least && size <= most) return;
    throw Refused(std::string(what) + ": expected " + std::to_string(least) + " to " +
                  std::to_string(most) + ", got " + std::to_string(size));
  };
  check_size("m", graph.m, 1);
  check_size("h", graph.h, spec.kind == cudnn::Kind::kDswiglu ? 0 : 1);  // it reads no weight
  check_size("i", graph.i, 1);
  spec.outputs = static_cast<unsigned>(graph.outputs);
  spec.in_out_weights = layout == "IO";
  spec.dtype = dtype == "bfloat16" ? cudnn::Dtype::kBf16 : cudnn::Dtype::kF16;
  spec.m = graph.m;
  spec.h = graph.h;
  spec.i = graph.i;
  return spec;
}

}  // namespace

extern "C" {

int swiglu_jax_abi_version() { return SWIGLU_JAX_ABI_VERSION; }

void swiglu_jax_free(char* text) { std::free(text); }

void swiglu_jax_cudnn_set_library(const char* path) { cudnn::set_library_path(path); }

char* swiglu_jax_cudnn_version() {
  return answer([] { return json{{"version", cudnn::open_library()}}; });
}

char* swiglu_jax_cudnn_build(const swiglu_jax_graph* graph, const char* description, int sm_version,
                             const char* plan) {
  return answer([&]() -> json {
    cudnn::Device device;
    device.description = description;
    device.sm_version = sm_version;
    const cudnn::GraphSpec spec = spec_of(*graph);
    const bool named = plan[0] != '\0';
    const auto plans = named ? cudnn::Plans::named(spec, device, plan)
                             : cudnn::Plans::heuristic(spec, device);
    for (size_t index = 0; index < plans->size(); ++index) {
      if (!plans->build(index, cudnn::kWorkspaceCap)) continue;
      const cudnn::Plans::Entry& entry = plans->entry(index);
      json buffers = json::array();
      for (const cudnn::Plans::Buffer& buffer : plans->buffers()) {
        buffers.push_back(
            {{"name", buffer.name}, {"dims", buffer.dims}, {"strides", buffer.strides}});
      }
      json names = json::array();
      for (size_t other = 0; other < plans->size(); ++other) {
        names.push_back(plans->entry(other).name);
      }
      return {{"plan", entry.name},
              {"tag", entry.tag},
              {"workspace", entry.workspace},
              {"names", names},
              {"buffers", buffers}};
    }
    if (plans->size() == 0) throw Refused("cuDNN has no plan for it");
    throw Refused("none of cuDNN's " + std::to_string(plans->size()) +
                  " plans builds; the first: " + plans->entry(0).refusal);
  });
}

char* swiglu_jax_cudnn_tune(const swiglu_jax_graph* graph, int device, int64_t most_plans,
                            int64_t memory_cap) {
  return answer([&]() -> json {
    const cudnn::GraphSpec spec = spec_of(*graph);
    const driver::CurrentContext current(driver::primary_context(device));
    cudnn::TuningLimits limits;
    if (most_plans > 0) limits.plans = static_cast<size_t>(most_plans);
    if (memory_cap > 0) limits.memory = memory_cap;
    const std::lock_guard<std::mutex> lock(tuning_mutex);
    const cudnn::Tuning tuning = tune(spec, tuning_device(device), limits);
    const cudnn::Trial& fastest = tuning.fastest();
    json trials = json::array();
    for (const cudnn::Trial& trial : tuning.trials) {
      trials.push_back({{"plan", trial.name},
                        {"tag", trial.tag},
                        {"us", trial.us},
                        {"passed_over", trial.refusal}});
    }
    return {{"plan", fastest.name},     {"tag", fastest.tag},
            {"us", fastest.us},         {"rows", tuning.rows},
            {"trials", trials},         {"cudnn", cudnn::open_library()}};
  });
}

char* swiglu_jax_cudnn_pool(const swiglu_jax_graph* graph, int device, const char* plan) {
  return answer([&]() -> json {
    const auto state = cudnn::pool_state({device, spec_of(*graph), plan});
    return {{"plan", state.plan},
            {"pairs", state.pairs},
            {"leases", state.leases},
            {"captured", state.captured}};
  });
}
}
