// Built plans, kept for as long as the process lives.
//
// For each (device, graph, plan) there is a small pool of pairs of a cuDNN handle and the plan that
// was built with it. A call leases one pair while it enqueues its work, so no two calls in flight
// share a handle or a plan; pairs are never destroyed, so whatever a captured graph points to is
// still there when it replays.
#pragma once

#include <cuda.h>

#include <string>
#include <vector>

#include "ffi/cudnn_graph.h"

namespace swiglu_jax::cudnn {

// Workspace that a plan may need, in bytes, per graph. Every plan of every graph here needs none
// (docs/cudnn.md), so none is declared as a result of the calls either.
inline constexpr int64_t kWorkspaceCap = 0;

struct PoolKey {
  int device;  // the driver's ordinal
  GraphSpec spec;
  std::string plan;  // a plan's name; empty for the fastest, timed when the pool is first filled

  auto tied() const { return std::tie(device, spec, plan); }
  bool operator<(const PoolKey& other) const { return tied() < other.tied(); }
};

class Pool;

// One pair, on loan.
class Lease {
 public:
  Lease(Pool* pool, size_t pair) : pool_(pool), pair_(pair) {}
  Lease(Lease&& other) noexcept : pool_(other.pool_), pair_(other.pair_) { other.pool_ = nullptr; }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Lease& operator=(Lease&&) = delete;
  ~Lease();

  // Enqueues the plan. Throws Refused with cuDNN's text.
  void run(CUstream stream, void* const* buffers, void* workspace) const;

 private:
  Pool* pool_;
  size_t pair_;
};

// Makes sure that a pair is there, and one more (up to a few) when all are on loan: for the stage
// before execution, where building is allowed. Runs under the current context, which must be the
// device's. Throws Refused.
void prepare(const PoolKey& key);

// A pair, after waiting for one where all are on loan. If none was ever built, builds it, unless
// `capturing`: building allocates, which a capture forbids. Throws Refused.
Lease lease(const PoolKey& key, bool capturing);

// For tests and reports.
struct PoolState {
  std::string plan;     // what its timing chose, where it was asked to choose; empty if not built
  size_t pairs = 0;     // how many were built
  size_t leases = 0;    // how often a call enqueued its plan,
  size_t captured = 0;  // and how many of these were being captured
};
PoolState pool_state(const PoolKey& key);

}  // namespace swiglu_jax::cudnn
