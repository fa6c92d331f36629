// A libcuda.so.1 for a machine without a GPU: everything succeeds, nothing runs.
//
// cuDNN builds plans for a GPU that is only described, but its engine library links the driver and
// loads the kernels it generates. This stand-in accepts them: every entry point it is asked for
// returns success, and those that hand back an object hand back a pointer that isn't null.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int object;

static int succeed(void) { return 0; }
static int hand_out(void **out) {
  *out = &object;
  return 0;
}

int cuGetErrorName(int status, const char **name) {
  *name = status == 0 ? "CUDA_SUCCESS" : "CUDA_ERROR_STUB";
  return 0;
}
int cuGetErrorString(int status, const char **text) {
  *text = status == 0 ? "no error" : "an error of the stub driver";
  return 0;
}
int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}
int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}
int cuLibraryLoadData(void **library) { return hand_out(library); }
int cuLibraryGetKernel(void **kernel) { return hand_out(kernel); }
int cuKernelGetFunction(void **function) { return hand_out(function); }
int cuModuleLoadData(void **module) { return hand_out(module); }
int cuModuleLoadDataEx(void **module) { return hand_out(module); }
int cuModuleGetFunction(void **function) { return hand_out(function); }
int cuModuleUnload(void *module) { return (void)module, 0; }
int cuTensorMapEncodeTiled(void *map) { return (void)map, 0; }
int cuTensorMapEncodeIm2col(void *map) { return (void)map, 0; }

// What cuDNN and this library look up by name and need no answer from.
#define SUCCEED(name) \
  int name(void) { return 0; }
SUCCEED(cuCtxPushCurrent) SUCCEED(cuCtxPushCurrent_v2) SUCCEED(cuCtxSetCurrent)
SUCCEED(cuDevicePrimaryCtxRelease) SUCCEED(cuDevicePrimaryCtxReset) SUCCEED(cuFuncSetAttribute)
SUCCEED(cuKernelSetAttribute) SUCCEED(cuLaunchCooperativeKernel) SUCCEED(cuLaunchKernel)
SUCCEED(cuLaunchKernelEx) SUCCEED(cuLibraryUnload) SUCCEED(cuLinkAddData)
SUCCEED(cuLinkAddData_v2) SUCCEED(cuLinkAddFile_v2) SUCCEED(cuLinkDestroy)
SUCCEED(cuLinkComplete) SUCCEED(cuLinkCreate) SUCCEED(cuLinkCreate_v2)
SUCCEED(cuModuleGetGlobal_v2) SUCCEED(cuMemcpyDtoH_v2) SUCCEED(cuStreamSynchronize)

#define HAND_OUT(name) \
  int name(void **out) { return hand_out(out); }
HAND_OUT(cuCtxPopCurrent) HAND_OUT(cuCtxPopCurrent_v2) HAND_OUT(cuDevicePrimaryCtxRetain)
HAND_OUT(cuModuleLoadFatBinary) HAND_OUT(cuLibraryLoadFromFile)

#define ANSWER(name, type, value) \
  int name(type *answer) {        \
    *answer = value;              \
    return 0;                     \
  }
ANSWER(cuCtxGetLimit, size_t, 1024)
ANSWER(cuFuncGetAttribute, int, 0)
ANSWER(cuKernelGetAttribute, int, 0)
ANSWER(cuOccupancyMaxActiveBlocksPerMultiprocessor, int, 1)
ANSWER(cuOccupancyMaxPotentialClusterSize, int, 1)

int cuStreamGetCtx(void *stream, void **context) { return (void)stream, hand_out(context); }
int cuStreamGetGreenCtx(void *stream, void **context) { return (void)stream, hand_out(context); }
int cuStreamIsCapturing(void *stream, int *status) {
  (void)stream;
  *status = 0;
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuCtxGetDevice(int *device) {
  *device = 0;
  return 0;
}
int cuDeviceGetAttribute(int *value) {
  *value = 0;
  return 0;
}
// cudart's private tables: there are none, and cudart then stays uninitialized, as it should.
int cuGetExportTable(const void **table) {
  *table = NULL;
  return 500;
}
int cuCtxGetCurrent(void **context) { return hand_out(context); }

int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags,
                        int *status) {
  (void)version, (void)flags;
  if (getenv("STUB_DRIVER_TRACE") != NULL) fprintf(stderr, "stub driver: %s\n", name);
  *found = strcmp(name, "cuGetProcAddress") == 0 ? (void *)cuGetProcAddress_v2
                                                 : dlsym(RTLD_DEFAULT, name);
  if (*found == NULL) *found = (void *)succeed;
  if (status != NULL) *status = 0;
  return 0;
}
int cuGetProcAddress(const char *name, void **found, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
