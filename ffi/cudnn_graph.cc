#include "ffi/cudnn_graph.h"

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "ffi/cudnn_library.h"
#include "ffi/refused.h"

namespace swiglu_jax::cudnn {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using fe::PointwiseMode_t;

void check(fe::error_t status) {
  if (status.is_bad()) throw Refused("cuDNN: " + status.get_message());
}

// The frontend keeps its plans to its family. They are wanted directly, because Graph::execute asks
// cudart about the current context, and this library neither holds a cudart nor needs the answer.
struct Graph : fe::graph::Graph {
  using fe::graph::Graph::plans;
};

fe::DataType_t data_type(Dtype dtype) {
  return dtype == Dtype::kBf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF;
}

// Adds a stage's nodes to a graph; uids number operands and outputs in canonical order.
class Builder {
 public:
  explicit Builder(const GraphSpec& spec) : spec_(spec), graph_(std::make_shared<Graph>()) {
    graph_->set_io_data_type(data_type(spec.dtype))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::shared_ptr<Graph> build() {
    switch (spec_.kind) {
      case Kind::kGateUp:
        gate_up();
        break;
      case Kind::kDownDswiglu:
        dswiglu(/*fused=*/true);
        break;
      case Kind::kDgrad:
        output(dgrad());
        break;
      case Kind::kDswiglu:
        dswiglu(/*fused=*/false);
        break;
    }
    return graph_;
  }

  std::vector<int64_t> uids() const {
    std::vector<int64_t> all(static_cast<size_t>(uid_));
    for (int64_t uid = 1; uid <= uid_; ++uid) all[static_cast<size_t>(uid - 1)] = uid;
    return all;
  }

 private:
  void gate_up() {
    const Tensor x = activation("x", spec_.h);
    const Tensor w_gate = weight("w_gate", spec_.h, spec_.i);
    const Tensor w_up = weight("w_up", spec_.h, spec_.i);
    const Tensor gate = rounded(matmul(x, w_gate, "gate"));
    const Tensor up = rounded(matmul(x, w_up, "up"));
    const Tensor h = pointwise(PointwiseMode_t::MUL, swish(gate), up, "h");
    if (spec_.outputs & kH) output(h);
    if (spec_.outputs & kGate) output(gate);
    if (spec_.outputs & kUp) output(up);
  }

  // Operands are numbered as they are made, so each is a statement of its own: the order in which a
  // call's arguments are evaluated is the compiler's choice.
  Tensor dgrad() {
    const Tensor dy = activation("dy", spec_.h);
    const Tensor w_down = weight("w_down", spec_.h, spec_.i);
    return matmul(dy, w_down, "dh");
  }

  void dswiglu(bool fused) {
    const Tensor dh = fused ? dgrad() : activation("dh", spec_.i);
    const Tensor gate = activation("gate", spec_.i);
    const Tensor up = spec_.reads_up() ? activation("up", spec_.i) : nullptr;
    const Tensor silu = spec_.outputs & (kDup | kRecomputedH) ? swish(gate) : nullptr;
    if (spec_.outputs & kDgate) {
      const Tensor dsilu = pointwise(PointwiseMode_t::MUL, dh, up, "dsilu");
      output(pointwise(PointwiseMode_t::SWISH_BWD, dsilu, gate, "dgate"));
    }
    if (spec_.outputs & kDup) output(pointwise(PointwiseMode_t::MUL, dh, silu, "dup"));
    if (spec_.outputs & kRecomputedH) output(pointwise(PointwiseMode_t::MUL, silu, up, "h"));
  }

  // [M, width], row-major.
  Tensor activation(const char* name, int64_t width) {
    return operand(name, {1, spec_.m, width}, {spec_.m * width, width, 1});
  }

  // The right-hand side [in, out] of a product. w_down multiplies dy as [H, I], so its "in" is H
  // too: what the layout calls IO is [I, H] there, as gate's [H, I] in the forward is.
  Tensor weight(const char* name, int64_t in, int64_t out) {
    const bool is_down = spec_.kind != Kind::kGateUp;
    const bool row_major = spec_.in_out_weights != is_down;
    return row_major ? operand(name, {1, in, out}, {in * out, out, 1})
                     : operand(name, {1, in, out}, {in * out, 1, in});
  }

  Tensor operand(const char* name, std::vector<int64_t> dims, std::vector<int64_t> strides) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name(name)
                              .set_uid(++uid_)
                              .set_dim(dims)
                              .set_stride(strides)
                              .set_data_type(data_type(spec_.dtype)));
  }

  Tensor matmul(const Tensor& a, const Tensor& b, const char* name) {
    Tensor c = graph_->matmul(a, b, fe::graph::Matmul_attributes().set_name(name));
    c->set_name(name);
    return c;
  }

