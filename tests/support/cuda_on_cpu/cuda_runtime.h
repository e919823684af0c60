// CUDA C on a CPU, for tests without a GPU: what the fused casts use of CUDA, executed thread by thread.
//
// The blocks of a kernel run one after the other. The threads of a block take turns: each runs to its next
// barrier before another goes on, in an order that is shuffled anew at every barrier, so that a result that
// depends on the order, or on a barrier that is missing, shows.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __shared__ static

using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 blockIdx, threadIdx;

typedef int cudaError_t;
typedef void* cudaStream_t;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "the CPU cannot do this"; }
inline cudaError_t cudaGetDevice(int* number) { return *number = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int number) { return number == 0 ? cudaSuccess : 101; }

namespace emulated {

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool done = true;
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline unsigned running = 0;
inline void (*body)() = nullptr;
inline std::minstd_rand order;

inline void start() {
  body();
  threads[running].done = true;
}

// One block: every thread to its next barrier, in a shuffled order, until all are done. False if a thread ended
// while others waited at a barrier.
inline bool block(unsigned size, void (*kernel)()) {
  if (threads.size() < size) threads.resize(size);
  body = kernel;
  std::vector<unsigned> turn(size);
  for (unsigned t = 0; t < size; ++t) {
    turn[t] = t;
    Thread& thread = threads[t];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &scheduler;
    thread.done = false;
    makecontext(&thread.context, start, 0);
  }
  for (unsigned done = 0; done == 0;) {
    std::shuffle(turn.begin(), turn.end(), order);
    for (unsigned t : turn) {
      running = t;
      threadIdx = dim3(t, 0, 0);
      swapcontext(&scheduler, &threads[t].context);
      done += threads[t].done;
    }
    if (done != 0 && done != size) return false;
  }
  return true;
}

}  // namespace emulated

inline void __syncthreads() {
  const unsigned mine = emulated::running;
  swapcontext(&emulated::threads[mine].context, &emulated::scheduler);
}

template <typename... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 blocks, dim3 threads, void** arguments, size_t, cudaStream_t) {
  static void (*called)(P...);
  static void** given;
  called = kernel;
  given = arguments;
  auto call = [] {
    [&]<size_t... I>(std::index_sequence<I...>) {
      called(*reinterpret_cast<P*>(given[I])...);
    }(std::index_sequence_for<P...>());
  };
  for (unsigned y = 0; y < blocks.y; ++y) {
    for (unsigned x = 0; x < blocks.x; ++x) {
      blockIdx = dim3(x, y, 0);
      if (!emulated::block(threads.x, call)) return 1;
    }
  }
  return cudaSuccess;
}
