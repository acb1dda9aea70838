// AMX tiles for products of bfloat16, AVX-512 for everything else. With EMULATE_TILES, this file also builds for tests
// on any machine.
#if defined(__x86_64__) || defined(EMULATE_TILES)
#include "isa.h"
#ifndef EMULATE_TILES
BEGIN_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,avx2,fma")
#endif

namespace trueroll {
namespace {
#define HAS_TILES
#ifdef EMULATE_TILES
constexpr int ACCUMULATORS = 2;
#include "vec_portable.h"
#else
#define HAS_DOT_BF16
#define HAS_DOT_INT8
constexpr int ACCUMULATORS = 24;
#include "vec_avx512.h"
#endif
#include "../kernels.h"
}  // namespace

const InstructionSet amx_bf16 = {
    "amx_bf16", ALL_OPS<bf16>, ALL_OPS<float>, log_sum_exp, sample, statistics, fold_sections,
    take_piece};
}  // namespace trueroll
#ifndef EMULATE_TILES
END_TARGET
#endif
#endif
