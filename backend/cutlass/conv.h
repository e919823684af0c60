// Convolutions of channels-last images as implicit matrix products: no patch is ever written to memory.
//
//              A (M, K)                      B (K, N)            out (M, N)
//     fprop    x  (n p q, r s c)             W  (r s c, k)       y  (n p q, k)
//     dgrad    dy (n h w, r s k)             W  (r s k, c)       dx (n h w, c)
//     wgrad    dy (k, n p q)                 x  (n p q, r s c)   dW (k, r s c)

#pragma once

#include "cutlass/conv/kernel/default_conv2d_dgrad.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/conv/kernel/default_conv2d_wgrad.h"
#include "launch.h"

extern "C" struct QsyncConv {
  int n, h, w, c, k, r, s, p, q;  // x (n, h, w, c), W (k, r, s, c), y (n, p, q, k), all contiguous
  int pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  int slices;  // of the inner dimension, wgrad only: slice i writes a partial dW of its own, to be added up
  void const *a, *b;
  void *out;
  int out_type;        // qsync::OutType
  int rows_per_scale;  // rows of M for each row_scale: p * q for one scale per image
  float const *alpha, *row_scale, *column_scale, *bias;
  int device;  // the GPU of all of these
  void *stream;
};

namespace qsync {

using cutlass::conv::Operator;

/// Kernel types of the three products: CUTLASS's defaults, whose names contain the operator.
template <Operator kOperator, typename Element, typename Sum, typename Instruction, typename Tile>
struct ConvKernel {
  using NHWC = cutlass::layout::TensorNHWC;
  using MathOperator =
      typename cutlass::platform::conditional<cutlass::platform::is_same<Sum, int32_t>::value,
                                              cutlass::arch::OpMultiplyAddSaturate, cutlass::arch::OpMultiplyAdd>::type;
  static bool const kStrided = kOperator == Operator::kDgrad;
  using Swizzle = typename cutlass::platform::conditional<
      kStrided, cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<1>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>>::type;

  template <template <typename, typename, typename, typename, typename, typename, typename, typename, typename,
                      typename, typename, typename, typename, typename, int, typename,
                      cutlass::conv::IteratorAlgorithm, cutlass::conv::StrideSupport, int, int> class Default>
  using Of = typename Default<Element, NHWC, Element, NHWC, float, NHWC, Sum, cutlass::arch::OpClassTensorOp, Arch,
                              typename Tile::Block, typename Tile::Warp, Instruction, ToFloat<Sum>, Swizzle,
                              Tile::kStages, MathOperator, cutlass::conv::IteratorAlgorithm::kOptimized,
                              cutlass::conv::StrideSupport::kStrided, kElementsPerAccess<Element>,
                              kElementsPerAccess<Element>>::Kernel;
};

template <Operator kOperator, typename Element, typename Sum, typename Instruction, typename Tile>
struct DefaultConv;

template <typename Element, typename Sum, typename Instruction, typename Tile>
struct DefaultConv<Operator::kFprop, Element, Sum, Instruction, Tile>
    : ConvKernel<Operator::kFprop, Element, Sum, Instruction, Tile> {
  using Base = ConvKernel<Operator::kFprop, Element, Sum, Instruction, Tile>;
  using Kernel = typename Base::template Of<cutlass::conv::kernel::DefaultConv2dFprop>;
};

template <typename Element, typename Sum, typename Instruction, typename Tile>
struct DefaultConv<Operator::kDgrad, Element, Sum, Instruction, Tile>
    : ConvKernel<Operator::kDgrad, Element, Sum, Instruction, Tile> {
  using Base = ConvKernel<Operator::kDgrad, Element, Sum, Instruction, Tile>;
  using Kernel = typename Base::template Of<cutlass::conv::kernel::DefaultConv2dDgrad>;
};

template <typename Element, typename Sum, typename Instruction, typename Tile>
struct DefaultConv<Operator::kWgrad, Element, Sum, Instruction, Tile>
    : ConvKernel<Operator::kWgrad, Element, Sum, Instruction, Tile> {
  using Base = ConvKernel<Operator::kWgrad, Element, Sum, Instruction, Tile>;
  using Kernel = typename Base::template Of<cutlass::conv::kernel::DefaultConv2dWgrad>;
};

template <Operator kOperator, typename Element, typename Sum, typename Instruction, typename Tile>
struct Conv {
  using Default = DefaultConv<kOperator, Element, Sum, Instruction, Tile>;
  using Mma = typename Default::Kernel::Mma;
  using Swizzle = typename Default::Swizzle;
  static bool const kStrided = Default::kStrided;
  static int const kAlignment = kElementsPerAccess<Element>;
  using Epilogue = ScaledEpilogue<typename Default::Kernel::Epilogue, kStrided>;
  using Kernel = typename cutlass::platform::conditional<
      kStrided, cutlass::conv::kernel::ImplicitGemmConvolutionStridedDgrad<Mma, Epilogue, Swizzle, kOperator>,
      cutlass::conv::kernel::ImplicitGemmConvolution<Mma, Epilogue, Swizzle, kOperator>>::type;

