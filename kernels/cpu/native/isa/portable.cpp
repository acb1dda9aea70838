// For any machine.
#include "isa.h"

namespace trueroll {
namespace {
constexpr int ACCUMULATORS = 2;
#include "vec_portable.h"
#include "../kernels.h"
}  // namespace

const InstructionSet portable = {
    "portable", ALL_OPS<bf16>, ALL_OPS<float>, log_sum_exp, sample, statistics, fold_sections,
    take_piece};
}  // namespace trueroll
