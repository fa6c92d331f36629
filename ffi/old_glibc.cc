// What lets a library that is linked on a new system load on an older one.
//
// The linker takes each symbol of glibc in the newest version that is there, and libstdc++.a was
// compiled against a new glibc too. jaxlib asks for glibc 2.27, and this library is to ask for no
// more. So what glibc has had for long under an older version is bound to that, through the
// linker's --wrap (CMakeLists.txt has the same list), and what it has had only lately is here.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SWIGLU_JAX_OLD(symbol) __asm__(".symver old_" #symbol "," #symbol "@GLIBC_2.2.5")

extern "C" {

SWIGLU_JAX_OLD(dlopen);
SWIGLU_JAX_OLD(dlsym);
SWIGLU_JAX_OLD(dlclose);
SWIGLU_JAX_OLD(dlerror);
SWIGLU_JAX_OLD(dladdr);
SWIGLU_JAX_OLD(exp);
SWIGLU_JAX_OLD(pthread_once);

void* old_dlopen(const char* name, int mode);
void* old_dlsym(void* library, const char* name);
int old_dlclose(void* library);
char* old_dlerror();
int old_dladdr(const void* address, Dl_info* found);
double old_exp(double x);
int old_pthread_once(pthread_once_t* once, void (*function)());

void* __wrap_dlopen(const char* name, int mode) { return old_dlopen(name, mode); }
void* __wrap_dlsym(void* library, const char* name) { return old_dlsym(library, name); }
int __wrap_dlclose(void* library) { return old_dlclose(library); }
char* __wrap_dlerror() { return old_dlerror(); }
int __wrap_dladdr(const void* address, Dl_info* found) { return old_dladdr(address, found); }
double __wrap_exp(double x) { return old_exp(x); }
int __wrap_pthread_once(pthread_once_t* once, void (*function)()) {
  return old_pthread_once(once, function);
}

// A function since 2.33 only; what it calls has the same struct on x86-64.
int __wrap_fstat64(int file, struct stat64* found) {
  return static_cast<int>(syscall(SYS_fstat, file, found));
}

// A variable since 2.32, with which libstdc++ spares itself atomics: 0 says that there may be
// other threads.
char __libc_single_threaded = 0;

}  // extern "C"