  Tensor pointwise(PointwiseMode_t mode, const Tensor& a, const Tensor& b, const char* name) {
    auto attributes = fe::graph::Pointwise_attributes().set_name(name).set_mode(mode);
    if (mode == PointwiseMode_t::SWISH_BWD) attributes.set_swish_beta(1.0f);
    Tensor c = graph_->pointwise(a, b, attributes);
    c->set_name(name);
    return c;
  }

  Tensor swish(const Tensor& a) {
    Tensor c = graph_->pointwise(a, fe::graph::Pointwise_attributes()
                                        .set_name("silu")
                                        .set_mode(PointwiseMode_t::SWISH_FWD)
                                        .set_swish_beta(1.0f));
    c->set_name("silu");
    return c;
  }

  Tensor rounded(const Tensor& a) {
    a->set_data_type(data_type(spec_.dtype));
    return a;
  }

  void output(const Tensor& a) {
    a->set_output(true).set_uid(++uid_).set_data_type(data_type(spec_.dtype));
  }

  GraphSpec spec_;
  std::shared_ptr<Graph> graph_;
  int64_t uid_ = 0;
};

std::string plan_name(int64_t engine, const std::unordered_map<fe::KnobType_t, int64_t>& knobs) {
  std::vector<std::pair<int64_t, int64_t>> sorted;
  for (const auto& [knob, value] : knobs) sorted.emplace_back(static_cast<int64_t>(knob), value);
  std::sort(sorted.begin(), sorted.end());
  std::ostringstream name;
  name << 'e' << engine;
  char separator = ';';
  for (const auto& [knob, value] : sorted) {
    name << separator << knob << '=' << value;
    separator = ',';
  }
  return name.str();
}

std::pair<int64_t, std::unordered_map<fe::KnobType_t, int64_t>> parse_plan_name(
    const std::string& name) {
  std::istringstream in(name);
  int64_t engine = -1;
  std::unordered_map<fe::KnobType_t, int64_t> knobs;
  char c = 0;
  bool good = static_cast<bool>(in >> c >> engine) && c == 'e';
  while (good && in >> c) {
    int64_t knob = 0;
    int64_t value = 0;
    char equals = 0;
    good = (c == ';' || c == ',') && static_cast<bool>(in >> knob >> equals >> value) &&
           equals == '=';
    knobs[static_cast<fe::KnobType_t>(knob)] = value;
  }
  if (!good) throw Refused("'" + name + "' does not name a cuDNN plan (as in e7;12=21)");
  return {engine, knobs};
}

// Plans that the heuristics may leave out and that are worth a trial: they were the fastest of
// gate_up on an H200 with cuDNN 9.19, still build with 9.28, and are not in its heuristics' list.
std::vector<std::string> remembered_plans(const GraphSpec& spec, int sm_version) {
  if (spec.kind == Kind::kGateUp && sm_version == 90) return {"e4;12=49", "e4;12=53"};
  return {};
}

}  // namespace

std::vector<int64_t> GraphSpec::buffer_bytes() const {
  const int64_t size = 2;  // bf16 and f16
  const int64_t wide = m * i * size;
  std::vector<int64_t> bytes;
  switch (kind) {
    case Kind::kGateUp:
      bytes = {m * h * size, h * i * size, h * i * size};
      break;
    case Kind::kDownDswiglu:
      bytes = {m * h * size, h * i * size, wide};
      if (reads_up()) bytes.push_back(wide);
      break;
    case Kind::kDgrad:
      return {m * h * size, h * i * size, wide};
    case Kind::kDswiglu:
      bytes = {wide, wide};
      if (reads_up()) bytes.push_back(wide);
      break;
  }
  for (unsigned bit = 1; bit <= 4; bit <<= 1) {
    if (outputs & bit) bytes.push_back(wide);
  }
  return bytes;
}

std::string GraphSpec::describe() const {
  static const char* const kinds[] = {"gate_up", "down_dswiglu", "dgrad", "dswiglu"};
  std::ostringstream text;
  text << kinds[static_cast<int>(kind)] << " outputs " << outputs << ' '
       << (in_out_weights ? "IO" : "OI") << ' ' << (dtype == Dtype::kBf16 ? "bf16" : "f16") << " M="
       << m << " H=" << h << " I=" << i;
  return text.str();
}

struct Plans::Impl {
  std::shared_ptr<Graph> graph;
  std::vector<int64_t> uids;
  cudnnHandle_t handle = nullptr;
  std::vector<Entry> entries;
  std::vector<int64_t> positions;  // of the entries in the frontend's list

  std::shared_ptr<fe::ExecutionPlan>& plan(size_t index) {
    return graph->plans.execution_plans[static_cast<size_t>(positions[index])];
  }

  Impl(const GraphSpec& spec, const Device& device) : handle(device.handle) {
    open_library();
    Builder builder(spec);
    graph = builder.build();
    uids = builder.uids();
    // Plans of this library live until the process ends, so a captured graph needs no reference.
    graph->set_cuda_graph_retention(fe::CudaGraphRetention_t::NONE);
    if (device.sm_version != 0) graph->set_sm_version(device.sm_version);
    if (handle == nullptr) {
      auto properties = std::make_shared<fe::DeviceProperties>();
      check(properties->deserialize({device.description.begin(), device.description.end()}));
      graph->set_device_properties(properties);
    }
    check(graph->validate());
    check(graph->build_operation_graph(handle));
  }

