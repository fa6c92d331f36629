// XLA FFI handlers that run the stages as cuDNN graphs.
//
// Each target has two stages. "initialize" runs before every execution, outside any capture: there
// plans are timed and built, once per device and shape. "execute" leases a built plan and enqueues
// it, and is what a command buffer captures.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/cudnn_pool.h"
#include "ffi/device.h"
#include "ffi/driver.h"
#include "ffi/refused.h"
#include "ffi/stage_call.h"
#include "ffi/swiglu_jax.h"

namespace swiglu_jax::cudnn {
namespace {

namespace ffi = xla::ffi;

enum class Form { kGateUp, kDownDswiglu, kDownDswigluTwoStep };
enum class Moment { kInitialize, kExecute };

// One graph of a call, with the name of its plan and the buffers that it takes.
struct Step {
  GraphSpec spec;
  std::string plan;
  std::vector<void*> buffers;
};

std::vector<void*> joined(std::vector<void*> first, const std::vector<void*>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// The two-step form stores dh between its graphs, in the call's scratch.
std::vector<Step> two_steps(const StageCall& call, const GraphSpec& spec, std::string_view plan) {
  GraphSpec dgrad = spec;
  dgrad.kind = Kind::kDgrad;
  dgrad.outputs = 1;
  GraphSpec dswiglu = spec;
  dswiglu.kind = Kind::kDswiglu;
  dswiglu.in_out_weights = false;  // reads no weight: one plan serves both layouts
  dswiglu.h = 0;
  const size_t bar = plan.find('|');
  if (!plan.empty() && bar == std::string_view::npos) {
    throw Refused("plan '" + std::string(plan) + "': expected the names of two, as in e1|e2");
  }
  const int64_t needed = call.m * call.i * 2;
  if (call.scratch_bytes < needed) {
    throw Refused("scratch: expected " + std::to_string(needed) + " bytes or more, got " +
                  std::to_string(call.scratch_bytes));
  }
  std::vector<void*> pointwise(call.operands.begin() + 2, call.operands.end());
  pointwise.insert(pointwise.begin(), call.scratch);
  return {{dgrad, std::string(plan.substr(0, plan.empty() ? 0 : bar)),
           {call.operands[0], call.operands[1], call.scratch}},
          {dswiglu, std::string(plan.empty() ? plan : plan.substr(bar + 1)),
           joined(pointwise, call.results)}};
}

std::vector<Step> steps(Form form, const StageCall& call, std::string_view plan) {
  const Dtype dtype = call.dtype == ffi::DataType::BF16 ? Dtype::kBf16 : Dtype::kF16;
  GraphSpec spec{form == Form::kGateUp ? Kind::kGateUp : Kind::kDownDswiglu,
                 call.outputs,
                 call.in_out_weights,
                 dtype,
                 call.m,
                 call.h,
                 call.i};
  if (form == Form::kDownDswigluTwoStep) return two_steps(call, spec, plan);
  return {{spec, std::string(plan), joined(call.operands, call.results)}};
}

ffi::Error serve(Form form, Moment moment, CUstream stream, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, int64_t outputs, std::string_view weight_layout,
                 std::string_view plan) {
  try {
    StageCall call;
    const Stage stage = form == Form::kGateUp ? Stage::kGateUp : Stage::kDownDswiglu;
    if (auto error = decode(stage, args, rets, outputs, weight_layout, &call)) return *error;
    if (writes_nothing(call)) return ffi::Error::Success();
    if (moment == Moment::kExecute) {
      if (auto error = check_addresses(call)) return *error;
    }
    CUcontext context;
    driver::check(SWIGLU_JAX_CU(cuStreamGetCtx)(stream, &context), "cuStreamGetCtx");
    const driver::CurrentContext current(context);
    const int device = current_device_ordinal();
    for (const Step& step : steps(form, call, plan)) {
      const PoolKey key{device, step.spec, step.plan};
      if (moment == Moment::kInitialize) {
        prepare(key);
      } else {
        CUstreamCaptureStatus capture;
        driver::check(SWIGLU_JAX_CU(cuStreamIsCapturing)(stream, &capture), "cuStreamIsCapturing");
        lease(key, capture != CU_STREAM_CAPTURE_STATUS_NONE)
            .run(stream, step.buffers.data(), nullptr);
      }
    }
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("swiglu_jax, cudnn route: ") + error.what());
  }
  return ffi::Error::Success();
}

template <Form form, Moment moment>
ffi::Error handle(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  int64_t outputs, std::string_view weight_layout, std::string_view plan) {
  return serve(form, moment, stream, args, rets, outputs, weight_layout, plan);
}

template <ffi::ExecutionStage stage>
auto binding() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::PlatformStream<CUstream>>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("outputs")
      .template Attr<std::string_view>("weight_layout")
      .template Attr<std::string_view>("plan");
}

}  // namespace

// XLA's macro leaves visibility to the compiler's default, which is hidden here.
#define SWIGLU_JAX_HANDLERS(symbol, form)                                                 \
  extern "C" SWIGLU_JAX_EXPORT XLA_FFI_Error* symbol##_initialize(XLA_FFI_CallFrame*);    \
  extern "C" SWIGLU_JAX_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*);                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol##_initialize, (handle<form, Moment::kInitialize>), \
                                binding<ffi::ExecutionStage::kInitialize>());             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, (handle<form, Moment::kExecute>),                 \
                                binding<ffi::ExecutionStage::kExecute>(),                 \
                                {ffi::Traits::kCmdBufferCompatible})

SWIGLU_JAX_HANDLERS(swiglu_jax_cudnn_gate_up, Form::kGateUp);
SWIGLU_JAX_HANDLERS(swiglu_jax_cudnn_down_dswiglu, Form::kDownDswiglu);
SWIGLU_JAX_HANDLERS(swiglu_jax_cudnn_down_dswiglu_two_step, Form::kDownDswigluTwoStep);

}  // namespace swiglu_jax::cudnn
