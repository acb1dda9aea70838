// Shared by all translation units: number types, the arguments of the ops, the table of an instruction set's ops, and
// the thread pool. Sizes and strides count elements unless they say bytes.
//
// A packed matrix [rows, columns] is stored in panels of 16 rows. For each step over the columns, a panel holds the
// values of its 16 rows side by side: one float32 per row, or a pair of bfloat16 of neighbouring columns. Rows are
// padded with zeros to a multiple of 16. Columns are padded with zeros to a multiple of COLUMN_MULTIPLE. A quantized
// matrix has panels of codes and scales; kernels/cpu/quantized.py describes them.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "api.h"

namespace trueroll {

struct bf16 {
    uint16_t bits;
};

constexpr long LANES = 16;
constexpr long KV_SPLIT = 128;  // as in kernels/contract.py

template <class T>
constexpr long PAIR = sizeof(T) == 2 ? 2 : 1;

// Whole tiles of 32 bfloat16 for AMX.
template <class T>
constexpr long COLUMN_MULTIPLE = sizeof(T) == 2 ? 32 : 1;

constexpr long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr long smaller(long a, long b) { return a < b ? a : b; }
constexpr long larger(long a, long b) { return a > b ? a : b; }

// The formats of matrices, in the order of FORMAT_NUMBERS in kernels/cpu/quantized.py.
enum class Format { PLAIN, FP8, FP8_CHANNEL, INT8, MXFP8, MXFP4, NVFP4, AWQ, INT8_DYNAMIC, FP8_DYNAMIC };

// Flags: the kinds of numbers to which products quantize their activations (dynamic.h).
constexpr unsigned INTEGERS = 1, E4M3_NUMBERS = 2;
constexpr unsigned activations_of(Format format) {
    return format == Format::INT8_DYNAMIC ? INTEGERS : format == Format::FP8_DYNAMIC ? E4M3_NUMBERS : 0;
}

// The sizes of a quantized panel. `bits`: of a code. `group`: the columns that share scales. `header`: the bytes at the
// beginning of a panel. `shared`: the bytes before the codes of each group.
struct CodeSizes {
    long bits, group, header, shared;
};
constexpr long ALL_COLUMNS = 1l << 40;
constexpr CodeSizes CODE_SIZES[] = {
    {}, {8, 128, 0, 64}, {8, ALL_COLUMNS, 0, 64}, {8, ALL_COLUMNS, 0, 64}, {8, 32, 0, 16}, {4, 32, 0, 16}, {4, 16, 64, 16},
    {4, 128, 0, 48}, {8, ALL_COLUMNS, 0, 64}, {8, ALL_COLUMNS, 0, 64}
};
constexpr long CODE_COLUMNS = 32;  // quantized panels are padded to a multiple of this number of columns

// A panel of a matrix with this number of columns. The panels of the matrix are `bytes` apart.
template <class T>
struct Panel {
    const char* data;
    long bytes, columns;
    Format format;

    long steps() const { return round_up(columns, COLUMN_MULTIPLE<T>) / PAIR<T>; }
    // The values of a plain panel from a step on.
    const T* from(long step) const { return reinterpret_cast<const T*>(data) + step * LANES * PAIR<T>; }
    // The panel that is this number of panels further on.
    const char* later(long panels) const { return data + panels * bytes; }
};

template <class T>
struct Matrix {
    T* data;
    long rows, columns;
    Format format = Format::PLAIN;

