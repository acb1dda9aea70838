// AVX2 with FMA.
#if defined(__x86_64__)
#include "isa.h"
BEGIN_TARGET("avx2,fma")

namespace trueroll {
namespace {
constexpr int ACCUMULATORS = 6;
#include "vec_avx2.h"
#include "../kernels.h"
}  // namespace

const InstructionSet avx2 = {
    "avx2", ALL_OPS<bf16>, ALL_OPS<float>, log_sum_exp, sample, statistics, fold_sections,
    take_piece};
}  // namespace trueroll
END_TARGET
#endif
