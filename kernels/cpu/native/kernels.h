// The ops, written once over 16 lanes. Each isa/*.cpp includes this file in its own namespace. Before the include, each
// isa/*.cpp defines the vector type F (16 float32), the integer type U (16 uint32) and ACCUMULATORS. ACCUMULATORS is
// the number of F that fit into registers beside the operands of a product. HAS_DOT_BF16 and HAS_TILES give the
// available bfloat16 instructions.
//
// A row's result does not depend on other rows. Products sum each element separately, in one order (products.h). A
// product with a quantized matrix first expands the matrix to its values (codes.h), or quantizes its activations
// (dynamic.h). Attention over caches of codes first
// expands the codes to their values (cached.h).
// Attention reduces each split of the keys row by row and folds the splits in order (attention.h). A recurrence
// processes the tokens of a sequence one by one (recurrence.h,
// state_space.h). A row's experts are added one by one (experts.h). All
// other ops compute row by row.

#include "numbers.h"
#include "codes.h"
#include "dynamic.h"
#include "products.h"
#include "cached.h"
#include "ranks.h"
#include "projections.h"
#include "attention.h"
#include "recurrence.h"
#include "state_space.h"
#include "masks.h"
#include "head.h"
#include "experts.h"
#include "layers.h"
#include "merge.h"
#include "checksum.h"

template <class T>
constexpr Ops<T> ALL_OPS = {
    linear<T>, head_linear<T>, logits<T>, gate_up<T>, qkv<T>, write_kv<T>, attention<T>, layers<T>, head_sections<T>,
    rmsnorm<T>, gate_mul<T>,
    convolve<T>, delta_rule<T>, state_space<T>, route<T>, experts<T>, merge<T>,
};
