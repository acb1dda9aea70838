// AVX-512 without bfloat16 instructions: bfloat16 is widened to float32.
#if defined(__x86_64__)
#include "isa.h"
BEGIN_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")

namespace trueroll {
namespace {
constexpr int ACCUMULATORS = 24;
#include "vec_avx512.h"
#include "../kernels.h"
}  // namespace

const InstructionSet avx512 = {
    "avx512", ALL_OPS<bf16>, ALL_OPS<float>, log_sum_exp, sample, statistics, fold_sections,
    take_piece};
}  // namespace trueroll
END_TARGET
#endif
