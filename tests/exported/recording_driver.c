// A libcuda.so.1 for a machine without a GPU that records what a launcher asks of it.
//
// It answers for one or two GPUs of a named model, checks what the CUDA documentation says the
// driver checks (tensor maps, launch limits), and keeps every tensor map and launch as JSON, for a
// test to take. Nothing runs. Kernel parameters are found through the cubin's own .nv.info.
//
// RECORDING_MODEL: B200 (default), B300, H200 or RTX (PRO 6000). RECORDING_DEVICES: how many (default 1).
#define _GNU_SOURCE
#include <cuda.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef cuCtxGetDevice
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent

#define EXPORT __attribute__((visibility("default")))
enum { kMostKernels = 8, kMostParameters = 32, kMostDevices = 8, kMapMagic = 0x70616d53 };

struct parameter {
  unsigned offset, size;
};
struct kernel {
  char name[512];
  unsigned parameter_count;
  struct parameter parameters[kMostParameters];
  int dynamic_shared[kMostDevices];  // the most that a launch may ask for
  int loaded;                        // devices on which cuFuncLoad was called
};
struct library {
  unsigned kernel_count;
  struct kernel kernels[kMostKernels];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char *events;
static size_t events_size, events_capacity;
static unsigned map_count;
static char failing[64];
static int failing_status;
static char contexts[kMostDevices];
static __thread CUcontext stack[16];
static __thread int depth;

static void record(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char *text = NULL;
  const int size = vasprintf(&text, format, arguments);
  va_end(arguments);
  while (events_size + (size_t)size + 1 > events_capacity) {
    events_capacity = events_capacity ? 2 * events_capacity : 1 << 16;
    events = realloc(events, events_capacity);
  }
  memcpy(events + events_size, text, (size_t)size + 1);
  events_size += (size_t)size;
  free(text);
}

// All events since the last call, one JSON object a line; the caller frees them.
EXPORT char *recording_take(void) {
  pthread_mutex_lock(&mutex);
  char *taken = strdup(events ? events : "");
  events_size = 0;
  if (events) events[0] = 0;
  pthread_mutex_unlock(&mutex);
  return taken;
}

EXPORT void recording_free(char *text) { free(text); }

// From now on `function` fails with `status`; an empty name: nothing fails.
EXPORT void recording_fail(const char *function, int status) {
  snprintf(failing, sizeof failing, "%s", function);
  failing_status = status;
}

#define ENTER                                                              \
  do {                                                                     \
    if (!strcmp(failing, __func__)) return (CUresult)failing_status;       \
  } while (0)

static int device_count(void) {
  const char *text = getenv("RECORDING_DEVICES");
  return text ? atoi(text) : 1;
}

struct model {
  const char *name;
  int major, minor, multiprocessors;
  int shared_limit;  // bytes of shared memory that a block may opt in to
};

static const struct model *model(void) {
  static const struct model models[] = {{"B200", 10, 0, 148, 232448},
                                        {"B300", 10, 3, 148, 232448},
                                        {"H200", 9, 0, 132, 232448},
                                        {"RTX", 12, 0, 188, 101376}};
  const char *text = getenv("RECORDING_MODEL");
  for (size_t k = 0; text && k < sizeof models / sizeof *models; ++k) {
    if (!strcmp(text, models[k].name)) return &models[k];
  }
  return &models[0];
}

EXPORT CUresult cuInit(unsigned flags) {
  ENTER;
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuDeviceGetCount(int *count) {
  ENTER;
  *count = device_count();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER;
  if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  ENTER;
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = model()->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = model()->minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = model()->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = model()->shared_limit; break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ENTER;
  *context = (CUcontext)&contexts[device];
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  ENTER;
  stack[depth++] = context;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  ENTER;
  if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack[--depth];
  return CUDA_SUCCESS;
}
static int current_device(void) {
  return depth == 0 ? -1 : (int)((char *)stack[depth - 1] - contexts);
}

EXPORT CUresult cuGetErrorName(CUresult status, const char **name) {
  static const struct {
    int status;
    const char *name;
  } names[] = {{0, "CUDA_SUCCESS"},
               {1, "CUDA_ERROR_INVALID_VALUE"},
               {2, "CUDA_ERROR_OUT_OF_MEMORY"},
               {101, "CUDA_ERROR_INVALID_DEVICE"},
               {201, "CUDA_ERROR_INVALID_CONTEXT"},
               {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
               {719, "CUDA_ERROR_LAUNCH_FAILED"}};
  *name = "CUDA_ERROR_UNKNOWN";
  for (size_t k = 0; k < sizeof names / sizeof *names; ++k) {
    if (names[k].status == (int)status) *name = names[k].name;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult status, const char **text) {
  static __thread char said[64];
  snprintf(said, sizeof said, "status %d of the recording driver", (int)status);
  *text = said;
  return CUDA_SUCCESS;
}

// ---- modules

// The parameters in .nv.info.<kernel>, whose attributes are known by number: 0x17 has an ordinal, an
// offset and the size in bits 18-31 of a word; 0x45 the same with the size in bits 16-31.
static void read_parameters(struct kernel *kernel, const unsigned char *at, size_t size) {
  const unsigned char *end = at + size;
  while (at + 4 <= end) {
    const unsigned format = at[0], attribute = at[1];
    unsigned payload = 0;
    if (format == 4) memcpy(&payload, at + 2, 2);
    if (format == 4 && (attribute == 0x17 || attribute == 0x45)) {
      unsigned short ordinal, offset;
      unsigned word;
      memcpy(&ordinal, at + 8, 2);
      memcpy(&offset, at + 10, 2);
      memcpy(&word, at + 12, 4);
      if (ordinal < kMostParameters) {
        kernel->parameters[ordinal].offset = offset;
        kernel->parameters[ordinal].size = word >> (attribute == 0x17 ? 18 : 16);
        if (ordinal + 1u > kernel->parameter_count) kernel->parameter_count = ordinal + 1u;
      }
    }
    at += 4 + payload;
  }
}

// The cubin in an image: the image itself, or the first ELF entry of a fat binary, which is a header
// (magic, version, its own size, total size) and entries (kind, ..., header size, payload size).
static const unsigned char *cubin_of(const void *image) {
  const unsigned char *at = image;
  unsigned magic;
  memcpy(&magic, at, 4);
  if (magic != 0xBA55ED50u) return at;
  unsigned short header_size;
  unsigned long long total;
  memcpy(&header_size, at + 6, 2);
  memcpy(&total, at + 8, 8);
  const unsigned char *end = at + header_size + total;
  for (at += header_size; at < end;) {
    unsigned short kind;
    unsigned entry_size;
    unsigned long long payload;
    memcpy(&kind, at, 2);
    memcpy(&entry_size, at + 4, 4);
    memcpy(&payload, at + 8, 8);
    if (kind == 2) return at + entry_size;
    at += entry_size + payload;
  }
  return image;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *jit_options,
                                  void **jit_values, unsigned jit_count, CUlibraryOption *options,
                                  void **values, unsigned count) {
  ENTER;
  (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
  const unsigned char *bytes = cubin_of(image);
  const Elf64_Ehdr *header = (const void *)bytes;
  if (memcmp(bytes, ELFMAG, SELFMAG) != 0) return CUDA_ERROR_INVALID_IMAGE;
  // The architecture is in bits 8-15 of the flags (0x5a: SM90, 0x64: SM100).
  const unsigned wanted = 10u * (unsigned)model()->major + (unsigned)model()->minor;
  if ((header->e_flags >> 8 & 0xff) != wanted) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  struct library *made = calloc(1, sizeof *made);
  const Elf64_Shdr *sections = (const void *)(bytes + header->e_shoff);
  const char *names = (const char *)bytes + sections[header->e_shstrndx].sh_offset;
  for (int k = 0; k < header->e_shnum; ++k) {
    const char *name = names + sections[k].sh_name;
    if (strncmp(name, ".nv.info.", 9) || made->kernel_count == kMostKernels) continue;
    struct kernel *kernel = &made->kernels[made->kernel_count++];
    snprintf(kernel->name, sizeof kernel->name, "%s", name + 9);
    read_parameters(kernel, bytes + sections[k].sh_offset, sections[k].sh_size);
  }
  *library = (CUlibrary)made;
  pthread_mutex_lock(&mutex);
  record("{\"event\": \"load\", \"kernels\": %u}\n", made->kernel_count);
  pthread_mutex_unlock(&mutex);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary handle, const char *name) {
  ENTER;
  struct library *library = (struct library *)handle;
  for (unsigned k = 0; k < library->kernel_count; ++k) {
    if (strcmp(library->kernels[k].name, name)) continue;
    *kernel = (CUkernel)&library->kernels[k];
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  ENTER;
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncLoad(CUfunction function) {
  ENTER;
  if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  pthread_mutex_lock(&mutex);
  ((struct kernel *)function)->loaded |= 1 << current_device();
  record("{\"event\": \"function\", \"device\": %d}\n", current_device());
  pthread_mutex_unlock(&mutex);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel,
                                     CUdevice device) {
  ENTER;
  (void)kernel, (void)device;
  if (attribute != CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  *value = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                     CUdevice device) {
  ENTER;
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value > model()->shared_limit) return CUDA_ERROR_INVALID_VALUE;
    ((struct kernel *)kernel)->dynamic_shared[device] = value;
  } else if (attribute != CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// ---- tensor maps

static unsigned element_bytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    default: return 4;
  }
}

static const char *bad_map(const void *map, CUtensorMapDataType type, unsigned rank,
                           const void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                           const cuuint32_t *box, const cuuint32_t *steps,
                           CUtensorMapSwizzle swizzle) {
  static const unsigned spans[] = {256, 32, 64, 128};
  if ((uintptr_t)map % 64) return "the map is not on a 64-byte boundary";
  if (!address || (uintptr_t)address % 16) return "the address is not on a 16-byte boundary";
  if (rank < 1 || rank > 5) return "rank";
  for (unsigned k = 0; k < rank; ++k) {
    if (sizes[k] < 1 || sizes[k] > 1ull << 32) return "a size is not in 1..2^32";
    if (box[k] < 1 || box[k] > 256) return "a box size is not in 1..256";
    if (steps[k] < 1 || steps[k] > 8) return "an element stride is not in 1..8";
    if (k + 1 < rank && (strides[k] % 16 || strides[k] >= 1ull << 40)) return "a stride";
  }
  const unsigned row = box[0] * element_bytes(type);
  if (row % 16) return "a box's row is not a multiple of 16 bytes";
  if ((unsigned)swizzle < 4 && row > spans[swizzle]) return "a box's row exceeds the swizzle span";
  return NULL;
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                       void *address, const cuuint64_t *sizes,
                                       const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill) {
  ENTER;
  const char *bad = bad_map(map, type, rank, address, sizes, strides, box, steps, swizzle);
  if (bad) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&mutex);
  const unsigned number = ++map_count;
  memset(map, 0, sizeof *map);
  memcpy(map, &(unsigned[]){kMapMagic, number}, 8);
  record("{\"event\": \"map\", \"map\": %u, \"dtype\": %d, \"address\": %llu, \"interleave\": %d, "
         "\"swizzle\": %d, \"promotion\": %d, \"fill\": %d, \"dims\": [",
         number, type, (unsigned long long)(uintptr_t)address, interleave, swizzle, promotion, fill);
  for (unsigned k = 0; k < rank; ++k) {
    record("%s[%llu, %llu, %u, %u]", k ? ", " : "", (unsigned long long)sizes[k],
           (unsigned long long)(k ? strides[k - 1] : element_bytes(type)), box[k], steps[k]);
  }
  record("]}\n");
  pthread_mutex_unlock(&mutex);
  return CUDA_SUCCESS;
}

// ---- launches

static void record_parameter(const struct parameter *parameter, const unsigned char *value) {
  unsigned head[2];
  memcpy(head, value, parameter->size < 8 ? 4 : 8);
  if (parameter->size == sizeof(CUtensorMap) && head[0] == (unsigned)kMapMagic) {
    record("{\"map\": %u}", head[1]);
    return;
  }
  record("\"");
  for (unsigned k = 0; k < parameter->size; ++k) record("%02x", value[k]);
  record("\"");
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function,
                                 void **parameters, void **extra) {
  ENTER;
  const struct kernel *kernel = (const struct kernel *)function;
  const unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (extra != NULL || !config->gridDimX || !config->gridDimY || !config->gridDimZ ||
      config->gridDimX > 0x7fffffffu || config->gridDimY > 65535 || config->gridDimZ > 65535 ||
      threads < 1 || threads > 1024 ||
      (int)config->sharedMemBytes > kernel->dynamic_shared[current_device()]) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  unsigned cluster[3] = {1, 1, 1};
  int dependent = 0;
  for (unsigned k = 0; k < config->numAttrs; ++k) {
    const CUlaunchAttribute *attribute = &config->attrs[k];
    if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      memcpy(cluster, &attribute->value.clusterDim, sizeof cluster);
    } else if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      dependent = attribute->value.programmaticStreamSerializationAllowed;
    }
  }
  if (config->gridDimX % cluster[0] || config->gridDimY % cluster[1] ||
      config->gridDimZ % cluster[2]) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  pthread_mutex_lock(&mutex);
  record("{\"event\": \"launch\", \"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, "
         "%u], \"cluster\": [%u, %u, %u], \"shared\": %u, \"stream\": %llu, \"device\": %d, "
         "\"dependent\": %d, \"loaded\": %s, \"parameters\": [",
         kernel->name, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
         config->blockDimY, config->blockDimZ, cluster[0], cluster[1], cluster[2],
         config->sharedMemBytes, (unsigned long long)(uintptr_t)config->hStream, current_device(),
         dependent, kernel->loaded >> current_device() & 1 ? "true" : "false");
  for (unsigned k = 0; k < kernel->parameter_count; ++k) {
    record("%s", k ? ", " : "");
    record_parameter(&kernel->parameters[k], parameters[k]);
  }
  record("]}\n");
  pthread_mutex_unlock(&mutex);
  return CUDA_SUCCESS;
}
