// The epilogue of the CUTLASS products on the CPU: every thread of a block stores the tile that tensor cores would
// have given it, one after the other, and the matrix is compared with the equation. The code under test is that of
// the GPU; what is made up here is the sums. Compiled by g++, without nvcc. Prints nothing and returns 0, or says
// what differs.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include <cuda_runtime.h>

// What only nvcc declares; templates that are never instantiated here mention it.
static uint3 const blockIdx = {0, 0, 0};
inline void __syncthreads() {}

#include "cutlass/conv/conv2d_problem_size.h"
#include "cutlass/conv/convolution.h"
#include "cutlass/epilogue/threadblock/default_thread_map_tensor_op.h"
#include "cutlass/epilogue/threadblock/default_thread_map_volta_tensor_op.h"
#include "scaled_output.h"

using Coord = cutlass::MatrixCoord;

// The tile that a block of 4 warps computes with 64 x 64 results each, and the small one of tiles.h.
template <int M, int N, int WarpM, int WarpN>
using Map = typename cutlass::epilogue::threadblock::DefaultThreadMapTensorOp<
    cutlass::gemm::GemmShape<M, N, 32>, cutlass::gemm::GemmShape<WarpM, WarpN, 32>, 1, float, 4>::Type;
using VoltaMap = typename cutlass::epilogue::threadblock::DefaultThreadMapVoltaTensorOp<
    cutlass::gemm::GemmShape<128, 128, 32>, cutlass::gemm::GemmShape<64, 64, 32>, 1, float, 4, float>::Type;

/// The sum that stands at a place of the tile grid: an integer, exact in FP32 and different for neighbours.
float sum_at(int row, int column) { return float((row * 37 + column * 101) % 251 - 125); }

template <typename Iterator>
void store_tile(Iterator iterator, int expected_iterations) {
  using Map = typename Iterator::ThreadMap;
  for (int step = 0; step < expected_iterations; ++step) {
    typename Iterator::Fragment fragment;
    int index = 0;
    for (int cluster = 0; cluster < Map::Iterations::kCluster; ++cluster)
      for (int group = 0; group < Map::Iterations::kGroup; ++group)
        for (int row = 0; row < Map::Iterations::kRow; ++row)
          for (int column = 0; column < Map::Iterations::kColumn; ++column)
            for (int i = 0; i < Map::kElementsPerAccess; ++i)
              fragment[index++] = sum_at(
                  iterator.thread_start_row() + row * Map::Delta::kRow + group * Map::Delta::kGroup +
                      cluster * Map::Delta::kCluster,
                  iterator.thread_start_column() + column * Map::Delta::kColumn + i);
    iterator.store(fragment);
    ++iterator;
  }
}

float read(std::vector<uint8_t> const &bytes, int64_t index, qsync::OutType type) {
  if (type == qsync::kFloat32) {
    float value;
    std::memcpy(&value, &bytes[index * 4], 4);
    return value;
  }
  if (type == qsync::kFloat16) {
    cutlass::half_t value;
    std::memcpy(&value, &bytes[index * 2], 2);
    return float(value);
  }
  cutlass::bfloat16_t value;
  std::memcpy(&value, &bytes[index * 2], 2);
  return float(value);
}

struct Vectors {
  std::vector<float> rows, columns, bias;
  float alpha = 0.25f;

  Vectors(int num_rows, int num_columns) : rows(num_rows), columns(num_columns), bias(num_columns) {
    for (int i = 0; i < num_rows; ++i) rows[i] = 0.5f + float(i % 7);
    for (int i = 0; i < num_columns; ++i) columns[i] = 0.125f * float(1 + i % 5), bias[i] = float(i % 11) - 5.0f;
  }
};

// Any value that no product gives marks what was not written.
float const kUntouched = 12345.0f;

int compare(char const *what, std::vector<uint8_t> const &out, int rows, int columns, qsync::OutType type,
            std::vector<int> const &sum_row, Vectors const &v, int rows_per_scale) {
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n) {
      float const expected =
          v.alpha * v.rows[m / rows_per_scale] * v.columns[n] * sum_at(sum_row[m], n) + v.bias[n];
      float const got = read(out, int64_t(m) * columns + n, type);
      float const step = type == qsync::kFloat32 ? 1e-6f : type == qsync::kFloat16 ? 1e-3f : 8e-3f;
      if (!(std::fabs(got - expected) <= step * (std::fabs(expected) + 1.0f))) {
        std::printf("%s: (%d, %d) is %g, not %g\n", what, m, n, got, expected);
        return 1;
      }
    }
  }
  return 0;
}

qsync::Scaling scaling(Vectors const &v, qsync::OutType type, int rows_per_scale) {
  return {&v.alpha, v.rows.data(), v.columns.data(), v.bias.data(), rows_per_scale, type};
}