    long panels() const { return round_up(rows, LANES) / LANES; }
    long steps() const { return round_up(columns, COLUMN_MULTIPLE<T>) / PAIR<T>; }
    long panel_bytes() const {
        if (format == Format::PLAIN) return steps() * LANES * PAIR<T> * static_cast<long>(sizeof(T));
        const CodeSizes& sizes = CODE_SIZES[static_cast<long>(format)];
        const long padded = round_up(columns, CODE_COLUMNS), groups = (padded + sizes.group - 1) / sizes.group;
        return sizes.header + groups * sizes.shared + padded * LANES * sizes.bits / 8;
    }
    Panel<T> panel(long p) const {
        const long bytes = panel_bytes();
        return {reinterpret_cast<const char*>(data) + p * bytes, bytes, columns, format};
    }
    // The panels and the elements of a plain matrix.
    T* plain_panel(long p) const { return data + p * steps() * LANES * PAIR<T>; }
    T& at(long row, long column) const {
        return plain_panel(row / LANES)[(column / PAIR<T> * LANES + row % LANES) * PAIR<T> + column % PAIR<T>];
    }
};

// A root mean square norm. `weight`: null if there is no norm. `zero_centered`: multiply by 1 + weight.
template <class T>
struct Norm {
    const T* weight;
    float eps;
    bool zero_centered;
};

// Rows of activations [count, columns], and the norm that is applied to the rows first.
template <class T>
struct Input {
    const T* data;
    long count, columns;
    Norm<T> norm;
};

// As in kernels/specs.py.
struct Pieces {
    long count = 1, length = 0;

    // The first step of a piece. The weight has `steps` steps of `pair` columns.
    long first_step(long piece, long columns, long steps, long pair) const {
        return piece == 0 ? 0 : piece == count || piece * length >= columns ? steps : piece * length / pair;
    }
};

template <class T>
struct LinearArgs {
    Input<T> x;
    Matrix<T> weight;
    const T *bias, *residual;  // or null
    T* out;
    Pieces pieces = {};
    float* sums = nullptr;  // receives the sums instead of `out`, without bias and residual
    float residual_scale = 1.0f;  // multiplies the rounded product before the residual is added
    const float* peaks = nullptr;  // of the rows of which x has only some columns (kernels/dynamic.py), or null
};

// `x`: [count, heads, columns of weight]. `weight`: the matrices of all heads, one below the other. Each head's matrix
// begins at a panel. `out`: [count, heads, rows of a head].
template <class T>
struct HeadLinearArgs {
    const T* x;
    long count, heads;
    Matrix<T> weight;
    T* out;
};

enum class Activation { SILU, GELU_TANH, SIGMOID, CLAMPED_SILU, RELU };

template <class T>
struct GateUpArgs {
    Input<T> x;
    Matrix<T> gate, up;
    Activation activation;
    T* out;
    const T* biases[2] = {};  // of gate and up, or null
};

enum class Score { SOFTMAX_OF_CHOSEN, SOFTMAX, SIGMOID };

// `RouterSpec` of kernels/specs.py.
struct Router {
    Score score;
    bool is_wide, ranks_scores;
    long groups, kept_groups, group_best;
    bool is_normed;
    float eps, floor, scale;
};

// The experts chosen by a router's logits [count, experts], in ascending order, and the gates. Experts and gates are
// [count, top_k]. `correction`: [experts] or null. `is_replayed`: `chosen` is an input.
template <class T>
struct RouteArgs {
    const T* logits;
    long count, experts, top_k;
    Router router;
    const float* correction;
    bool is_replayed;
    int32_t* chosen;
    float* gates;
};

// `x` and `out`: [count, columns of gate_up]. The matrices and biases of all experts are stored one below the other, as
// in `ExpertsWeights` of kernels/contract.py. Each expert's matrix begins at a panel. `shared`, `residual`: [count,
// ...], added in this order.
template <class T>
struct ExpertsArgs {
    const T* x;
    long count;
    Matrix<T> gate_up, down;
    const T *gate_up_bias, *down_bias;  // or null
    long experts, top_k;
    Activation activation;
    const int32_t* chosen;  // [count, top_k]
    const float* gates;     // [count, top_k]
    const T *shared, *residual;  // or null
    T* out;
    long groups = 1;  // at most MOST_GROUPS
    long first = 0;   // the id of the first expert; rows of experts with other ids are left out
    float* sums = nullptr;  // receives the sums instead of `out`
    bool is_gated = true;   // otherwise, gate_up has the rows of up only

