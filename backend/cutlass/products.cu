// The products as plain C functions, for ctypes. Compiled for one architecture (-DQSYNC_SM) and for the families that
// are asked for (-DQSYNC_INT8_GEMM -DQSYNC_FP16_GEMM -DQSYNC_INT8_CONV -DQSYNC_FP16_CONV), so that a model without
// convolutions does not wait for their compilation.

#include "conv.h"
#include "gemm.h"

namespace qsync {

template <typename Tile>
using Fp16NN = Gemm<cutlass::half_t, float, RowMajor, RowMajor, InstructionFp16, Tile>;
template <typename Tile>
using Fp16NT = Gemm<cutlass::half_t, float, RowMajor, ColumnMajor, InstructionFp16, Tile>;
template <typename Tile>
using Fp16TN = Gemm<cutlass::half_t, float, ColumnMajor, RowMajor, InstructionFp16, Tile>;
template <typename Tile>
using Fp16Fprop = Conv<Operator::kFprop, cutlass::half_t, float, InstructionFp16, Tile>;
template <typename Tile>
using Fp16Dgrad = Conv<Operator::kDgrad, cutlass::half_t, float, InstructionFp16, Tile>;
template <typename Tile>
using Fp16Wgrad = Conv<Operator::kWgrad, cutlass::half_t, float, InstructionFp16, Tile>;
#if QSYNC_SM >= 75
template <typename Tile>
using Int8NT = Gemm<int8_t, int32_t, RowMajor, ColumnMajor, InstructionInt8, Tile>;
template <typename Tile>
using Int8Fprop = Conv<Operator::kFprop, int8_t, int32_t, InstructionInt8, Tile>;
#endif

// library.py has the same numbers.
enum Product : int { kInt8NT = 0, kFp16NT, kFp16NN, kFp16TN, kInt8Fprop, kFp16Fprop, kFp16Dgrad, kFp16Wgrad };

inline int not_compiled(int product) { return unsupported("product %d was not compiled into this library", product); }

}  // namespace qsync

#define QSYNC_EXPORT __attribute__((visibility("default")))

extern "C" {

/// The sentence that explains the last result other than 0, of this thread.
QSYNC_EXPORT char const *qsync_last_error() { return qsync::message(); }

/// The architecture that the library was compiled for, as in 75 or 90.
QSYNC_EXPORT int qsync_architecture() { return QSYNC_SM; }

/// The tiles of a product, "128x128x64/4;..." (block and stages); empty if it was not compiled.
QSYNC_EXPORT char const *qsync_tiles(int product) {
  static thread_local char text[256];
  text[0] = 0;
  switch (product) {
#ifdef QSYNC_INT8_GEMM
    case qsync::kInt8NT: qsync::describe(qsync::TilesInt8(), text, 256); break;
#endif
#ifdef QSYNC_INT8_CONV
    case qsync::kInt8Fprop: qsync::describe(qsync::TilesInt8(), text, 256); break;
#endif
#ifdef QSYNC_FP16_GEMM
    case qsync::kFp16NT:
    case qsync::kFp16NN:
    case qsync::kFp16TN: qsync::describe(qsync::TilesFp16(), text, 256); break;
#endif
#ifdef QSYNC_FP16_CONV
    case qsync::kFp16Fprop:
    case qsync::kFp16Dgrad:
    case qsync::kFp16Wgrad: qsync::describe(qsync::TilesFp16(), text, 256); break;
#endif
  }
  return text;
}

QSYNC_EXPORT int qsync_gemm(int product, int tile, QsyncGemm const *arguments) {
  using namespace qsync;
  switch (product) {
#ifdef QSYNC_INT8_GEMM
    case kInt8NT: return run_tile<Int8NT>(TilesInt8(), tile, *arguments);
#endif
#ifdef QSYNC_FP16_GEMM
    case kFp16NT: return run_tile<Fp16NT>(TilesFp16(), tile, *arguments);
    case kFp16NN: return run_tile<Fp16NN>(TilesFp16(), tile, *arguments);
    case kFp16TN: return run_tile<Fp16TN>(TilesFp16(), tile, *arguments);
#endif
  }
  return not_compiled(product);
}

QSYNC_EXPORT int qsync_conv(int product, int tile, QsyncConv const *arguments) {
  using namespace qsync;
  switch (product) {
#ifdef QSYNC_INT8_CONV
    case kInt8Fprop: return run_tile<Int8Fprop>(TilesInt8(), tile, *arguments);
#endif
#ifdef QSYNC_FP16_CONV
    case kFp16Fprop: return run_tile<Fp16Fprop>(TilesFp16(), tile, *arguments);
    case kFp16Dgrad: return run_tile<Fp16Dgrad>(TilesFp16(), tile, *arguments);
    case kFp16Wgrad: return run_tile<Fp16Wgrad>(TilesFp16(), tile, *arguments);
#endif
  }
  return not_compiled(product);
}

}  // extern "C"
