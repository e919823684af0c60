// Launches the GPU programs of the fused casts.
//
// TVM's host code checks the tensors and then calls, by name, a function with the arguments of a kernel and
// behind them its blocks (of planes, then of rows) and threads. Each EXPORT below is such a function. TVM has a
// runtime library that does the same, but it is bound to one release of CUDA. This file, compiled with the
// kernels, works with whatever CUDA torch was built for, and on GPUs that the newest CUDA no longer knows.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>
#include <type_traits>

namespace qsync {

// The GPU of this call's tensors: TVM's host code sets it before it launches.
inline int32_t& device() {
  static thread_local int32_t number = 0;
  return number;
}

inline int failed(const char* reason) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", reason);
  return -1;
}

// Queues the kernel on torch's current stream, which tvm_ffi passes on; does not wait.
template <typename... P>
int launch(void (*kernel)(P...), const TVMFFIAny* args, int32_t num_args) {
  constexpr int32_t count = sizeof...(P);
  static_assert(((std::is_pointer_v<P> || std::is_integral_v<P>) && ...), "passed by the address of v_int64");
  const int32_t sizes = num_args - count;
  if (sizes != 2 && sizes != 3) return failed("a kernel of the casts was called with other arguments than its own");
  void* pointers[count];
  for (int32_t i = 0; i < count; ++i) pointers[i] = const_cast<int64_t*>(&args[i].v_int64);
  const int64_t planes = sizes == 3 ? args[count].v_int64 : 1;
  const int64_t rows = args[num_args - 2].v_int64, threads = args[num_args - 1].v_int64;
  if (planes > 65535 || rows > 2147483647) return failed("a matrix is too large for the casts' blocks");
  int current = 0;
  cudaError_t status = cudaGetDevice(&current);
  if (status == cudaSuccess && current != device()) status = cudaSetDevice(device());
  if (status == cudaSuccess) {
    status = cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(rows), static_cast<unsigned>(planes)),
                              dim3(static_cast<unsigned>(threads)), pointers, 0,
                              static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device())));
    if (current != device()) cudaSetDevice(current);
  }
  return status == cudaSuccess ? 0 : failed(cudaGetErrorString(status));
}

}  // namespace qsync

#define EXPORT(kernel)                                                                             \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##kernel(                        \
      void*, const TVMFFIAny* args, int32_t num_args, TVMFFIAny*) {                                \
    return qsync::launch(kernel, args, num_args);                                                  \
  }

extern "C" __attribute__((visibility("default"))) int __tvm_ffi___tvm_set_device(
    void*, const TVMFFIAny* args, int32_t, TVMFFIAny*) {
  qsync::device() = static_cast<int32_t>(args[1].v_int64);
  return 0;
}