    long sides() const { return is_gated ? 2 : 1; }
};

constexpr long MOST_GROUPS = 8;

// The steps of a mixture up to `experts`. The members x, chosen, gates and shared of `experts` are not set yet. A rank
// may have none of the shared expert's inner features; then `shared_gate` has no rows. `shared_score` may have no data.
// `active`: memory for the shared expert's inner rows.
template <class T>
struct MixtureArgs {
    Input<T> x;
    Matrix<T> router;
    const T* router_bias;  // or null
    Router routing;
    const float* correction;  // or null
    int32_t* routes;  // or null
    bool has_shared;
    ExpertsArgs<T> experts;
    Matrix<T> shared_gate, shared_up, shared_down, shared_score;
    Pieces shared_pieces;  // of shared_down
    T* active;
};

// The formats of caches, in the order of CACHE_FORMAT_NUMBERS in kernels/cpu/backend.py.
enum class CacheFormat { PLAIN, INT8, FP8 };

// The caches of keys and values: `block_size` tokens per block and key-value head. Keys are stored as [head_dim /
// PAIR][token][PAIR], values as [token / PAIR][value_dim][PAIR].
//
// If the caches hold codes, a block and head has the codes of its keys, [head_dim][token], or of its values,
// [token][value_dim], and then the float16 numbers that the codes of a vector share: the scales and, for INT8, the zero
// points, each [token]. In latent attention, a key has two vectors, and its second vector has shared numbers of its own.
template <class T>
struct Caches {
    T *keys, *values;
    long block_size, kv_heads, head_dim, value_dim;
    CacheFormat format = CacheFormat::PLAIN;

    bool has_codes() const { return format != CacheFormat::PLAIN; }
    long shared_numbers() const { return format == CacheFormat::INT8 ? 2 : 1; }
    // The size of the first vector of a key.
    long first_part() const { return smaller(head_dim, value_dim); }
    long key_parts() const { return value_dim < head_dim ? 2 : 1; }
    uint8_t* key_codes(long block, long head) const {
        const long row = head_dim + key_parts() * shared_numbers() * 2;
        return reinterpret_cast<uint8_t*>(keys) + (block * kv_heads + head) * block_size * row;
    }
    uint8_t* value_codes(long block, long head) const {
        const long row = value_dim + shared_numbers() * 2;
        return reinterpret_cast<uint8_t*>(values) + (block * kv_heads + head) * block_size * row;
    }
    uint16_t* key_shared(long block, long head, long part) const {
        uint8_t* end = key_codes(block, head) + block_size * head_dim;
        return reinterpret_cast<uint16_t*>(end) + part * shared_numbers() * block_size;
    }
    uint16_t* value_shared(long block, long head) const {
        return reinterpret_cast<uint16_t*>(value_codes(block, head) + block_size * value_dim);
    }
    T* key_block(long block, long head) const { return keys + (block * kv_heads + head) * block_size * head_dim; }
    T* value_block(long block, long head) const { return values + (block * kv_heads + head) * block_size * value_dim; }
};

template <class T>
struct QkvArgs {
    Input<T> x;
    Matrix<T> weights[3];
    const T* biases[3];  // or null
    Norm<T> norms[2];     // of q and k, over each head or, if `over_heads`, over all heads at once
    bool over_heads;
    long pairs;                    // rotated pairs of a head; the rest of the head stays unchanged
    bool interleaved;              // pairs are neighbours
    const float *cosines, *sines;  // [count, pairs]
    const float* q_scale;          // [count], multiplies rotated queries, or null
    const int64_t* slots;
    T *q, *gates;  // `gates`: null, or memory for the gate values after each head's query
    long stride;   // from one head to the next, of q and of gates
    Caches<T> caches;