/// A product's matrix, tile after tile; and what lies behind it stays as it was.
template <int M, int N, typename Map>
int check_matrix(int rows, int columns, qsync::OutType type, int rows_per_scale) {
  using Output = qsync::ScaledOutput<Map, false>;
  int const threads = Output::ThreadMap::kThreads, size = type == qsync::kFloat32 ? 4 : 2, behind = 64;
  Vectors const v((rows + rows_per_scale - 1) / rows_per_scale, columns);
  std::vector<uint8_t> out(size_t(rows) * columns * size + behind, 0xAB);
  typename Output::Params params{typename Output::Layout(columns), cutlass::Tensor4DCoord()};
  params.scaling = scaling(v, type, rows_per_scale);
  for (int m = 0; m < rows; m += M)
    for (int n = 0; n < columns; n += N)
      for (int thread = 0; thread < threads; ++thread)
        store_tile(Output(params, reinterpret_cast<float *>(out.data()), Coord(rows, columns), thread, Coord(m, n)),
                   Output::kIterations);
  for (int i = 0; i < behind; ++i)
    if (out[out.size() - 1 - i] != 0xAB) return std::printf("written behind a %d x %d matrix\n", rows, columns), 1;
  std::vector<int> same(rows);
  for (int i = 0; i < rows; ++i) same[i] = i;
  return compare("matrix", out, rows, columns, type, same, v, rows_per_scale);
}

/// The input gradient of a strided convolution: each pixel is written by one position of the filter, once.
int check_strided(cutlass::conv::Conv2dProblemSize const &p) {
  using Output = qsync::ScaledOutput<Map<128, 128, 64, 64>, true>;
  int const M = 128, N = 128, rows = p.N * p.H * p.W, columns = p.C;
  Vectors v(rows, columns);
  std::vector<uint8_t> out(size_t(rows) * columns * 4);
  for (int64_t i = 0; i < int64_t(rows) * columns; ++i) std::memcpy(&out[i * 4], &kUntouched, 4);
  typename Output::Params params{typename Output::Layout(columns), p, M};
  params.scaling = scaling(v, qsync::kFloat32, 1);
  cutlass::FastDivmod by_h(p.stride_h), by_w(p.stride_w);
  int const tiles = cutlass::conv::strided_dgrad_tile_m_per_filter(p, M);
  std::vector<int> sum_row(rows, -1);
  for (int tile = 0; tile < tiles * p.stride_h * p.stride_w; ++tile) {
    int start_r, start_s, start_h, start_w;
    by_w.divmod(start_s, tile / tiles);
    start_r = tile / tiles / p.stride_w;
    cutlass::conv::strided_dgrad_starting_coords(p, by_h, by_w, start_r, start_s, start_h, start_w);
    if (start_h >= p.H || start_w >= p.W) continue;  // the kernel returns here
    // Which tile row ought to be which pixel: rows of one position count its pixels, image by image.
    int const grid_h = (p.H - start_h + p.stride_h - 1) / p.stride_h;
    int const grid_w = (p.W - start_w + p.stride_w - 1) / p.stride_w;
    for (int row = 0; row < M; ++row) {
      int const pixel = (tile % tiles) * M + row, n = pixel / (grid_h * grid_w), rest = pixel % (grid_h * grid_w);
      if (n >= p.N) continue;
      int const h = start_h + rest / grid_w * p.stride_h, w = start_w + rest % grid_w * p.stride_w;
      int &place = sum_row[(n * p.H + h) * p.W + w];
      if (place >= 0) return std::printf("pixel (%d, %d, %d) belongs to two positions\n", n, h, w), 1;
      place = tile * M + row;
    }
    for (int n = 0; n < columns; n += N)
      for (int thread = 0; thread < Output::ThreadMap::kThreads; ++thread)
        store_tile(Output(params, reinterpret_cast<float *>(out.data()), Coord(rows, columns), thread, by_h, by_w,
                          start_r, start_s, Coord(tile * M, n)),
                   Output::kIterations);
  }
  for (int row : sum_row)
    if (row < 0) return std::printf("a pixel belongs to no position\n"), 1;
  return compare("strided", out, rows, columns, qsync::kFloat32, sum_row, v, 1);
}

int main() {
  int bad = 0;
  for (auto type : {qsync::kFloat32, qsync::kBFloat16, qsync::kFloat16}) {
    for (int columns : {1, 3, 4, 10, 64, 128, 130, 196}) {
      bad += check_matrix<128, 128, Map<128, 128, 64, 64>>(1, columns, type, 1);
      bad += check_matrix<128, 128, Map<128, 128, 64, 64>>(131, columns, type, 1);
      bad += check_matrix<128, 256, Map<128, 256, 64, 64>>(77, columns, type, 9);
      bad += check_matrix<64, 64, Map<64, 64, 32, 32>>(150, columns, type, 49);
      bad += check_matrix<128, 128, VoltaMap>(131, columns, type, 5);
    }
  }
  auto problem = [](int n, int h, int w, int c, int filter, int pad, int stride_h, int stride_w) {
    int const p = (h + 2 * pad - filter) / stride_h + 1, q = (w + 2 * pad - filter) / stride_w + 1;
    return cutlass::conv::Conv2dProblemSize(n, h, w, c, 8, filter, filter, p, q, pad, pad, stride_h, stride_w, 1, 1,
                                            cutlass::conv::Mode::kCrossCorrelation);
  };
  bad += check_strided(problem(2, 7, 9, 8, 3, 1, 2, 2));
  bad += check_strided(problem(3, 8, 8, 16, 1, 0, 2, 2));  // some pixels are reached by no filter position
  bad += check_strided(problem(1, 5, 6, 8, 3, 1, 1, 1));
  bad += check_strided(problem(2, 9, 7, 8, 3, 0, 3, 2));
  bad += check_strided(problem(4, 16, 16, 136, 7, 3, 2, 2));
  return bad != 0;
}
