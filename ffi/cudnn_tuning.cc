#include "ffi/cudnn_tuning.h"

#include <algorithm>

#include "ffi/cudnn_pool.h"
#include "ffi/cudnn_trial.h"
#include "ffi/driver.h"
#include "ffi/refused.h"

namespace swiglu_jax::cudnn {
namespace {

constexpr int kRounds = 9;
// A sample lasts about this long: many runs of a short kernel, one of a long one.
constexpr double kSampleUs = 1000.0;
constexpr int kMostRuns = 50;
// A plan whose single run takes this many times the best one's is not timed further.
constexpr double kHopeless = 1.5;

class Stream {
 public:
  Stream() {
    driver::check(SWIGLU_JAX_CU(cuStreamCreate)(&stream_, CU_STREAM_NON_BLOCKING),
                  "cuStreamCreate");
    for (CUevent& event : events_) {
      driver::check(SWIGLU_JAX_CU(cuEventCreate)(&event, CU_EVENT_DEFAULT), "cuEventCreate");
    }
  }
  ~Stream() {
    for (CUevent event : events_) SWIGLU_JAX_CU(cuEventDestroy)(event);
    SWIGLU_JAX_CU(cuStreamDestroy)(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  CUstream get() const { return stream_; }

  // Microseconds on the GPU of whatever `enqueue` enqueues.
  template <typename Enqueue>
  double time(const Enqueue& enqueue) {
    driver::check(SWIGLU_JAX_CU(cuEventRecord)(events_[0], stream_), "cuEventRecord");
    enqueue();
    driver::check(SWIGLU_JAX_CU(cuEventRecord)(events_[1], stream_), "cuEventRecord");
    driver::check(SWIGLU_JAX_CU(cuEventSynchronize)(events_[1]), "cuEventSynchronize");
    float ms = 0;
    driver::check(SWIGLU_JAX_CU(cuEventElapsedTime)(&ms, events_[0], events_[1]),
                  "cuEventElapsedTime");
    return 1e3 * ms;
  }

 private:
  CUstream stream_ = nullptr;
  CUevent events_[2] = {nullptr, nullptr};
};

int64_t total_bytes(const GraphSpec& spec) {
  int64_t total = 0;
  for (int64_t bytes : spec.buffer_bytes()) total += bytes;
  return total;
}

// `most` bytes, or half of what is free where that is less: a call whose plan nobody named is timed
// when a program first runs, and XLA may have left little.
int64_t affordable(int64_t most) {
  size_t free = 0;
  size_t total = 0;
  driver::check(SWIGLU_JAX_CU(cuMemGetInfo)(&free, &total), "cuMemGetInfo");
  return std::min(most, static_cast<int64_t>(free / 2));
}

}  // namespace

const Trial& Tuning::fastest() const {
  const Trial* best = nullptr;
  std::string reasons;
  for (const Trial& trial : trials) {
    if (!trial.refusal.empty()) {
      reasons += "; " + trial.tag + ": " + trial.refusal;
    } else if (best == nullptr || trial.us < best->us) {
      best = &trial;
    }
  }
  if (trials.empty()) throw Refused("cuDNN has no plan for it");
  if (best == nullptr) throw Refused("every plan of cuDNN was passed over" + reasons);
  return *best;
}

Tuning tune(const GraphSpec& asked, const Device& device, const TuningLimits& limits) {
  GraphSpec spec = asked;
  const int64_t memory = affordable(limits.memory);
  while (spec.m > 1 && total_bytes(spec) > memory) spec.m = (spec.m + 1) / 2;

  const std::unique_ptr<Plans> plans = Plans::heuristic(spec, device);
  Stream stream;
  const TrialBuffers scratch(spec, stream.get());
  const auto run = [&](size_t index, int times) {
    for (int n = 0; n < times; ++n) plans->run(index, stream.get(), scratch.buffers(), nullptr);
  };

  Tuning tuning;
  tuning.rows = spec.m;
  double best = 0;
  size_t built = 0;
  for (size_t index = 0; index < plans->size(); ++index) {
    Trial trial;
    trial.name = plans->entry(index).name;
    trial.tag = plans->entry(index).tag;
    if (built >= limits.plans) {
      trial.refusal = "not tried: beyond the first " + std::to_string(limits.plans);
    } else if (!plans->build(index, kWorkspaceCap)) {
      trial.refusal = plans->entry(index).refusal;
    } else {
      ++built;
      try {
        scratch.poison(stream.get());
        run(index, 1);
        trial.refusal = scratch.verdict(stream.get());
        trial.us = stream.time([&] { run(index, 1); });
        if (trial.refusal.empty() && (best == 0 || trial.us < best)) best = trial.us;
      } catch (const Refused& refused) {
        trial.refusal = refused.what();
      }
    }
    tuning.trials.push_back(std::move(trial));
  }

  std::vector<std::vector<double>> samples(plans->size());
  for (size_t index = 0; index < plans->size(); ++index) {
    Trial& trial = tuning.trials[index];
    if (trial.refusal.empty() && trial.us > kHopeless * best) {
      trial.refusal = "slower than the best";
    }
  }
  const int times = std::clamp(static_cast<int>(kSampleUs / std::max(best, 1.0)), 1, kMostRuns);
  // In turns, so that a change of the GPU's clocks meets all alike.
  for (int round = 0; round < kRounds; ++round) {
    for (size_t index = 0; index < plans->size(); ++index) {
      if (!tuning.trials[index].refusal.empty()) continue;
      samples[index].push_back(stream.time([&] { run(index, times); }) / times);
    }
  }
  for (size_t index = 0; index < plans->size(); ++index) {
    std::vector<double>& taken = samples[index];
    if (taken.empty()) continue;
    std::nth_element(taken.begin(), taken.begin() + kRounds / 2, taken.end());
    tuning.trials[index].us = taken[kRounds / 2];
  }
  return tuning;
}

}  // namespace swiglu_jax::cudnn