    long heads() const { return weights[0].rows / caches.head_dim / (gates == nullptr ? 1 : 2); }
};

template <class T>
struct AttentionArgs {
    const T* q;
    T* out;
    Caches<T> caches;
    long heads, sequences;
    const int64_t *query_starts, *context_lens, *tables;
    long max_blocks;
    const int64_t* ends;  // for each query, the end of the keys that it sees; null for causal attention
    float scale;     // positive, since the largest score is found before scaling
    long window;     // number of keys a query sees, itself included, or NO_WINDOW
    float soft_cap;  // or 0
    const T* sinks;  // [heads], or null
};

constexpr long NO_WINDOW = 1l << 62;

constexpr double L2_EPS = 1e-6;  // as in kernels/contract.py

// As `StateBatch` in kernels/contract.py. For each sequence: its rows; the slot of the state before these rows (-1 for
// none); the slot of the state after these rows; and the number of last rows that do not enter this state (null if
// there are no such rows).
struct StateBatch {
    long sequences;
    const int64_t *starts, *reads, *writes, *drafted;

    // The end of the rows that enter the state.
    long kept_end(long sequence) const {
        return starts[sequence + 1] - (drafted == nullptr ? 0 : drafted[sequence]);
    }
};

// `weight`: [channels, kernel]. `bias`: [channels], or null. `tails`: [slots, kernel - 1, channels].
template <class T>
struct ConvolveArgs {
    const T *x, *weight, *bias;
    long channels, kernel;
    T* tails;
    StateBatch batch;
    T* out;
};

// `qkv`: [rows, channels]. `a`, `b`: [rows, value_heads]. `decay`, `bias`: [value_heads]. `states`: [slots,
// value_heads, key_dim, value_dim]. `out`: [rows, value_heads, value_dim].
template <class T>
struct DeltaRuleArgs {
    const T *qkv, *b, *a, *decay, *bias;
    long key_heads, value_heads, key_dim, value_dim;
    float* states;
    StateBatch batch;
    T* out;

    long channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// `xbc`: [rows, channels]. `steps`: [rows, heads]. `decay`, `bias`, `skip`: [heads]. `least`, `most`: the bounds of a time
// step. `states`: [slots, heads, state_dim, head_dim]. `out`: [rows, heads, head_dim].
template <class T>
struct StateSpaceArgs {
    const T *xbc, *steps, *decay, *bias, *skip;
    float least, most;
    long groups, heads, state_dim, head_dim;
    float* states;
    StateBatch batch;
    T* out;

    long channels() const { return heads * head_dim + 2 * groups * state_dim; }
};

// The arguments of a delta net's ops in order. `inputs`: the products for (q, k, v) side by side, for z, for b and for
// a. The gate z multiplies the output after `norm`.
template <class T>
struct DeltaNetArgs {
    LinearArgs<T> inputs[4];
    ConvolveArgs<T> convolve;
    DeltaRuleArgs<T> delta_rule;
    Norm<T> norm;
};

// Returns the slot of a rank in the next exchange. engine/parallel/exchange.py describes the layout.
inline float* next_slot(const RankExchange& ranks, long rank) {
    const long side = (ranks.turn + 1) % 2;
    return reinterpret_cast<float*>(ranks.slots + (side * ranks.size + rank) * ranks.slot_bytes);
}

// Waits until all ranks have made this call. Returns false if `ranks.check` refuses to wait any longer.
bool meet(RankExchange& ranks);

// The arguments of a layer's ops in order. Each op reads the results of the ops before it. A layer has either a delta
// net or queries and attention, and either a mixture or an MLP. `after_mixer` and `after_mlp`: norms of outputs,
// applied before an output is added to a residual.
template <class T>
struct LayerArgs {
    bool has_delta_net, has_experts;
    DeltaNetArgs<T> delta_net;
    QkvArgs<T> qkv;
    AttentionArgs<T> attention;
    LinearArgs<T> o;
    Norm<T> after_mixer;
    MixtureArgs<T> mixture;
    GateUpArgs<T> gate_up;
    LinearArgs<T> down;
    Norm<T> after_mlp;
};

// As in kernels/contract.py.
constexpr int64_t SAMPLE = -1, GREEDY = -2;

// As `HeadSpec` in kernels/specs.py. `soft_cap`: 0 for none.
struct LogitNumbers {
    float scale, soft_cap;
};

// `count` requests. `rows`: the row of `hidden` that each request reads. `targets`: SAMPLE, GREEDY, or the id of the
// token to score. `raw`: compute the log-prob from the logits without the temperature. `weight` has the rows of the ids
// from `first` on, which begins a section.
template <class T>
struct HeadArgs {
    const T* hidden;
    Matrix<T> weight;
    LogitNumbers shape;
    long first, count;
    const int64_t* rows;
    const float* temperatures;
    const uint8_t* raw;
    const int64_t *seeds, *positions, *targets;
    bool has_statistics;
    long k;                  // the number of top tokens
    const HeadEdits* edits;  // or null
};

// Partial results of the head: `results` [count, sections], and for each row the `k` highest logits with their ids, both
// [count, k]. If there are fewer than k ids, -inf with NO_ID fills up the list.
struct HeadSections {
    SectionResult* results;
    float* top_values;
    int64_t* top_ids;
};

constexpr int64_t NO_ID = INT64_MAX;

// The results of the head for `count` rows. `entropies`, `top_ids` and `top_logprobs`, as in `TokenStatistics` of
// kernels/contract.py: null if no statistics are wanted.
struct HeadResults {
    int64_t* tokens;
    float* logprobs;
    uint8_t* finite;
    long k;
    float* entropies;
    int64_t* top_ids;
    float* top_logprobs;
    const HeadEdits* edits;  // or null
    float* target_logprobs;
};

// `weight` and `out`: [rows, columns]; a [rank, columns] and b [rows, rank].
template <class T>
struct MergeArgs {
    const T* weight;
    long rows, columns;
    const float *a, *b;
    long rank;
    float scale;
    T* out;

