// AVX-512 with its dot products of bfloat16 and of bytes. Every CPU with dot products of bfloat16 also has dot products
// of bytes.
#if defined(__x86_64__)
#include "isa.h"
BEGIN_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx512vnni,avx2,fma")

namespace trueroll {
namespace {
#define HAS_DOT_BF16
#define HAS_DOT_INT8
constexpr int ACCUMULATORS = 24;
#include "vec_avx512.h"
#include "../kernels.h"
}  // namespace

const InstructionSet avx512_bf16 = {
    "avx512_bf16", ALL_OPS<bf16>, ALL_OPS<float>, log_sum_exp, sample, statistics, fold_sections,
    take_piece};
}  // namespace trueroll
END_TARGET
#endif
