// The C interface: the instruction sets of this machine, the instruction set in use, and every op with plain pointers.
//
// INTERFACE is the only declaration. kernels/cpu/library.py also reads INTERFACE. Python calls each function with the
// arguments declared here, and refuses a library that was compiled from a different INTERFACE. INTERFACE contains no
// preprocessor directives and no macros. The functions of INTERFACE take pointers, long, int and float.
//
// The comments of the ops' arguments (common.h) name the pointers that may be null. The caller has checked all sizes.
// `bfloat16` is the type of all activations, weights and caches of a call: bfloat16 if nonzero, else float32. A weight
// is plain, or quantized in a `Format` (common.h). The values of a quantized weight are rounded to the type.
#pragma once

#include <stdint.h>

#define INTERFACE(...) __VA_ARGS__ constexpr char INTERFACE_TEXT[] = #__VA_ARGS__;

#pragma GCC visibility push(default)
namespace trueroll {
extern "C" {
INTERFACE(
// The weights for a layer's queries, keys and values, in the order of `qkv_tensors` in kernels/cpu/backend.py.
struct QkvPointers {
    const void* weights[3];
    const void *biases[3], *norms[2];  // or null
};

// The weights of a delta net, in the order of `_delta_net_tensors`.
struct DeltaNetPointers {
    const void *inputs[4], *convolution, *decay, *bias, *norm;
};

struct MlpPointers {
    const void *gate, *up, *down;
};

struct BiasedMlpPointers {
    MlpPointers matrices;
    const void* biases[3];  // or null
};

// The weights of experts, in the order of `_experts_tensors`. Biases and the shared weights may be null.
struct ExpertsPointers {
    const void *router, *router_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    MlpPointers shared;
    const void *shared_score, *correction;
};

// The weights of a layer, in the order of `_layer_tensors`. A pair of norms is the norm before and the norm after; each
// may be null.
struct LayerPointers {
    const void* mixer_norms[2];
    union {
        QkvPointers qkv;
        DeltaNetPointers delta_net;
    };
    const void *o, *o_bias, *sinks, *mlp_norms[2];  // biases, sinks: or null
    union {
        BiasedMlpPointers mlp;
        ExpertsPointers experts;
    };
};
static_assert(sizeof(LayerPointers) == 26 * sizeof(void*), "Python fills it as an array of pointers");

// The numbers of an attention, in the order of `attention_numbers` in kernels/cpu/backend.py.
struct AttentionNumbers {
    double heads, kv_heads, head_dim, norm_eps, norm_zero_centered, norm_over_heads, scale, window, soft_cap, rotation,
        pairs, is_interleaved, is_gated, cache_format;
};

// The numbers of a delta net, in the order of `_delta_net_numbers`.
struct DeltaNetNumbers {
    double key_heads, value_heads, key_dim, value_dim, kernel, norm_eps, norm_zero_centered;
};

// The numbers of a router, in the order of `router_numbers`.
struct RouterNumbers {
    double score, is_wide, ranks_scores, groups, kept_groups, group_best, is_normed, eps, floor, scale;
};

// The formats of a layer's matrices, in the order of `_layer_formats`. `inputs`: of q, k and v, or of the inputs of a
// delta net. `mlp`: of gate, up and down, in the MLP or in the shared expert. `experts`: of gate_up and down. Routers
// and the scores of shared experts are never quantized.
struct LayerFormats {
    double inputs[4], o, mlp[3], experts[2];
};

// The numbers of a layer, in the order of `_layer_numbers`.
struct LayerNumbers {
    double has_delta_net;
    union {
        AttentionNumbers attention;
        DeltaNetNumbers delta_net;
    };
    double intermediate, activation, norm_eps, norm_zero_centered;
    double experts, top_k, has_shared, shared;  // 0 without experts, as the numbers in the next two lines
    double first_held, held;  // the experts of this rank
    RouterNumbers router;
    double pieces, o_length, down_length;  // of products back to hidden states, as in `Pieces`
    double residual_scale;                 // not read for experts
    LayerFormats formats;
};
static_assert(sizeof(LayerNumbers) == 49 * sizeof(double), "Python fills it as an array of numbers");

struct CachePointers {
    const void *keys, *values;
};

// A layer's memory.
union MemoryPointers {
    CachePointers caches;
    struct {
        void *states, *tails;
    } recurrent;
};

struct RotationPointers {
    const float *cosines, *sines, *q_scale;  // `q_scale`: or null
};

// Where a layer stores the keys and values of a step's tokens. All layers of a group have the same pages.
struct PagePointers {
    const int64_t *slots, *tables;
    int64_t max_blocks;
};

// The result of a section of the vocabulary for one row. `peak`, `total`, `weighted`: as in `LogSumExp` (head.h). `best`:
// the score of the section's best id, `id`. `basis`: the logit that the log-prob of `id` is computed from. `scaled`: the
// logit of `id`, divided by the temperature.
struct SectionResult {
    float peak, total, weighted, best, basis, scaled;
    int64_t id;
};
static_assert(sizeof(SectionResult) == 32, "Python moves it as 32 bytes");

// A change of one logit, as `ENTRY` in kernels/edits.py.
struct LogitEdit {
    int32_t token, count;
    float bias;
    uint8_t ends, occurs;
};
static_assert(sizeof(LogitEdit) == 16, "Python makes it as 16 bytes");

// The edits and the targets of a head's rows, as `Edits` in kernels/contract.py. `target_logits`: receives the logits of
// the targets, in the distribution of the log-probs.
struct HeadEdits {
    const int64_t* starts;
    const LogitEdit* entries;
    const float* penalties;
    const int64_t* mask_places;
    const uint32_t* masks;
    int64_t mask_words;
    const int64_t *target_starts, *targets;
    float* target_logits;
};

// Exchanges sums between ranks through shared memory. `counters`: one for each rank, 64 bytes apart. `slots`: two sides,
// each with one slot for each rank. `turn`: the number of exchanges so far. `check`: called while a rank waits; returns
// nonzero if the rank shall give up, which sets `has_failed`. `waited_ns`: the time for which this rank has waited.
struct RankExchange {
    int64_t* counters;
    char* slots;
    int64_t slot_bytes, rank, size, turn;
    int (*check)();
    int64_t has_failed, waited_ns;
};

// Returns the preprocessed INTERFACE that the library was compiled from.
const char* trueroll_declarations();

// Returns the name of this machine's i-th instruction set, best first; null past the last instruction set.
const char* trueroll_isa_at(long i);

// Returns the name of the instruction set in use.
const char* trueroll_isa();

// Uses the instruction set of this name for all later calls. Returns false if this machine lacks the instruction set.
int trueroll_set_isa(const char* name);

// Increments `turn`, and waits until all ranks have made this call. Everything that the other ranks wrote before their
// call is then visible. Returns 0 if `check` refused to wait any longer.
int trueroll_meet(RankExchange* ranks);

void trueroll_pack(int bfloat16, const void* rows, void* packed, long n, long k);

// Returns the 64-bit XXH3 hash of more than 240 bytes. Sets `finite` to whether all values are finite. `infinity`: as in
// `PieceArgs`. `target`: where the bytes are copied to; null for no copy.
long trueroll_take_bytes(const void* data, long bytes, int infinity, void* target, bool* finite);

// As `take_bytes`, for a matrix [n, k], which is packed to `packed`.
long trueroll_take_rows(int bfloat16, const void* rows, long n, long k, int infinity, void* packed, bool* finite);

void trueroll_unpack(int bfloat16, const void* packed, void* rows, long n, long k);

void trueroll_merge(
    int bfloat16, const void* weight, long n, long k, const float* a, const float* b, long rank, float scale, void* out
);

// `packed`: the result of `merge`, packed. `finite`: whether all values are finite.
void trueroll_merge_into(
    int bfloat16, const void* weight, long n, long k, const float* a, const float* b, long rank, float scale,
    void* packed, bool* finite
);

void trueroll_embedding(
    long threads, int bfloat16, const int64_t* ids, long count, const void* w, long n, long k, void* out
);

void trueroll_linear(
    long threads, int bfloat16, const void* x, long count, long k, const void* w, int format, long n, const void* bias,
    const void* residual, long pieces, long length, void* out
);

// As in `HeadLinearArgs`. A head's matrix is [n, k].
void trueroll_head_linear(
    long threads, int bfloat16, const void* x, long count, long heads, long k, const void* w, long n, void* out
);

// `peaks`: of whole rows, [count], if the weight quantizes activations and x has only some columns of each row; or null.
void trueroll_back_sums(
    long threads, int bfloat16, const void* x, long count, long k, const void* w, int format, long n, long pieces,
    long length, const float* peaks, float* out
);

void trueroll_logits(
    long threads, int bfloat16, const void* x, long count, long k, const void* w, long n, float scale, float soft_cap,
    float* out
);

void trueroll_gate_up(
    long threads, int bfloat16, const void* x, long count, long k, const void* gate, int gate_format, const void* up,
    int up_format, long n, int activation, void* out
);

void trueroll_qkv(
    long threads, int bfloat16, const void* x, long count, long k, const AttentionNumbers* numbers,
    const QkvPointers* weights, int q_format, int k_format, int v_format, void* keys, void* values,
    const float* cosines, const float* sines, const float* q_scale, const int64_t* slots, long block_size, void* q
);

// `format`: of the caches, a number of `CacheFormat` (common.h), here and in the next function.
void trueroll_write_kv(
    long threads, int bfloat16, const void* k, const void* v, const int64_t* slots, long count, void* keys, void* values,
    int format, long block_size, long kv_heads, long head_dim, long value_dim
);

void trueroll_attention(
    long threads, int bfloat16, const void* q, const void* keys, const void* values, int format, long heads,
    long kv_heads, long head_dim, long value_dim, long block_size, long sequences, const int64_t* query_starts,
    const int64_t* context_lens, const int64_t* tables, long max_blocks, const int64_t* ends, float scale, long window,
    float soft_cap, const void* sinks, void* out
);

// Runs layers one after the other, each with its numbers, weights, memory and pages. `ends`: for each row, the end of the
// tokens that it sees, or null for causal attention (`AttentionBatch` in kernels/contract.py). `reads`, `writes`: as in
// `StateBatch`, or null if no layer is a delta net. `routes`: [layers with experts, count, top_k], or null. The other
// pointers are buffers between steps, of the size that the largest layer needs: `middle` [count, k]; `active` [count,
// intermediate size of the MLP or shared expert]. For attention: `projected`, `mixed` and, with output gates, `gates`,
// all [count, heads * head_dim]. For a delta net: `projected` and `convolved` [count, channels], `gates` and `mixed`
// [count, value_heads * value_dim], `rates` [2, count, value_heads].
void trueroll_layers(
    long threads, int bfloat16, const void* x, long count, long k, const LayerNumbers* numbers,
    const LayerPointers* weights, const MemoryPointers* memories, const PagePointers* pages, long num_layers,
    const RotationPointers* rotations, long block_size, long sequences, const int64_t* query_starts,
    const int64_t* context_lens, const int64_t* ends, const int64_t* reads, const int64_t* writes, int32_t* routes,
    void* projected, void* convolved, void* gates, void* rates, void* mixed, void* middle, void* active, void* out,
    RankExchange* ranks
);

// Computes the results of the sections of the n ids from `first` on. With statistics, also `top_values` and `top_ids`,
// [count, k]. See `HeadArgs` and `HeadSections` for the shapes. `edits`: or null.
void trueroll_head_sections(
    long threads, int bfloat16, const void* hidden, long columns, const void* w, long n, float scale, float soft_cap,
    long first, long count,
    const int64_t* rows, const float* temperatures, const uint8_t* raw, const int64_t* seeds,
    const int64_t* positions, const int64_t* targets, SectionResult* sections, int has_statistics, long k,
    float* top_values, int64_t* top_ids, const HeadEdits* edits
);

// Folds the results of all sections. `values` and `ids`: [count, offered], the candidates for the k top tokens. See
// `HeadResults` for the shapes. `edits`: those of `head_sections`, or null. `target_logprobs`: receives the log-probs of
// all targets.
void trueroll_fold_sections(
    long threads, long count, long num_sections, const SectionResult* sections, long offered, const float* values,
    const int64_t* ids, int64_t* tokens, float* logprobs, uint8_t* finite, long k, float* entropies, int64_t* top_ids,
    float* top_logprobs, const HeadEdits* edits, float* target_logprobs
);

void trueroll_rmsnorm(
    long threads, int bfloat16, const void* x, long count, long k, const void* weight, float eps,
    int zero_centered, void* out
);

void trueroll_gate_mul(
    long threads, int bfloat16, const void* gate, const void* up, long count, int activation, void* out
);

// SiLU of a causal convolution of each channel: x [count, k], weight [k, kernel], bias [k] or null, tails [slots, kernel -
// 1, k].
void trueroll_convolve(
    long threads, int bfloat16, const void* x, long count, long k, const void* weight, const void* bias, long kernel,
    void* tails, long sequences, const int64_t* starts, const int64_t* reads, const int64_t* writes,
    const int64_t* drafted, void* out
);

// The recurrence of a gated delta net. See `DeltaRuleArgs` for the shapes.
void trueroll_delta_rule(
    long threads, int bfloat16, const void* qkv, const void* b, const void* a, const void* decay, const void* bias,
    long key_heads, long value_heads, long key_dim, long value_dim, float* states, long sequences,
    const int64_t* starts, const int64_t* reads, const int64_t* writes, const int64_t* drafted, void* out
);

// The recurrence of a state space. See `StateSpaceArgs` for the shapes.
void trueroll_state_space(
    long threads, int bfloat16, const void* xbc, const void* steps, const void* decay, const void* bias,
    const void* skip, float least, float most, long groups, long heads, long state_dim, long head_dim, float* states,
    long sequences, const int64_t* starts, const int64_t* reads, const int64_t* writes, const int64_t* drafted,
    void* out
);

// See `RouteArgs` for the shapes. `router`: `RouterNumbers`.
void trueroll_route(
    long threads, int bfloat16, const void* logits, long count, long experts, long top_k, const void* router,
    const float* correction, int is_replayed, int32_t* ids, float* gates
);

// Applies the experts, with n inner columns each, to rows x [count, k]. `gated`: as `is_gated`. See `ExpertsArgs` for
// the shapes.
void trueroll_experts(
    long threads, int bfloat16, const void* x, long count, long k, const void* gate_up, const void* gate_up_bias,
    const void* down, const void* down_bias, int gate_up_format, int down_format, long experts, long n, long top_k,
    int gated, int activation,
    const int32_t* ids, const float* gates, const void* shared, long groups, void* out
);

void trueroll_expert_sums(
    long threads, int bfloat16, const void* x, long count, long k, const void* gate_up, const void* gate_up_bias,
    const void* down, const void* down_bias, int gate_up_format, int down_format, long first, long experts, long n,
    long top_k, int gated, int activation,
    const int32_t* ids, const float* gates, long groups, float* out
);

// Cosines and sines [count, half] of the angles positions times inv_freq, multiplied by scale.
void trueroll_rotation(
    long threads, const int64_t* positions, long count, const float* inv_freq, long half, float scale, float* cosines,
    float* sines
);

// Log-probs of k tokens of each row of float32 logits [count, n].
void trueroll_log_probs(
    long threads, const float* logits, long count, long n, const int64_t* tokens, long k, float* out
);

// Log-probs of one token of each row of float32 logits [count, n], the entropy of each row, and its k best tokens.
void trueroll_token_statistics(
    long threads, const float* logits, long count, long n, const int64_t* tokens, long k, float* log_probs,
    float* entropies, int64_t* top_ids, float* top_log_probs
);

// Draws one token for each row of float32 logits [count, n].
void trueroll_sample(
    long threads, const float* logits, long count, long n, const int64_t* seeds, const int64_t* positions, int64_t* out
);

// Sets logits to -inf in rows of float32 logits [any number, n]. `masks`: [count, ceil(n / 32)], as in `mask_logits` of
// kernels/contract.py. Mask i applies to row rows[i].
void trueroll_mask_logits(
    long threads, float* logits, long n, const int64_t* rows, long count, const uint32_t* masks
);

// Filters float32 logits [count, n] in place. `sums` [count, 2], `bits` [count, ceil(n / 8)]: receive the sums before the
// filters and the kept logits, as in `Kept` (filters.h), or null.
void trueroll_filter(
    long threads, float* logits, long count, long n, const int64_t* top_k, const float* top_p, const float* min_p,
    float* sums, uint8_t* bits
);

// Log-probs of logits [count] of rows with these sums [count, 2].
void trueroll_log_probs_of(long count, const float* logits, const float* sums, float* out);
)
}
}  // namespace trueroll
#pragma GCC visibility pop