  void describe_entries() {
    entries.clear();
    positions.clear();
    // Heuristic modes overlap: the second mention of a plan is left out.
    std::set<std::string> seen;
    for (int64_t at = 0; at < graph->get_execution_plan_count(); ++at) {
      int64_t engine = 0;
      std::unordered_map<fe::KnobType_t, int64_t> knobs;
      check(graph->get_engine_and_knobs_at_index(at, engine, knobs));
      Entry entry;
      entry.name = plan_name(engine, knobs);
      if (!seen.insert(entry.name).second) continue;
      check(graph->get_plan_name_at_index(at, entry.tag));
      entries.push_back(std::move(entry));
      positions.push_back(at);
    }
  }
};

Plans::Plans(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Plans::~Plans() = default;

std::unique_ptr<Plans> Plans::heuristic(const GraphSpec& spec, const Device& device) {
  auto impl = std::make_unique<Impl>(spec, device);
  check(impl->graph->create_execution_plans(
      {fe::HeurMode_t::A, fe::HeurMode_t::B, fe::HeurMode_t::FALLBACK}));
  for (const std::string& name : remembered_plans(spec, device.sm_version)) {
    const auto [engine, knobs] = parse_plan_name(name);
    // One that this cuDNN no longer has is no loss.
    try {
      static_cast<void>(impl->graph->create_execution_plan(engine, knobs));
    } catch (const std::exception&) {
      continue;
    }
  }
  impl->describe_entries();
  return std::unique_ptr<Plans>(new Plans(std::move(impl)));
}

std::unique_ptr<Plans> Plans::named(const GraphSpec& spec, const Device& device,
                                    const std::string& name) {
  const auto [engine, knobs] = parse_plan_name(name);
  auto impl = std::make_unique<Impl>(spec, device);
  check(impl->graph->create_execution_plan(engine, knobs));
  impl->describe_entries();
  std::unique_ptr<Plans> plans(new Plans(std::move(impl)));
  if (plans->size() == 0) throw Refused("cuDNN has no plan " + name + " for it");
  if (!plans->build(0, INT64_MAX)) throw Refused(plans->entry(0).refusal);
  return plans;
}

std::vector<Plans::Buffer> Plans::buffers() const {
  std::vector<Buffer> all;
  for (int64_t uid : impl_->uids) {
    fe::graph::Tensor_attributes tensor;
    check(impl_->graph->query_tensor_attributes_of_uid(uid, tensor));
    all.push_back({tensor.get_name(), tensor.get_dim(), tensor.get_stride()});
  }
  return all;
}

size_t Plans::size() const { return impl_->entries.size(); }

const Plans::Entry& Plans::entry(size_t index) const { return impl_->entries[index]; }

bool Plans::build(size_t index, int64_t workspace_cap) {
  Entry& entry = impl_->entries[index];
  if (!entry.refusal.empty()) return false;
  // The frontend throws from some paths and returns an error from others.
  try {
    check(impl_->graph->plans.build_plan_at_index(impl_->positions[index]));
    entry.workspace = impl_->plan(index)->getWorkspaceSize();
    if (entry.workspace > workspace_cap) {
      entry.refusal = "needs a workspace of " + std::to_string(entry.workspace) +
                      " bytes, more than the " + std::to_string(workspace_cap) + " it may have";
      drop(index);
    }
  } catch (const std::exception& error) {
    entry.refusal = error.what();
  }
  return entry.refusal.empty();
}

void Plans::drop(size_t index) { impl_->plan(index).reset(); }

void Plans::run(size_t index, CUstream stream, void* const* buffers, void* workspace) const {
  const auto& plan = impl_->plan(index);
  if (fe::detail::set_stream(impl_->handle, reinterpret_cast<cudaStream_t>(stream)) !=
      CUDNN_STATUS_SUCCESS) {
    throw Refused("cuDNN: cudnnSetStream failed: " + fe::detail::get_last_error_string_());
  }
  check(fe::detail::execute(impl_->handle, plan.get(), buffers, impl_->uids, workspace));
}

cudnnContext* create_handle() {
  open_library();
  cudnnHandle_t handle = nullptr;
  const auto status = fe::detail::create_handle(&handle);
  if (status != CUDNN_STATUS_SUCCESS) {
    throw Refused(std::string("cuDNN: cudnnCreate failed: ") + fe::detail::get_error_string(status) +
                  " " + fe::detail::get_last_error_string_());
  }
  return handle;
}

void destroy_handle(cudnnContext* handle) { fe::detail::destroy_handle(handle); }

}  // namespace swiglu_jax::cudnn