    // Returns the arguments for the rows of one panel, with `to` as the output.
    MergeArgs panel(long number, T* to) const {
        const long row = number * LANES, count = rows - row < LANES ? rows - row : LANES;
        return {weight + row * columns, count, columns, a, b + row * rank, rank, scale, to};
    }
};

template <class T>
struct Ops {
    void (*linear)(const LinearArgs<T>&);
    void (*head_linear)(const HeadLinearArgs<T>&);
    void (*logits)(const Input<T>&, const Matrix<T>&, const LogitNumbers&, float*);
    void (*gate_up)(const GateUpArgs<T>&);
    void (*qkv)(const QkvArgs<T>&);
    void (*write_kv)(const Caches<T>&, const T* keys, const T* values, const int64_t* slots, long count);
    void (*attention)(const AttentionArgs<T>&);
    void (*layers)(const LayerArgs<T>*, long count, RankExchange*);
    void (*head_sections)(const HeadArgs<T>&, const HeadSections&);
    void (*rmsnorm)(const Input<T>&, T* out, long stride);
    void (*gate_mul)(const T* gate, const T* up, Activation activation, long count, T* out);
    void (*convolve)(const ConvolveArgs<T>&);
    void (*delta_rule)(const DeltaRuleArgs<T>&);
    void (*state_space)(const StateSpaceArgs<T>&);
    void (*route)(const RouteArgs<T>&);
    void (*experts)(const ExpertsArgs<T>&);
    void (*merge)(const MergeArgs<T>&);
};

// Pointers to the memory for the statistics of one row; see `TokenStatistics` in kernels/contract.py.
struct Statistics {
    float *log_prob, *entropy;
    int64_t* top_ids;       // [k]
    float* top_log_probs;
};

// Bytes of a push. They are hashed `step` bytes at a time. While these bytes are in a core's cache, they are searched
// for infinities and NaN, and `write` writes them to `target`. `write` gets the first byte of the piece, and the offsets
// of the bytes to write. `infinity`: the exponent bits of infinities, for values of 2 bytes if it is below 2^16, else
// for values of 4 bytes; 0 for no search.
struct PieceArgs {
    const uint8_t* data;
    long bytes, step, infinity;
    const void* target;
    void (*write)(const void* target, const uint8_t* data, long start, long end);
};
typedef uint64_t Words __attribute__((vector_size(64)));
constexpr long HASH_STRIPE = 64, HASH_BLOCK = 1024, HASH_LEAST = 241;
extern const uint8_t HASH_SECRET[192];

struct InstructionSet {
    const char* name;
    Ops<bf16> bfloat16;
    Ops<float> float32;
    // The maximum of n float32 values, and the sum of e^(value - maximum).
    void (*log_sum_exp)(const float* x, long n, float* peak, float* total);
    void (*sample)(const float* logits, long n, int64_t seed, int64_t position, int64_t* token);
    void (*statistics)(const float* logits, long n, int64_t token, long k, const Statistics& out);
    // Folds the results of `sections` sections per row, and `offered` candidates for the top tokens.
    void (*fold_sections)(const HeadSections&, long count, long sections, long offered, const HeadResults& out);
    // Returns the hash of a piece of more than 240 bytes. Sets `finite` to false if an infinity or a NaN is found.
    uint64_t (*take_piece)(const PieceArgs&, bool* finite);

