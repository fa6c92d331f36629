#include "ffi/cudnn_pool.h"

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>

#include "ffi/cudnn_tuning.h"
#include "ffi/device.h"
#include "ffi/refused.h"

namespace swiglu_jax::cudnn {
namespace {

// Enough for a few threads that run the same step at once; more only wait a few microseconds.
constexpr size_t kMostPairs = 4;

// One build at a time: each keeps a core busy for a good part of a second.
std::mutex build_mutex;

}  // namespace

class Pool {
 public:
  explicit Pool(PoolKey key) : key_(std::move(key)) {}

  void prepare() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty() || pairs_.size() >= kMostPairs) return;
    }
    add_pair();
  }

  Lease lease(bool capturing) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (pairs_.empty()) {
      lock.unlock();
      if (capturing) {
        throw Refused("no cuDNN plan was built for " + key_.spec.describe() +
                      " before a command buffer captured it");
      }
      add_pair();
      lock.lock();
    }
    returned_.wait(lock, [this] { return !idle_.empty(); });
    const size_t pair = idle_.back();
    idle_.pop_back();
    ++leases_;
    if (capturing) ++captured_;
    return Lease(this, pair);
  }

  void give_back(size_t pair) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      idle_.push_back(pair);
    }
    returned_.notify_one();
  }

  const Plans& plans(size_t pair) {
    std::lock_guard<std::mutex> lock(mutex_);
    return *pairs_[pair];
  }

  PoolState state() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {chosen_, pairs_.size(), leases_, captured_};
  }

 private:
  void add_pair() {
    std::lock_guard<std::mutex> building(build_mutex);
    std::string plan;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // Whoever held the build mutex before us may have built what we came for.
      if (!idle_.empty()) return;
      plan = chosen_.empty() ? key_.plan : chosen_;
    }
    const Device device = current_device_with_handle();
    std::unique_ptr<Plans> built;
    try {
      if (plan.empty()) plan = tune(key_.spec, device, TuningLimits{}).fastest().name;
      built = Plans::named(key_.spec, device, plan);
      if (built->entry(0).workspace > kWorkspaceCap) {
        throw Refused("cuDNN plan " + plan + " needs a workspace of " +
                      std::to_string(built->entry(0).workspace) + " bytes");
      }
    } catch (...) {
      built.reset();
      destroy_handle(device.handle);
      throw;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      chosen_ = plan;
      pairs_.push_back(std::move(built));
      idle_.push_back(pairs_.size() - 1);
    }
    returned_.notify_one();
  }

  const PoolKey key_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::string chosen_;
  std::vector<std::unique_ptr<Plans>> pairs_;  // each holds the handle it was built with
  std::vector<size_t> idle_;
  size_t leases_ = 0;
  size_t captured_ = 0;
};

namespace {

Pool& pool_of(const PoolKey& key) {
  // Leaked: at exit the driver may be gone before static destructors run.
  static auto& mutex = *new std::mutex;
  static auto& pools = *new std::map<PoolKey, std::unique_ptr<Pool>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Pool>& pool = pools[key];
  if (pool == nullptr) pool = std::make_unique<Pool>(key);
  return *pool;
}

}  // namespace

Lease::~Lease() {
  if (pool_ != nullptr) pool_->give_back(pair_);
}

void Lease::run(CUstream stream, void* const* buffers, void* workspace) const {
  pool_->plans(pair_).run(0, stream, buffers, workspace);
}

void prepare(const PoolKey& key) { pool_of(key).prepare(); }
Lease lease(const PoolKey& key, bool capturing) { return pool_of(key).lease(capturing); }
PoolState pool_state(const PoolKey& key) { return pool_of(key).state(); }

}  // namespace swiglu_jax::cudnn
