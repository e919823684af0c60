// Status codes with a sentence for each failure, and the launch that every product ends in.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "scaled_output.h"
#include "tiles.h"

namespace qsync {

/// What the C functions return. Python turns kUnsupported into UnsupportedError, kFailed into RuntimeError.
enum Result : int { kDone = 0, kUnsupported = 1, kFailed = 2 };

inline char *message() {
  static thread_local char text[256] = "";
  return text;
}

template <typename... Values>
int refuse(char const *format, Values... values) {
  std::snprintf(message(), 256, format, values...);
  return kUnsupported;
}

inline int refuse(char const *text) { return refuse("%s", text); }

inline int failed(cudaError_t error) {
  std::snprintf(message(), 256, "CUDA says: %s", cudaGetErrorString(error));
  return kFailed;
}

inline bool aligned(void const *pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

template <typename Kernel>
int launch(typename Kernel::Params const &params, dim3 grid, int device, void *stream) {
  if (grid.y > 65535 || grid.z > 65535) {
    return refuse("a grid of %u x %u x %u blocks is too large: use a larger tile", grid.x, grid.y, grid.z);
  }
  // This library has a CUDA runtime of its own, which knows nothing of the device that torch's has chosen.
  if (cudaError_t error = cudaSetDevice(device)) {
    return failed(error);
  }
  int const bytes = int(sizeof(typename Kernel::SharedStorage));
  if (bytes >= 48 << 10) {  // more must be asked for, once per kernel and device; it is cheap
    cudaError_t error =
        cudaFuncSetAttribute(cutlass::Kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) {
      cudaGetLastError();  // or the next launch would report it as its own
      return error == cudaErrorInvalidValue
                 ? refuse("this tile takes %d bytes of shared memory, more than this GPU has: choose another", bytes)
                 : failed(error);
    }
  }
  cutlass::Kernel<Kernel><<<grid, dim3(Kernel::kThreadCount), bytes, static_cast<cudaStream_t>(stream)>>>(params);
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? int(kDone) : failed(error);
}

/// Runs `Product<Tile>::run(arguments)` for the index-th tile of the list.
template <template <typename> class Product, typename Arguments>
int run_tile(TileList<>, int, Arguments const &) {
  return refuse("there is no such tile: ask qsync_tiles() how many there are");
}

template <template <typename> class Product, typename Arguments, typename First, typename... Rest>
int run_tile(TileList<First, Rest...>, int index, Arguments const &arguments) {
  return index == 0 ? Product<First>::run(arguments)
                    : run_tile<Product>(TileList<Rest...>(), index - 1, arguments);
}

/// "128x128x64/4;...": block and stages of every tile in the list.
inline void describe(TileList<>, char *, std::size_t) {}

template <typename First, typename... Rest>
void describe(TileList<First, Rest...>, char *text, std::size_t room) {
  int const length = std::snprintf(text, room, "%dx%dx%d/%d%s", First::Block::kM, First::Block::kN, First::Block::kK,
                                   First::kStages, sizeof...(Rest) ? ";" : "");
  describe(TileList<Rest...>(), text + length, room - length);
}

}  // namespace qsync