    const Ops<bf16>& ops(bf16) const { return bfloat16; }
    const Ops<float>& ops(float) const { return float32; }
};

// The log-prob of a logit, from the results of `log_sum_exp` for its row. Computed in double and rounded once.
inline float log_prob(float logit, float peak, float total) {
    return static_cast<float>((static_cast<double>(logit) - peak) - ::log(static_cast<double>(total)));
}

extern const InstructionSet portable, avx2, avx512, avx512_bf16, amx_bf16;

// Calls run(context, task) once for every task in [0, tasks), on all threads of the pool.
void parallel(long tasks, void (*run)(const void* context, long task), const void* context);

template <class Body>
void parallel(long tasks, const Body& body) {
    parallel(tasks, [](const void* context, long task) { (*static_cast<const Body*>(context))(task); }, &body);
}

long num_threads();

// A guard that is held during a call into the library. Only one guard can be held at a time. The call runs on `threads`
// threads, with the default float mode.
class Call {
  public:
    explicit Call(long threads);
    ~Call();
    Call(const Call&) = delete;

  private:
    const unsigned float_mode_;
};

// Held during a call that may run concurrently with a `Call` of another thread. While a `Call` is held, a call of this
// kind uses only the calling thread. If no `Call` is held, a call of this kind uses the threads of the last `Call`.
class CallBeside {
  public:
    CallBeside();
    ~CallBeside();
    CallBeside(const CallBeside&) = delete;
    CallBeside& operator=(const CallBeside&) = delete;

    // Like `parallel`.
    template <class Body>
    void run(long tasks, const Body& body) const {
        if (has_pool_) return parallel(tasks, body);
        for (long task = 0; task < tasks; ++task) body(task);
    }

  private:
    const unsigned float_mode_;
    const bool has_pool_;
};

// Memory of the calling thread for one purpose, aligned to 64 bytes. Valid until the thread requests memory for the
// same purpose again.
enum Purpose {
    INPUT, PRODUCT, ROW, KEYS, QUERIES, SCORES, WEIGHTS, PARTIALS, TAIL, NEXT, AHEAD, TASKS, PARTS, SHARED, FIRST_PARTS,
    RESULTS, BOUNDS, HIDDEN, HIGHEST, TAPS, GATES, UNITS, STATE, DRAFTED, ORDER, ENDS, PIECES, GATHERED,
    INNER, SUMS, NORMED, LOGITS, ROUTES, EXPERT_GATES, RANKS, GROUPS, KEPT, SHARED_SCORES, SHARED_ROWS, MERGED,
    SORTED, SORTING, LEFT, CONVERTED_PANELS, CONVERTED_TABLE, EXPANDED, CODES, TOKEN_CODES,
    CODED_INPUT, CODED_GATHERED, CODED_INNER, PEAKS, EDIT_BOUNDS, TARGETS, TARGET_BOUNDS, MASKS,
    NUM_PURPOSES
};
void* scratch_bytes(Purpose purpose, size_t bytes);

template <class T>
T* scratch(Purpose purpose, long count) {
    return static_cast<T*>(scratch_bytes(purpose, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace trueroll
