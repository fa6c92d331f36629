// Stands in for XLA: calls an FFI handler with buffers, attributes and a stream of the test's own.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
void get_message(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}
void destroy(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = *reinterpret_cast<void**>(args->ctx);
  return nullptr;
}

XLA_FFI_Api make_api() {
  XLA_FFI_Api api;
  std::memset(&api, 0, sizeof api);
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create;
  api.XLA_FFI_Error_GetMessage = get_message;
  api.XLA_FFI_Error_Destroy = destroy;
  api.XLA_FFI_Stream_Get = get_stream;
  return api;
}

}  // namespace

extern "C" {

typedef struct {
  int dtype;  // XLA_FFI_DataType
  int64_t rank;
  int64_t* dims;
  void* data;
} test_buffer;

// The handler's traits, from the metadata query that XLA makes at registration.
int traits(XLA_FFI_Handler* handler) {
  XLA_FFI_Api api = make_api();
  XLA_FFI_Metadata metadata;
  std::memset(&metadata, 0, sizeof metadata);
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension;
  std::memset(&extension, 0, sizeof extension);
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata,
                              nullptr};
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame;
  std::memset(&frame, 0, sizeof frame);
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.extension_start = &extension.extension_base;
  XLA_FFI_Error* error = handler(&frame);
  if (error != nullptr) {
    delete error;
    return -1;
  }
  return static_cast<int>(metadata.traits);
}

// Calls a handler of the cudnn route; the error's text, or an empty one, which the caller frees.
char* call(XLA_FFI_Handler* handler, int stage, void* stream, int64_t count_args,
           const test_buffer* args, int64_t count_rets, const test_buffer* rets, int64_t outputs,
           const char* weight_layout, const char* plan) {
  XLA_FFI_Api api = make_api();
  std::vector<XLA_FFI_Buffer> buffers(static_cast<size_t>(count_args + count_rets));
  std::vector<void*> pointers;
  for (size_t k = 0; k < buffers.size(); ++k) {
    const test_buffer& from = static_cast<int64_t>(k) < count_args ? args[k]
                                                                  : rets[k - count_args];
    std::memset(&buffers[k], 0, sizeof buffers[k]);
    buffers[k].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffers[k].dtype = static_cast<XLA_FFI_DataType>(from.dtype);
    buffers[k].data = from.data;
    buffers[k].rank = from.rank;
    buffers[k].dims = from.dims;
    pointers.push_back(&buffers[k]);
  }
  std::vector<XLA_FFI_ArgType> arg_types(static_cast<size_t>(count_args), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(static_cast<size_t>(count_rets), XLA_FFI_RetType_BUFFER);

  // Attributes are sorted by name.
  XLA_FFI_ByteSpan names[3] = {{"outputs", 7}, {"plan", 4}, {"weight_layout", 13}};
  XLA_FFI_ByteSpan* name_pointers[3] = {&names[0], &names[1], &names[2]};
  XLA_FFI_Scalar scalar = {XLA_FFI_DataType_S64, &outputs};
  XLA_FFI_ByteSpan plan_span = {plan, std::strlen(plan)};
  XLA_FFI_ByteSpan layout_span = {weight_layout, std::strlen(weight_layout)};
  void* values[3] = {&scalar, &plan_span, &layout_span};
  XLA_FFI_AttrType types[3] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_STRING,
                               XLA_FFI_AttrType_STRING};

  XLA_FFI_CallFrame frame;
  std::memset(&frame, 0, sizeof frame);
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&stream);
  frame.stage = static_cast<XLA_FFI_ExecutionStage>(stage);
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, count_args, arg_types.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, count_rets, ret_types.data(),
                pointers.data() + count_args};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 3, types, name_pointers, values};

  XLA_FFI_Error* error = handler(&frame);
  const std::string text = error == nullptr ? "" : error->message;
  delete error;
  return strdup(text.c_str());
}

void release(char* text) { std::free(text); }
}
