// The cuDNN graphs of the two stages, and plans for them.
//
// This header hides the frontend, which takes most of a minute to compile, behind one file.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

struct cudnnContext;

namespace swiglu_jax::cudnn {

enum class Kind {
  kGateUp,        // x, w_gate, w_up -> h, gate, up
  kDownDswiglu,   // dy, w_down, gate[, up] -> dgate, dup, h
  kDgrad,         // dy, w_down -> dh: the first step of the two-step form
  kDswiglu,       // dh, gate[, up] -> dgate, dup, h: its second
};
enum class Dtype { kBf16, kF16 };

// What the outputs of a kind are called, in canonical order; bit n of a set is the n-th of them.
enum GateUpOutput : unsigned { kH = 1, kGate = 2, kUp = 4 };
enum DownDswigluOutput : unsigned { kDgate = 1, kDup = 2, kRecomputedH = 4 };

// One graph at one shape. Weights are read where they lie: [out, in] ("OI", as torch.nn.Linear
// keeps them) or [in, out] ("IO", as a Flax kernel).
struct GraphSpec {
  Kind kind;
  unsigned outputs;  // a set of the kind's outputs; kDgrad has one, dh, as bit 0
  bool in_out_weights;
  Dtype dtype;
  int64_t m, h, i;  // tokens, model width, hidden width

  auto tied() const { return std::tie(kind, outputs, in_out_weights, dtype, m, h, i); }
  bool operator<(const GraphSpec& other) const { return tied() < other.tied(); }
  // Whether `up` is an operand: only dgate and the recomputed h read it.
  bool reads_up() const { return (outputs & (kDgate | kRecomputedH)) != 0; }
  // Bytes of each buffer that a run takes, operands first, then outputs, in canonical order.
  std::vector<int64_t> buffer_bytes() const;
  std::string describe() const;
};

// A GPU: one that is here, through a cuDNN handle, or one that is only described (the JSON text of
// a cuDNN device description), for which plans can be built and not run.
struct Device {
  cudnnContext* handle = nullptr;
  std::string description;
  int sm_version = 0;  // 90, 100, ...
};

// Plans for one graph on one device.
//
// A plan is named by its engine and knobs ("e7;12=21"): with the same cuDNN version and the
// same kind of device the name rebuilds exactly that plan, which is what makes a choice that was
// timed once worth keeping. Knob numbers are the frontend's, which never renumbers them.
class Plans {
 public:
  struct Entry {
    std::string name;        // what rebuilds it
    std::string tag;         // cuDNN's own name of the engine and its knobs
    int64_t workspace = 0;   // bytes
    std::string refusal;     // why there is no such plan, or empty
  };

  // Every plan of cuDNN's heuristics (modes A, B and fallback), then some that were fast elsewhere,
  // none of them built yet. Throws Refused, with cuDNN's text, if cuDNN does not take the graph.
  static std::unique_ptr<Plans> heuristic(const GraphSpec& spec, const Device& device);
  // The one plan of that name, built. Throws Refused.
  static std::unique_ptr<Plans> named(const GraphSpec& spec, const Device& device,
                                      const std::string& name);
  ~Plans();

  // The graph's buffers as cuDNN was told of them, in the order in which a run takes them.
  struct Buffer {
    std::string name;
    std::vector<int64_t> dims, strides;
  };
  std::vector<Buffer> buffers() const;

  size_t size() const;
  const Entry& entry(size_t index) const;
  // Builds a plan unless its workspace exceeds the cap; false, with the entry's refusal set, if
  // cuDNN can't or the cap forbids it.
  bool build(size_t index, int64_t workspace_cap);
  // Drops a plan that was built.
  void drop(size_t index);
  // Enqueues a built plan on a stream. `buffers`: operands, then outputs, in canonical order.
  // Throws Refused.
  void run(size_t index, CUstream stream, void* const* buffers, void* workspace) const;

 private:
  struct Impl;
  explicit Plans(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// A cuDNN handle for the current context. One that a plan was run with is never destroyed: a
// captured graph can outlive any scope.
cudnnContext* create_handle();
void destroy_handle(cudnnContext* handle);

}  // namespace swiglu_jax::cudnn
