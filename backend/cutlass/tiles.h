// The instructions of the compiled architecture, and the tiles to choose from.
//
// A tile is what one block of threads computes: M x N results, K of the inner dimension at a time. The first tile of
// a list is compiled always, the others only with QSYNC_ALL_TILES: they cost about five seconds each.

#pragma once

#include "cutlass/arch/arch.h"
#include "cutlass/arch/mma.h"
#include "cutlass/gemm/gemm.h"

#ifndef QSYNC_SM
#error "compile with -DQSYNC_SM=75 (or 70, 80, 89, 90 ...), the architecture that nvcc compiles for"
#endif

namespace qsync {

template <int M_, int N_, int K_, int WarpM, int WarpN, int WarpK, int Stages>
struct Tile {
  using Block = cutlass::gemm::GemmShape<M_, N_, K_>;
  using Warp = cutlass::gemm::GemmShape<WarpM, WarpN, WarpK>;
  static int const kStages = Stages;
};

template <typename... Tiles>
struct TileList {
  static int const kCount = sizeof...(Tiles);
};

#if QSYNC_SM >= 80
// Ampere's instructions also run on Ada, Hopper and what followed; buffers are filled asynchronously (stages > 2).
// No tile takes more than 96 KiB of shared memory, so that all run on compute capability 8.6 and 8.9 too (99 KiB).
using Arch = cutlass::arch::Sm80;
using InstructionInt8 = cutlass::gemm::GemmShape<16, 8, 32>;
using InstructionFp16 = cutlass::gemm::GemmShape<16, 8, 16>;
#ifdef QSYNC_ALL_TILES
using TilesInt8 = TileList<Tile<128, 128, 64, 64, 64, 64, 4>, Tile<128, 256, 64, 64, 64, 64, 3>,
                           Tile<64, 64, 64, 32, 32, 64, 5>>;
using TilesFp16 = TileList<Tile<128, 128, 32, 64, 64, 32, 4>, Tile<128, 256, 32, 64, 64, 32, 3>,
                           Tile<64, 64, 32, 32, 32, 32, 5>>;
#else
using TilesInt8 = TileList<Tile<128, 128, 64, 64, 64, 64, 4>>;
using TilesFp16 = TileList<Tile<128, 128, 32, 64, 64, 32, 4>>;
#endif
#else
#if QSYNC_SM >= 75
using Arch = cutlass::arch::Sm75;
using InstructionInt8 = cutlass::gemm::GemmShape<8, 8, 16>;
using InstructionFp16 = cutlass::gemm::GemmShape<16, 8, 8>;
#else
// Volta has no INT8 tensor cores; nvcc 13 no longer compiles for it (cuda_build.py names one that does).
using Arch = cutlass::arch::Sm70;
using InstructionFp16 = cutlass::gemm::GemmShape<8, 8, 4>;
#endif
#ifdef QSYNC_ALL_TILES
using TilesInt8 = TileList<Tile<128, 128, 64, 64, 64, 64, 2>, Tile<128, 256, 64, 64, 64, 64, 2>,
                           Tile<64, 64, 64, 32, 32, 64, 2>>;
using TilesFp16 = TileList<Tile<128, 128, 32, 64, 64, 32, 2>, Tile<128, 256, 32, 64, 64, 32, 2>,
                           Tile<64, 64, 32, 32, 32, 32, 2>>;
#else
using TilesInt8 = TileList<Tile<128, 128, 64, 64, 64, 64, 2>>;
using TilesFp16 = TileList<Tile<128, 128, 32, 64, 64, 32, 2>>;
#endif
#endif

}  // namespace qsync
