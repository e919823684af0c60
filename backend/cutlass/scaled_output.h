// The epilogue of every product: scale the sums back to real values, and store them.
//
//     out[m, n] = alpha * row_scale[m / rows_per_scale] * column_scale[n] * sum[m, n] + bias[n]
//
// It is written as CUTLASS's "output tile iterator", the last link of the 2.x epilogue, because that link is the
// same for Volta, Turing and Ampere and for products and convolutions: one epilogue serves them all. The type of
// the result is chosen at run time, so that each product is compiled once and not three times.

#pragma once

#include "cutlass/conv/conv2d_problem_size.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/threadblock/epilogue.h"
#include "cutlass/epilogue/threadblock/predicated_tile_iterator.h"
#include "cutlass/numeric_types.h"

namespace qsync {

enum OutType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

/// Arguments of the epilogue; pointers to GPU memory, null for "all ones" (scales, alpha) and "zeros" (bias).
struct Scaling {
  float const *alpha = nullptr;         // one number, read on the GPU: a gradient's power of two stays on the GPU
  float const *row_scale = nullptr;     // ceil(M / rows_per_scale)
  float const *column_scale = nullptr;  // N
  float const *bias = nullptr;          // N
  int rows_per_scale = 1;               // a convolution has one scale per image, and P * Q rows in an image
  OutType type = kFloat32;
};

/// Sums to FP32, unscaled; INT32 sums above 2^24 are rounded here, once.
template <typename Sum>
struct ToFloat {
  using ElementOutput = float;
  using ElementAccumulator = Sum;
  using ElementCompute = float;
  static int const kCount = 4;  // floats in the 16 bytes that a thread moves at a time
  using FragmentSums = cutlass::Array<Sum, kCount>;
  using FragmentOutput = cutlass::Array<float, kCount>;
  struct Params {};

  CUTLASS_HOST_DEVICE ToFloat(Params const &) {}
  CUTLASS_HOST_DEVICE bool is_source_needed() const { return false; }
  CUTLASS_HOST_DEVICE void set_k_partition(int, int) {}
  CUTLASS_HOST_DEVICE FragmentOutput operator()(FragmentSums const &sums) const {
    FragmentOutput out;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      out[i] = static_cast<float>(sums[i]);
    }
    return out;
  }
  CUTLASS_HOST_DEVICE FragmentOutput operator()(FragmentSums const &sums, FragmentOutput const &) const {
    return (*this)(sums);
  }
};

/// Stores a tile into a contiguous row-major (rows, columns) matrix of any size, scaled.
///
/// The base class walks the tile; `matrix_row` gives the matrix's row of a tile's row: the same, or, for the input
/// gradient of a strided convolution (`Strided`), that of a pixel.
template <typename ThreadMap_, bool Strided>
class ScaledOutput : public cutlass::epilogue::threadblock::PredicatedTileIterator<ThreadMap_, float> {
 public:
  using Base = cutlass::epilogue::threadblock::PredicatedTileIterator<ThreadMap_, float>;
  using ThreadMap = ThreadMap_;
  using Fragment = typename Base::Fragment;
  using Layout = typename Base::Layout;
  using TensorCoord = cutlass::MatrixCoord;
  using Problem = cutlass::conv::Conv2dProblemSize;
  using Iterations = typename ThreadMap::Iterations;
  using Delta = typename ThreadMap::Delta;
  static int const kVector = ThreadMap::kElementsPerAccess;
  static_assert(kVector == 4, "vectors of four elements are assumed below");

  /// Built by CUTLASS's kernels from a layout; `scaling` is set afterwards, by the host.
  struct Params : Base::Params {
    Scaling scaling;
    Problem problem;
    int rows_per_position = 1;

    Params() = default;
    CUTLASS_HOST_DEVICE Params(Layout const &layout) : Base::Params(layout) {}
    CUTLASS_HOST_DEVICE Params(Layout const &layout, cutlass::Tensor4DCoord const &) : Base::Params(layout) {}
    CUTLASS_HOST_DEVICE Params(Layout const &layout, Problem const &problem, int tile_rows)
        : Base::Params(layout), problem(problem) {
      rows_per_position = tile_rows * cutlass::conv::strided_dgrad_tile_m_per_filter(problem, tile_rows);
    }
  };

  CUTLASS_DEVICE ScaledOutput(Params const &params, float *pointer, TensorCoord extent, int thread,
                              TensorCoord offset, int const * = nullptr)
      : Base(params, pointer, extent, thread, offset), params_(&params), pointer_(pointer) {
    load_columns();
  }

  /// Rows are the pixels of dx that one position (start_r, start_s) of the filter reaches: every stride-th pixel.
  CUTLASS_DEVICE ScaledOutput(Params const &params, float *pointer, TensorCoord extent, int thread,
                              cutlass::FastDivmod const &by_stride_h, cutlass::FastDivmod const &by_stride_w,
                              int start_r, int start_s, TensorCoord offset)
      : ScaledOutput(params, pointer, extent, thread, offset) {
    Problem const &p = params.problem;
    cutlass::conv::strided_dgrad_starting_coords(p, by_stride_h, by_stride_w, start_r, start_s, start_h_, start_w_);
    grid_h_ = (p.H - start_h_ + p.stride_h - 1) / p.stride_h;
    grid_w_ = (p.W - start_w_ + p.stride_w - 1) / p.stride_w;
  }