  static int run(QsyncConv const &c) {
    if (int result = check(c)) {
      return result;
    }
    cutlass::conv::Conv2dProblemSize const problem(
        c.n, c.h, c.w, c.c, c.k, c.r, c.s, c.p, c.q, c.pad_h, c.pad_w, c.stride_h, c.stride_w, c.dilation_h,
        c.dilation_w, cutlass::conv::Mode::kCrossCorrelation, c.slices);
    if (Mma::IteratorA::can_implement(problem) != cutlass::Status::kSuccess ||
        Mma::IteratorB::can_implement(problem) != cutlass::Status::kSuccess) {
      return unsupported("CUTLASS has no such convolution: a filter of %d x %d over %d channels", c.r, c.s, c.c);
    }
    using NHWC = cutlass::layout::TensorNHWC;
    auto layout = [](cutlass::Tensor4DCoord const &extent) { return NHWC::packed(extent); };
    auto *a = static_cast<Element *>(const_cast<void *>(c.a));
    auto *b = static_cast<Element *>(const_cast<void *>(c.b));
    auto *out = static_cast<float *>(c.out);
    NHWC const out_layout = layout(cutlass::conv::implicit_gemm_tensor_c_extent(kOperator, problem));
    typename Kernel::Arguments arguments(
        problem, {a, layout(cutlass::conv::implicit_gemm_tensor_a_extent(kOperator, problem))},
        {b, layout(cutlass::conv::implicit_gemm_tensor_b_extent(kOperator, problem))}, {nullptr, out_layout},
        {out, out_layout}, {}, c.slices > 1 ? cutlass::conv::SplitKMode::kParallel : cutlass::conv::SplitKMode::kNone);
    typename Kernel::Params params(arguments);
    params.iterator_D.scaling = {c.alpha, c.row_scale, c.column_scale, c.bias, c.rows_per_scale, OutType(c.out_type)};
    return launch<Kernel>(params, Swizzle::get_grid_shape(params.grid_tiled_shape), c.device, c.stream);
  }

 private:
  static int check(QsyncConv const &c) {
    if (c.n <= 0 || c.c <= 0 || c.k <= 0 || c.p <= 0 || c.q <= 0) {
      return unsupported("a convolution of %d images, %d to %d channels, is empty", c.n, c.c, c.k);
    }
    if (c.c % kAlignment || (kOperator != Operator::kFprop && c.k % kAlignment)) {
      return unsupported("%d and %d channels are no multiple of %d: pad them with zeros", c.c, c.k, kAlignment);
    }
    if (kStrided && (c.dilation_h != 1 || c.dilation_w != 1)) {
      return unsupported("a dilated convolution has no input gradient here: keep it in another precision");
    }
    if (!aligned(c.a) || !aligned(c.b) || !aligned(c.out)) {
      return unsupported("operands and result must begin at a multiple of 16 bytes: clone them");
    }
    if (c.slices < 1 || (c.slices > 1 && (kOperator != Operator::kWgrad || c.bias || c.out_type != kFloat32))) {
      return unsupported("slices are for weight gradients, FP32 and without bias");
    }
    // The iterators count bytes in 32 bits.
    int64_t const x = int64_t(c.n) * c.h * c.w * c.c, y = int64_t(c.n) * c.p * c.q * c.k;
    int64_t const filter = int64_t(c.k) * c.r * c.s * c.c;
    if (x >= 1ll << 29 || y >= 1ll << 29 || filter >= 1ll << 29) {
      return unsupported("a tensor of 2^29 elements or more: split the batch");
    }
    if (cutlass::platform::is_same<Sum, int32_t>::value && int64_t(c.r) * c.s * c.c > kLongestInt32Sum) {
      return unsupported("an INT32 sum over %d products may overflow", c.r * c.s * c.c);
    }
    return kDone;
  }
};

}  // namespace qsync
