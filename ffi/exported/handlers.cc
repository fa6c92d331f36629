// XLA FFI handlers that run the stages with exported kernels.
//
// Each target has two stages. "initialize" runs before every execution, outside any capture: there
// the kernel's module is loaded, once per device. "execute" calls the kernel's entry, which encodes
// tensor maps and launches one kernel; a command buffer captures it.
#include <string>
#include <string_view>

#include "ffi/driver.h"
#include "ffi/exported/entry_call.h"
#include "ffi/exported/kernel_registry.h"
#include "ffi/refused.h"
#include "ffi/stage_call.h"
#include "ffi/swiglu_jax.h"

namespace swiglu_jax::exported {
namespace {

namespace ffi = xla::ffi;

enum class Moment { kInitialize, kExecute };

int architecture_of(int ordinal) {
  CUdevice device;
  driver::check(SWIGLU_JAX_CU(cuDeviceGet)(&device, ordinal), "cuDeviceGet");
  int major = 0;
  int minor = 0;
  driver::check(SWIGLU_JAX_CU(cuDeviceGetAttribute)(
                    &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
                "cuDeviceGetAttribute");
  driver::check(SWIGLU_JAX_CU(cuDeviceGetAttribute)(
                    &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
                "cuDeviceGetAttribute");
  return 10 * major + minor;
}

// Loads the kernel on a device: checks the architecture and rehearses a call.
void make_ready(Kernel& kernel, const StageCall& call, int ordinal, CUstream stream) {
  if (kernel.ready(ordinal)) return;
  const int architecture = architecture_of(ordinal);
  if (architecture != kernel.description().architecture) {
    throw Refused("the kernel is for sm_" + std::to_string(kernel.description().architecture) +
                  "; device " + std::to_string(ordinal) + " is sm_" +
                  std::to_string(architecture));
  }
  call_entry(kernel.description(), call, ordinal, stream, /*rehearsal=*/true);
  kernel.set_ready(ordinal);
}

ffi::Error serve(Stage stage, Moment moment, CUstream stream, int ordinal, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, int64_t outputs, std::string_view weight_layout,
                 std::string_view name) {
  try {
    StageCall call;
    if (auto error = decode(stage, args, rets, outputs, weight_layout, &call)) return *error;
    if (writes_nothing(call)) return ffi::Error::Success();
    Kernel& kernel = find(name);
    const SwigluJaxKernel& description = kernel.description();
    check_serves(description, call);
    if (moment == Moment::kExecute) check_addresses(description, call);
    const driver::CurrentContext current(driver::primary_context(ordinal));
    make_ready(kernel, call, ordinal, stream);
    if (moment == Moment::kExecute) call_entry(description, call, ordinal, stream, false);
  } catch (const std::exception& error) {
    return ffi::Error::Internal("swiglu_jax, exported kernel " + std::string(name) + ": " +
                                error.what());
  }
  return ffi::Error::Success();
}

template <Stage stage, Moment moment>
ffi::Error handle(CUstream stream, int32_t ordinal, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, int64_t outputs, std::string_view weight_layout,
                  std::string_view kernel) {
  return serve(stage, moment, stream, ordinal, args, rets, outputs, weight_layout, kernel);
}

template <ffi::ExecutionStage stage>
auto binding() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::PlatformStream<CUstream>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("outputs")
      .template Attr<std::string_view>("weight_layout")
      .template Attr<std::string_view>("kernel");
}

}  // namespace

// XLA's macro leaves visibility to the compiler's default, which is hidden here.
#define SWIGLU_JAX_HANDLERS(symbol, stage)                                                 \
  extern "C" SWIGLU_JAX_EXPORT XLA_FFI_Error* symbol##_initialize(XLA_FFI_CallFrame*);     \
  extern "C" SWIGLU_JAX_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*);                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol##_initialize, (handle<stage, Moment::kInitialize>), \
                                binding<ffi::ExecutionStage::kInitialize>());              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, (handle<stage, Moment::kExecute>),                 \
                                binding<ffi::ExecutionStage::kExecute>(),                  \
                                {ffi::Traits::kCmdBufferCompatible})

SWIGLU_JAX_HANDLERS(swiglu_jax_exported_gate_up, Stage::kGateUp);
SWIGLU_JAX_HANDLERS(swiglu_jax_exported_down_dswiglu, Stage::kDownDswiglu);
SWIGLU_JAX_HANDLERS(swiglu_jax_exported_input_gradient, Stage::kInputGradient);
SWIGLU_JAX_HANDLERS(swiglu_jax_exported_weight_gradients, Stage::kWeightGradients);

}  // namespace swiglu_jax::exported

// Registers a library of exported kernels; it is opened when a kernel is first looked for. Calls
// with a path that is registered already do nothing.
extern "C" SWIGLU_JAX_EXPORT void swiglu_jax_exported_add_library(const char* path) {
  swiglu_jax::exported::add_library(path);
}
