// Stands in for XLA: calls a handler of the exported route with buffers, attributes, a device and a
// stream of the test's own.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  void* stream;
  int32_t ordinal;
};

namespace {

XLA_FFI_Api make_api() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    return new XLA_FFI_Error{args->message};
  };
  api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
    args->message = args->error->message.c_str();
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = args->ctx->stream;
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = args->ctx->ordinal;
    return nullptr;
  };
  return api;
}

}  // namespace

extern "C" {

struct TestBuffer {
  int64_t dtype;  // XLA_FFI_DataType
  int64_t rank;
  int64_t dims[4];
  void* data;
};

struct TestCall {
  int64_t stage;  // XLA_FFI_ExecutionStage
  void* stream;
  int64_t ordinal;
  int64_t operand_count;
  int64_t result_count;
  const TestBuffer* buffers;  // operands, then results
  int64_t outputs;
  const char* weight_layout;
  const char* kernel;
};

// The error's text, or an empty one; the caller frees it.
char* test_call(XLA_FFI_Handler* handler, const TestCall* call) {
  const XLA_FFI_Api api = make_api();
  XLA_FFI_ExecutionContext context{call->stream, static_cast<int32_t>(call->ordinal)};
  const auto count = static_cast<size_t>(call->operand_count + call->result_count);
  std::vector<XLA_FFI_Buffer> buffers(count);
  std::vector<void*> pointers(count);
  for (size_t k = 0; k < count; ++k) {
    const TestBuffer& given = call->buffers[k];
    buffers[k] = {};
    buffers[k].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffers[k].dtype = static_cast<XLA_FFI_DataType>(given.dtype);
    buffers[k].data = given.data;
    buffers[k].rank = given.rank;
    buffers[k].dims = const_cast<int64_t*>(given.dims);
    pointers[k] = &buffers[k];
  }
  std::vector<XLA_FFI_ArgType> operand_types(count, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(count, XLA_FFI_RetType_BUFFER);

  // Sorted by name, as XLA has them.
  XLA_FFI_ByteSpan names[] = {{"kernel", 6}, {"outputs", 7}, {"weight_layout", 13}};
  XLA_FFI_ByteSpan* name_pointers[] = {&names[0], &names[1], &names[2]};
  XLA_FFI_ByteSpan kernel{call->kernel, std::strlen(call->kernel)};
  int64_t outputs_value = call->outputs;
  XLA_FFI_Scalar outputs{XLA_FFI_DataType_S64, &outputs_value};
  XLA_FFI_ByteSpan layout{call->weight_layout, std::strlen(call->weight_layout)};
  void* values[] = {&kernel, &outputs, &layout};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_STRING, XLA_FFI_AttrType_SCALAR,
                              XLA_FFI_AttrType_STRING};

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = static_cast<XLA_FFI_ExecutionStage>(call->stage);
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, call->operand_count, operand_types.data(),
                pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, call->result_count, result_types.data(),
                pointers.data() + call->operand_count};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 3, types, name_pointers, values};
  XLA_FFI_Error* error = handler(&frame);
  const std::string text = error == nullptr ? "" : error->message;
  delete error;
  return strdup(text.c_str());
}

// The traits that the handler tells XLA at registration; -1 where it refuses to.
int64_t test_traits(XLA_FFI_Handler* handler) {
  const XLA_FFI_Api api = make_api();
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata,
                              nullptr};
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.extension_start = &extension.extension_base;
  XLA_FFI_Error* error = handler(&frame);
  delete error;
  return error != nullptr ? -1 : static_cast<int64_t>(metadata.traits);
}

void test_free(char* text) { std::free(text); }
}
