// Status codes with a sentence for each failure, and the launch of every product.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "scaled_output.h"
#include "tiles.h"

namespace qsync {

// INT32 sums of more products of two codes than this may overflow: 127 * 127 * 133144 < 2^31. Python has it as
// matmul_primitives.LONGEST_INT32_SUM.
constexpr int kLongestInt32Sum = 133144;

// Operands and rows are read this many bytes at a time. Python has it as products._ALIGNMENT_BYTES.
constexpr int kAlignmentBytes = 16;

/// Elements in the bytes that are read at a time.
template <typename Element>
constexpr int kElementsPerAccess = 8 * kAlignmentBytes / cutlass::sizeof_bits<Element>::value;

/// The results of the C functions. Python turns kUnsupported into UnsupportedError, kFailed into RuntimeError.
enum Result : int { kDone = 0, kUnsupported = 1, kFailed = 2 };

inline char *message() {
  static thread_local char text[256] = "";
  return text;
}

template <typename... Values>
int unsupported(char const *format, Values... values) {
  std::snprintf(message(), 256, format, values...);
  return kUnsupported;
}

inline int unsupported(char const *text) { return unsupported("%s", text); }

inline int failed(cudaError_t error) {
  std::snprintf(message(), 256, "CUDA says: %s", cudaGetErrorString(error));
  return kFailed;
}

inline bool aligned(void const *pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % kAlignmentBytes == 0; }

template <typename Kernel>
int launch(typename Kernel::Params const &params, dim3 grid, int device, void *stream) {
  if (grid.y > 65535 || grid.z > 65535) {
    return unsupported("a grid of %u x %u x %u blocks is too large: use a larger tile", grid.x, grid.y, grid.z);
  }
  // This library has a CUDA runtime of its own, which does not know the device that torch has chosen.
  if (cudaError_t error = cudaSetDevice(device)) {
    return failed(error);
  }
  int const bytes = int(sizeof(typename Kernel::SharedStorage));
  if (bytes >= 48 << 10) {  // more must be requested, once per kernel and device; it is cheap
    cudaError_t error =
        cudaFuncSetAttribute(cutlass::Kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) {
      cudaGetLastError();  // or the next launch would report it as its own
      return error == cudaErrorInvalidValue
                 ? unsupported("this tile takes %d bytes of shared memory, more than this GPU has: choose another", bytes)
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
  return unsupported("there is no such tile: ask qsync_tiles() how many there are");
}

template <template <typename> class Product, typename Arguments, typename First, typename... Rest>
int run_tile(TileList<First, Rest...>, int index, Arguments const &arguments) {
  return index == 0 ? Product<First>::run(arguments)
                    : run_tile<Product>(TileList<Rest...>(), index - 1, arguments);
}

/// "128x128x64/4;...": block and stages of every tile in the list.
inline void describe(TileList<>, char *, std::size_t) {}

template <typename First, typename... Rest>
void describe(TileList<First, Rest...>, char *text, std::size_t size) {
  int const length = std::snprintf(text, size, "%dx%dx%d/%d%s", First::Block::kM, First::Block::kN, First::Block::kK,
                                   First::kStages, sizeof...(Rest) ? ";" : "");
  describe(TileList<Rest...>(), text + length, size - length);
}

}  // namespace qsync
