// Matrix products: out (M, N) = scaled(sum over k of A[m, k] B[k, n]), any M and N.

#pragma once

#include "cutlass/gemm/kernel/default_gemm.h"
#include "cutlass/gemm/kernel/gemm_splitk_parallel.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "launch.h"

extern "C" struct QsyncGemm {
  int m, n, k;
  int slices;  // of k; slice i writes its own partial (M, N) FP32 result at out + i * M * N, to be added up
  void const *a, *b;
  int lda, ldb;  // elements from one stored row to the next
  void *out;     // contiguous
  int out_type;  // qsync::OutType
  int rows_per_scale;
  float const *alpha, *row_scale, *column_scale, *bias;
  int device;  // the GPU of all of these
  void *stream;
};

namespace qsync {

using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;

inline Scaling scaling(QsyncGemm const &g) {
  return {g.alpha, g.row_scale, g.column_scale, g.bias, g.rows_per_scale, OutType(g.out_type)};
}

template <typename Element, typename Sum, typename LayoutA, typename LayoutB, typename Instruction, typename Tile>
struct Gemm {
  static int const kAlignment = kElementsPerAccess<Element>;
  static bool const kInteger = cutlass::platform::is_same<Sum, int32_t>::value;
  // Integer tensor cores saturate; sums are kept short enough that they never do.
  using Operator = typename cutlass::platform::conditional<kInteger, cutlass::arch::OpMultiplyAddSaturate,
                                                           cutlass::arch::OpMultiplyAdd>::type;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
  using Default = cutlass::gemm::kernel::DefaultGemm<
      Element, LayoutA, kAlignment, Element, LayoutB, kAlignment, float, RowMajor, Sum,
      cutlass::arch::OpClassTensorOp, Arch, typename Tile::Block, typename Tile::Warp, Instruction, ToFloat<Sum>,
      Swizzle, Tile::kStages, false, Operator>;
  using Kernel = cutlass::gemm::kernel::GemmSplitKParallel<typename Default::Mma,
                                                           ScaledEpilogue<typename Default::Epilogue>, Swizzle>;

  static int run(QsyncGemm const &g) {
    if (g.m <= 0 || g.n <= 0 || g.k <= 0) {
      return unsupported("a product of %d x %d x %d is empty", g.m, g.n, g.k);
    }
    // The dimension in which each operand lies contiguously is read 16 bytes at a time.
    int const a_run = cutlass::platform::is_same<LayoutA, RowMajor>::value ? g.k : g.m;
    int const b_run = cutlass::platform::is_same<LayoutB, RowMajor>::value ? g.n : g.k;
    if (a_run % kAlignment || b_run % kAlignment || g.lda % kAlignment || g.ldb % kAlignment) {
      return unsupported("rows of %d and %d elements are no multiple of %d: pad them with zeros", a_run, b_run, kAlignment);
    }
    if (g.lda < a_run || g.ldb < b_run) {
      return unsupported("rows of %d and %d elements overlap", a_run, b_run);
    }
    if (!aligned(g.a) || !aligned(g.b) || !aligned(g.out)) {
      return unsupported("operands and result must begin at a multiple of 16 bytes: clone them");
    }
    if (g.slices < 1 || g.slices > (g.k + Tile::Block::kK - 1) / Tile::Block::kK) {
      return unsupported("%d slices of an inner dimension of %d are too many", g.slices, g.k);
    }
    if (g.slices > 1 && (g.bias || g.out_type != kFloat32)) {
      return unsupported("partial results are FP32 and without bias");
    }
    int const iterations = g.k / Tile::Block::kK, per_slice = iterations / g.slices;
    int const longest = g.slices == 1 ? g.k : g.k - (g.slices - 1) * per_slice * Tile::Block::kK;
    if (g.slices > 1 && per_slice == 0) {
      return unsupported("%d slices of an inner dimension of %d are too many", g.slices, g.k);
    }
    if (kInteger && longest > kLongestInt32Sum) {
      return unsupported("an INT32 sum over %d products may overflow: use more slices", longest);
    }

    cutlass::gemm::GemmCoord const problem(g.m, g.n, g.k);
    auto const tiles = Swizzle::get_tiled_shape(
        problem, {Tile::Block::kM, Tile::Block::kN, Tile::Block::kK}, g.slices);
    auto *a = static_cast<Element *>(const_cast<void *>(g.a));
    auto *b = static_cast<Element *>(const_cast<void *>(g.b));
    typename Kernel::Params params(problem, tiles, {a, LayoutA(g.lda)}, {b, LayoutB(g.ldb)},
                                   {static_cast<float *>(g.out), RowMajor(g.n)}, {}, int64_t(g.m) * g.n);
    params.params_D.scaling = scaling(g);
    return launch<Kernel>(params, Swizzle::get_grid_shape(tiles), g.device, g.stream);
  }
};

}  // namespace qsync