  CUTLASS_DEVICE ScaledOutput &operator++() {
    Base::operator++();
    return *this;
  }

  /// Partial results of split-k slices lie behind one another.
  CUTLASS_DEVICE void add_pointer_offset(int64_t elements) { pointer_ += elements; }

  /// Nothing is ever added to what is in memory already.
  CUTLASS_DEVICE void load(Fragment &fragment) const { fragment.clear(); }

  CUTLASS_DEVICE void store(Fragment const &fragment) const {
    CUTLASS_PRAGMA_UNROLL
    for (int cluster = 0; cluster < Iterations::kCluster; ++cluster) {
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < Iterations::kGroup; ++group) {
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < Iterations::kRow; ++row) {
          int const slot = row + Iterations::kRow * (group + Iterations::kGroup * cluster);
          int const tile_row = this->thread_start_row() + row * Delta::kRow + group * Delta::kGroup +
                               cluster * Delta::kCluster;
          store_row(matrix_row(tile_row), fragment, slot);
        }
      }
    }
  }

 private:
  Params const *params_;  // where the kernel's parameters lie: constant memory
  float *pointer_;
  int start_h_ = 0, start_w_ = 0, grid_h_ = 1, grid_w_ = 1;
  float factor_[Iterations::kColumn * kVector], bias_[Iterations::kColumn * kVector];

  CUTLASS_DEVICE int column(int index) const { return this->thread_start_column() + index * Delta::kColumn; }

  CUTLASS_DEVICE void load_columns() {
    Scaling const &s = params_->scaling;
    float const alpha = s.alpha ? *s.alpha : 1.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < Iterations::kColumn; ++c) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) {
        int const n = column(c) + i;
        bool const inside = n < this->extent_column();
        factor_[c * kVector + i] = inside && s.column_scale ? alpha * s.column_scale[n] : alpha;
        bias_[c * kVector + i] = inside && s.bias ? s.bias[n] : 0.0f;
      }
    }
  }

  CUTLASS_DEVICE int matrix_row(int tile_row) const {
    if (!Strided) {
      return tile_row;
    }
    Problem const &p = params_->problem;
    int const pixel = tile_row % params_->rows_per_position;
    int const n = pixel / (grid_h_ * grid_w_), rest = pixel % (grid_h_ * grid_w_);
    int const h = start_h_ + (rest / grid_w_) * p.stride_h, w = start_w_ + (rest % grid_w_) * p.stride_w;
    return (n * p.H + h) * p.W + w;  // beyond the last row where n >= N: the tile's padding
  }

  CUTLASS_DEVICE void store_row(int row, Fragment const &fragment, int slot) const {
    if (row >= this->extent_row()) {
      return;
    }
    Scaling const &s = params_->scaling;
    float const scale = s.row_scale ? s.row_scale[row / s.rows_per_scale] : 1.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < Iterations::kColumn; ++c) {
      cutlass::Array<float, kVector> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) {
        float const sum = fragment[(slot * Iterations::kColumn + c) * kVector + i];
        values[i] = sum * scale * factor_[c * kVector + i] + bias_[c * kVector + i];
      }
      int64_t const offset = int64_t(row) * this->extent_column() + column(c);
      switch (s.type) {
        case kBFloat16: store_vector(reinterpret_cast<cutlass::bfloat16_t *>(pointer_) + offset, values, c); break;
        case kFloat16: store_vector(reinterpret_cast<cutlass::half_t *>(pointer_) + offset, values, c); break;
        default: store_vector(pointer_ + offset, values, c);
      }
    }
  }

  template <typename Out>
  CUTLASS_DEVICE void store_vector(Out *out, cutlass::Array<float, kVector> const &values, int c) const {
    struct alignas(sizeof(Out) * kVector) Vector {
      Out elements[kVector];
    } converted;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      converted.elements[i] = static_cast<Out>(values[i]);
    }
    int const columns = this->extent_column(), left = columns - column(c);
    // Rows of a multiple of four elements keep every vector aligned; the host checks the first one.
    if (left >= kVector && columns % kVector == 0) {
      *reinterpret_cast<Vector *>(out) = converted;
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      if (i < left) {
        out[i] = converted.elements[i];
      }
    }
  }
};

/// CUTLASS's own epilogue for these tiles, with its last link replaced.
template <typename E, bool Strided = false>
using ScaledEpilogue = cutlass::epilogue::threadblock::Epilogue<
    typename E::Shape, typename E::WarpMmaOperator, E::kPartitionsK,
    ScaledOutput<typename E::OutputTileIterator::ThreadMap, Strided>, typename E::AccumulatorFragmentIterator,
    typename E::WarpTileIterator, typename E::SharedLoadIterator, typename E::OutputOp, typename E::Padding,
    E::Base::kFragmentsPerIteration>;

}  // namespace qsync
