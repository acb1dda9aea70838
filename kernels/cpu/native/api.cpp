// The C interface of api.h, and the code that is independent of the instruction set.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "api.h"
#include "common.h"

namespace trueroll {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"); }
#endif

bool has_amx_bf16() {
#if defined(EMULATE_TILES)
    return true;
#elif defined(__x86_64__) && defined(__linux__)
    unsigned a, b, c, d;
    constexpr unsigned BF16_AND_TILES = 1u << 22 | 1u << 24;
    if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & BF16_AND_TILES) != BF16_AND_TILES)
        return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, ...)
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

// All available instruction sets, best first.
std::vector<const InstructionSet*> find_available() {
    std::vector<const InstructionSet*> sets;
#if defined(__x86_64__) || defined(EMULATE_TILES)
    if (has_amx_bf16()) sets.push_back(&amx_bf16);
#endif
#if defined(__x86_64__)
    if (has_avx512_bf16()) sets.push_back(&avx512_bf16);
    if (has_avx512()) sets.push_back(&avx512);
    if (has_avx2()) sets.push_back(&avx2);
#endif
    sets.push_back(&portable);
    return sets;
}

const std::vector<const InstructionSet*>& available() {
    static const std::vector<const InstructionSet*> sets = find_available();
    return sets;
}

const InstructionSet* chosen = available()[0];

#include "masks.h"
#include "filters.h"

template <class T>
T* as(const void* p) { return static_cast<T*>(const_cast<void*>(p)); }

// Calls body(T{}) with T = bf16 or float.
template <class Body>
void with_type(int is_bfloat16, const Body& body) {
    if (is_bfloat16)
        body(bf16{});
    else
        body(0.0f);
}

struct Sizes {
    long heads, kv_heads, head_dim, value_dim, block_size;
    CacheFormat format;

    template <class T>
    Caches<T> caches(const CachePointers& at) const {
        return {as<T>(at.keys), as<T>(at.values), block_size, kv_heads, head_dim, value_dim, format};
    }
};

Sizes sizes_of(const AttentionNumbers& numbers, long block_size) {
    const auto whole = [](double number) { return static_cast<long>(number); };
    const long head_dim = whole(numbers.head_dim);
    const CacheFormat format = static_cast<CacheFormat>(static_cast<int>(numbers.cache_format));
    return {whole(numbers.heads), whole(numbers.kv_heads), head_dim, head_dim, block_size, format};
}

// The window, cap and sinks of attention scores. `window` and `soft_cap`: 0 for none.
struct Scoring {
    float scale;
    long window;
    float soft_cap;
    const void* sinks;  // or null
};

struct Batch {
    long sequences;
    const int64_t *query_starts, *context_lens, *tables;
    long max_blocks;
    const int64_t* ends;
};

// Returns the format with a number of the interface.
template <class Number>
Format format_of(Number number) { return static_cast<Format>(static_cast<int>(number)); }

template <class T>
Input<T> input(const void* x, long count, long columns, const Norm<T>& norm = {}) {
    return {as<const T>(x), count, columns, norm};
}

template <class T>
Norm<T> norm_of(const void* weight, double eps, double zero_centered) {
    return {as<const T>(weight), static_cast<float>(eps), zero_centered != 0.0};
}

template <class T>
QkvArgs<T> qkv_args(
    const Input<T>& x, const AttentionNumbers& numbers, const QkvPointers& from, const double* formats,
    const CachePointers& caches, const RotationPointers& rotation, const int64_t* slots, long block_size
) {
    const Sizes sizes = sizes_of(numbers, block_size);
    QkvArgs<T> args = {};
    args.x = x;
    for (long part = 0; part < 3; ++part) {
        const long heads = numbers.is_gated != 0.0 ? 2 * sizes.heads : sizes.heads;
        const long rows = (part == 0 ? heads : sizes.kv_heads) * sizes.head_dim;
        args.weights[part] = {as<T>(from.weights[part]), rows, x.columns, format_of(formats[part])};
        args.biases[part] = as<const T>(from.biases[part]);
    }
    for (long part = 0; part < 2; ++part)
        args.norms[part] = norm_of<T>(from.norms[part], numbers.norm_eps, numbers.norm_zero_centered);
    args.over_heads = numbers.norm_over_heads != 0.0;
    args.pairs = static_cast<long>(numbers.pairs), args.interleaved = numbers.is_interleaved != 0.0;
    args.cosines = rotation.cosines, args.sines = rotation.sines, args.q_scale = rotation.q_scale, args.slots = slots;
    args.stride = sizes.head_dim;
    args.caches = sizes.caches<T>(caches);
    return args;
}

template <class T>
AttentionArgs<T> attention_args(
    const void* q, const CachePointers& caches, const Sizes& sizes, const Batch& batch, const Scoring& scoring,
    void* out
) {
    AttentionArgs<T> args = {};
    args.q = as<const T>(q), args.out = as<T>(out);
    args.caches = sizes.caches<T>(caches);
    args.heads = sizes.heads, args.sequences = batch.sequences;
    args.query_starts = batch.query_starts, args.context_lens = batch.context_lens;
    args.tables = batch.tables, args.max_blocks = batch.max_blocks, args.ends = batch.ends;
    args.scale = scoring.scale, args.soft_cap = scoring.soft_cap, args.sinks = as<const T>(scoring.sinks);
    args.window = scoring.window > 0 ? scoring.window : NO_WINDOW;
    return args;
}

// The common arguments of all layers of a run, and the buffers between steps.
struct LayerRun {
    long count, k;
    const RotationPointers* rotations;
    long block_size, sequences;
    const int64_t *query_starts, *context_lens, *ends;
    StateBatch states;
    void *projected, *convolved, *gates, *rates, *mixed, *middle, *active, *out;
};

// The arguments of a delta net that reads `x`.
template <class T>
DeltaNetArgs<T> delta_net_args(
    const LayerRun& run, const Input<T>& x, const DeltaNetNumbers& numbers, const DeltaNetPointers& from,
    const double* formats, const MemoryPointers& memory
) {
    const auto whole = [](double number) { return static_cast<long>(number); };
    DeltaNetArgs<T> args = {};
    T *b = as<T>(run.rates), *a = b + run.count * whole(numbers.value_heads);
    args.delta_rule = {
        as<const T>(run.convolved), b, a, as<const T>(from.decay), as<const T>(from.bias), whole(numbers.key_heads),
        whole(numbers.value_heads), whole(numbers.key_dim), whole(numbers.value_dim),
        as<float>(memory.recurrent.states), run.states, as<T>(run.mixed)
    };
    const long channels = args.delta_rule.channels(), heads = args.delta_rule.value_heads;
    const long rows[] = {channels, heads * args.delta_rule.value_dim, heads, heads};
    T* const out[] = {as<T>(run.projected), as<T>(run.gates), b, a};
    for (long i = 0; i < 4; ++i) {
        const Matrix<T> weight = {as<T>(from.inputs[i]), rows[i], x.columns, format_of(formats[i])};
        args.inputs[i] = {x, weight, nullptr, nullptr, out[i]};
    }
    args.convolve = {
        out[0], as<const T>(from.convolution), nullptr, channels, whole(numbers.kernel), as<T>(memory.recurrent.tails),
        run.states, as<T>(run.convolved)
    };
    args.norm = norm_of<T>(from.norm, numbers.norm_eps, numbers.norm_zero_centered);
    return args;
}

Router router_of(const RouterNumbers& numbers) {
    const auto whole = [](double number) { return static_cast<long>(number); };
    const auto single = [](double number) { return static_cast<float>(number); };
    return {
        static_cast<Score>(static_cast<int>(numbers.score)), numbers.is_wide != 0.0, numbers.ranks_scores != 0.0,
        whole(numbers.groups), whole(numbers.kept_groups), whole(numbers.group_best), numbers.is_normed != 0.0,
        single(numbers.eps), single(numbers.floor), single(numbers.scale)
    };
}

// The arguments of a layer's experts that read `x`. `routes`: the place for the experts of the first row, or null.
template <class T>
MixtureArgs<T> mixture_args(
    const LayerRun& run, const Input<T>& x, const LayerNumbers& numbers, const ExpertsPointers& from, int32_t* routes
) {
    const long k = run.k, E = static_cast<long>(numbers.experts), n = static_cast<long>(numbers.intermediate);
    const long shared = static_cast<long>(numbers.shared);
    const auto matrix = [](const void* data, long rows, long columns, double format = 0.0) {
        return Matrix<T>{as<T>(data), rows, columns, format_of(format)};
    };
    const LayerFormats& formats = numbers.formats;
    MixtureArgs<T> args = {};
    args.x = x;
    args.router = matrix(from.router, E, k), args.router_bias = as<const T>(from.router_bias);
    args.routing = router_of(numbers.router), args.correction = static_cast<const float*>(from.correction);
    args.routes = routes, args.has_shared = numbers.has_shared != 0.0;
    const long held = static_cast<long>(numbers.held);
    args.experts.count = run.count, args.experts.experts = held, args.experts.top_k = static_cast<long>(numbers.top_k);
    args.experts.first = static_cast<long>(numbers.first_held);
    args.experts.gate_up = matrix(from.gate_up, held * 2 * n, k, formats.experts[0]);
    args.experts.down = matrix(from.down, held * k, n, formats.experts[1]);
    args.experts.gate_up_bias = as<const T>(from.gate_up_bias);
    args.experts.down_bias = as<const T>(from.down_bias);
    args.experts.activation = static_cast<Activation>(static_cast<int>(numbers.activation));
    args.experts.residual = as<const T>(run.middle), args.experts.out = as<T>(run.out);
    args.shared_gate = matrix(from.shared.gate, shared, k, formats.mlp[0]);
    args.shared_up = matrix(from.shared.up, shared, k, formats.mlp[1]);
    args.shared_down = matrix(from.shared.down, k, shared, formats.mlp[2]);
    args.shared_score = matrix(from.shared_score, 1, k);
    args.active = as<T>(run.active);
    return args;
}

// Sets the arguments of a layer's attention that reads `x`.
template <class T>
void set_attention(
    const LayerRun& run, const Input<T>& x, const AttentionNumbers& numbers, const QkvPointers& from,
    const double* formats, const void* sinks, const CachePointers& caches, const PagePointers& pages, LayerArgs<T>& args
) {
    const Batch batch = {
        run.sequences, run.query_starts, run.context_lens, pages.tables, pages.max_blocks, run.ends
    };
    const RotationPointers& rotation = run.rotations[static_cast<size_t>(numbers.rotation)];
    const Scoring scoring = {
        static_cast<float>(numbers.scale), static_cast<long>(numbers.window), static_cast<float>(numbers.soft_cap),
        sinks
    };
    args.qkv = qkv_args(x, numbers, from, formats, caches, rotation, pages.slots, run.block_size);
    args.qkv.q = as<T>(run.projected), args.qkv.gates = numbers.is_gated != 0.0 ? as<T>(run.gates) : nullptr;
    const Sizes sizes = sizes_of(numbers, run.block_size);
    args.attention = attention_args<T>(run.projected, caches, sizes, batch, scoring, run.mixed);
}

template <class T>
LayerArgs<T> layer_args(
    const LayerRun& run, const void* x, const LayerNumbers& numbers, const LayerPointers& from,
    const MemoryPointers& memory, const PagePointers& pages, int32_t* routes
) {
    const long k = run.k, n = static_cast<long>(numbers.intermediate);
    const auto norm = [&](const void* weight) {
        return norm_of<T>(weight, numbers.norm_eps, numbers.norm_zero_centered);
    };
    const Input<T> before_mixer = input<T>(x, run.count, k, norm(from.mixer_norms[0]));
    const Input<T> before_mlp = input<T>(run.middle, run.count, k, norm(from.mlp_norms[0]));
    const LayerFormats& formats = numbers.formats;
    LayerArgs<T> args = {};
    args.has_delta_net = numbers.has_delta_net != 0.0;
    if (args.has_delta_net)
        args.delta_net = delta_net_args(run, before_mixer, numbers.delta_net, from.delta_net, formats.inputs, memory);
    else
        set_attention(
            run, before_mixer, numbers.attention, from.qkv, formats.inputs, from.sinks, memory.caches, pages, args
        );
    const long width = args.has_delta_net ? args.delta_net.inputs[1].weight.rows
                                          : args.attention.heads * args.attention.caches.head_dim;
    const Matrix<T> o = {as<T>(from.o), k, width, format_of(formats.o)};
    const T* const o_bias = as<const T>(from.o_bias);
    const auto pieces = [&](double length) {
        return Pieces{static_cast<long>(numbers.pieces), static_cast<long>(length)};
    };
    const Input<T> mixed = input<T>(run.mixed, run.count, width);
    args.o = {mixed, o, o_bias, as<const T>(x), as<T>(run.middle), pieces(numbers.o_length)};
    args.o.residual_scale = static_cast<float>(numbers.residual_scale);
    args.after_mixer = norm(from.mixer_norms[1]), args.after_mlp = norm(from.mlp_norms[1]);
    args.has_experts = numbers.experts != 0.0;
    if (args.has_experts) {
        args.mixture = mixture_args(run, before_mlp, numbers, from.experts, routes);
        args.mixture.shared_pieces = pieces(numbers.down_length);
        args.mixture.experts.groups = args.mixture.shared_pieces.count;
        return args;
    }
    const MlpPointers& mlp = from.mlp.matrices;
    const T* biases[3];
    for (long i = 0; i < 3; ++i) biases[i] = as<const T>(from.mlp.biases[i]);
    const Matrix<T> gate = {as<T>(mlp.gate), n, k, format_of(formats.mlp[0])};
    const Matrix<T> up = {as<T>(mlp.up), n, k, format_of(formats.mlp[1])};
    const Matrix<T> down = {as<T>(mlp.down), k, n, format_of(formats.mlp[2])};
    const Activation activation = static_cast<Activation>(static_cast<int>(numbers.activation));
    args.gate_up = {before_mlp, gate, up, activation, as<T>(run.active), {biases[0], biases[1]}};
    const Input<T> active = input<T>(run.active, run.count, n);
    args.down = {active, down, biases[2], as<const T>(run.middle), as<T>(run.out), pieces(numbers.down_length)};
    args.down.residual_scale = args.o.residual_scale;
    return args;
}

template <class T>
void embed(const int64_t* ids, long count, const Matrix<T>& weight, T* out) {
    const long K = weight.columns;
    parallel(count, [&](long row) {
        // Element access like `at`, for a fixed row: the row's part of the offset is computed only once.
        const T* first = &weight.at(ids[row], 0);
        for (long k = 0; k < K; ++k) out[row * K + k] = first[k / PAIR<T> * PAIR<T> * LANES + k % PAIR<T>];
    });
}

// Packs the first steps of a whole panel, in blocks of four, and returns their number. A step is 4 bytes of each row.
// Streaming stores bypass the caches, so the overwritten lines are not loaded first.
template <class T>
long pack_blocks(const T* rows, long columns, T* panel) {
    long step = 0;
#if defined(__SSE2__)
    if (reinterpret_cast<uintptr_t>(panel) % 16 != 0) return 0;
    const auto load = [&](long row) {
        return _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * columns + step * PAIR<T>)));
    };
    for (; (step + 4) * PAIR<T> <= columns; step += 4)
        for (long lane = 0; lane < LANES; lane += 4) {
            __m128 a = load(lane), b = load(lane + 1), c = load(lane + 2), d = load(lane + 3);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            float* out = reinterpret_cast<float*>(panel + (step * LANES + lane) * PAIR<T>);
            _mm_stream_ps(out, a), _mm_stream_ps(out + LANES, b);
            _mm_stream_ps(out + 2 * LANES, c), _mm_stream_ps(out + 3 * LANES, d);
        }
    _mm_sfence();
#endif
    return step;
}

// Packs a plain matrix [rows, columns] and sets the padding to zero. Runs only on the calling thread, so that weights
// can be packed while ops use the thread pool.
template <class T>
void pack(const T* rows, const Matrix<T>& out) {
    const long K = out.columns, steps = out.steps();
    for (long p = 0; p < out.panels(); ++p) {
        T* panel = out.plain_panel(p);
        const bool is_whole = (p + 1) * LANES <= out.rows;
        for (long step = is_whole ? pack_blocks(rows + p * LANES * K, K, panel) : 0; step < steps; ++step)
            for (long lane = 0; lane < LANES; ++lane)
                for (long i = 0; i < PAIR<T>; ++i) {
                    const long row = p * LANES + lane, column = step * PAIR<T> + i;
                    panel[(step * LANES + lane) * PAIR<T> + i] =
                        row < out.rows && column < K ? rows[row * K + column] : T{};
                }
    }
}

// Infinities and NaN have all exponent bits set. Adding the lowest exponent bit to an infinity or NaN therefore carries
// into the sign bit.
template <class T>
bool are_finite(const T* values, long count) {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    constexpr Bits SIGN = static_cast<Bits>(1u << (8 * sizeof(T) - 1));
    constexpr Bits EXPONENT = sizeof(T) == 2 ? 0x7F80 : 0x7F800000, LOWEST = EXPONENT & -EXPONENT;
    Bits carried = 0;
    for (long i = 0; i < count; ++i) {
        Bits bits;
        memcpy(&bits, values + i, sizeof(bits));
        carried |= static_cast<Bits>((bits & EXPONENT) + LOWEST);
    }
    return !(carried & SIGN);
}

constexpr long PIECE_STEP = 1 << 18;  // stays in a core's cache

long take_piece(const PieceArgs& args, bool* finite) {
    *finite = true;
    return static_cast<long>(chosen->take_piece(args, finite));
}

template <class T>
void unpack(const Matrix<T>& matrix, T* rows) {
    for (long row = 0; row < matrix.rows; ++row)
        for (long k = 0; k < matrix.columns; ++k) rows[row * matrix.columns + k] = matrix.at(row, k);
}

}  // namespace

// The default secret of XXH3.
const uint8_t HASH_SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

bool meet(RankExchange& ranks) {
    // A rank spins briefly before it yields, since ranks may share a core.
    constexpr long STRIDE = 64 / sizeof(int64_t), SPINS_BEFORE_YIELD = 64, SPINS_BEFORE_CHECK = 20'000;
    const int64_t turn = ++ranks.turn;
    __atomic_store_n(ranks.counters + ranks.rank * STRIDE, turn, __ATOMIC_RELEASE);
    using Clock = std::chrono::steady_clock;
    const Clock::time_point started = Clock::now();
    for (long spin = 1;; ++spin) {
        long arrived = 0;
        while (arrived < ranks.size && __atomic_load_n(ranks.counters + arrived * STRIDE, __ATOMIC_ACQUIRE) >= turn)
            ++arrived;
        if (arrived == ranks.size) {
            ranks.waited_ns += std::chrono::nanoseconds(Clock::now() - started).count();
            return true;
        }
        if (spin % SPINS_BEFORE_YIELD == 0) std::this_thread::yield();
        if (spin % SPINS_BEFORE_CHECK == 0 && ranks.check() != 0) {
            ranks.has_failed = 1;
            return false;
        }
    }
}

extern "C" {

const char* trueroll_isa_at(long i) {
    return i < static_cast<long>(available().size()) ? available()[static_cast<size_t>(i)]->name : nullptr;
}

const char* trueroll_declarations() { return INTERFACE_TEXT; }

const char* trueroll_isa() { return chosen->name; }

int trueroll_set_isa(const char* name) {
    for (const InstructionSet* set : available())
        if (std::strcmp(set->name, name) == 0) {
            chosen = set;
            return 1;
        }
    return 0;
}

int trueroll_meet(RankExchange* ranks) { return meet(*ranks) ? 1 : 0; }

void trueroll_pack(int bfloat16, const void* rows, void* packed, long n, long k) {
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        pack(as<const T>(rows), Matrix<T>{as<T>(packed), n, k});
    });
}

long trueroll_take_bytes(const void* data, long bytes, int infinity, void* target, bool* finite) {
    const auto write = [](const void* to, const uint8_t* from, long start, long end) {
        if (to != nullptr) memcpy(as<uint8_t>(to) + start, from + start, static_cast<size_t>(end - start));
    };
    return take_piece({static_cast<const uint8_t*>(data), bytes, PIECE_STEP, infinity, target, write}, finite);
}

long trueroll_take_rows(int bfloat16, const void* rows, long n, long k, int infinity, void* packed, bool* finite) {
    long hash = 0;
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const Matrix<T> out{as<T>(packed), n, k};
        const long panel_bytes = LANES * k * static_cast<long>(sizeof(T));
        const long step = std::max(1L, PIECE_STEP / panel_bytes) * panel_bytes;
        const auto write = [](const void* to, const uint8_t* from, long start, long end) {
            const Matrix<T>& whole = *static_cast<const Matrix<T>*>(to);
            const long row_bytes = whole.columns * static_cast<long>(sizeof(T)), first = start / row_bytes;
            const Matrix<T> part{whole.plain_panel(first / LANES), (end - start) / row_bytes, whole.columns};
            pack(reinterpret_cast<const T*>(from + start), part);
        };
        const long bytes = n * k * static_cast<long>(sizeof(T));
        hash = take_piece({static_cast<const uint8_t*>(rows), bytes, step, infinity, &out, write}, finite);
    });
    return hash;
}

void trueroll_unpack(int bfloat16, const void* packed, void* rows, long n, long k) {
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        unpack(Matrix<T>{as<T>(packed), n, k}, as<T>(rows));
    });
}

void trueroll_merge(
    int bfloat16, const void* weight, long n, long k, const float* a, const float* b, long rank, float scale, void* out
) {
    const CallBeside call;
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const MergeArgs<T> args{as<const T>(weight), n, k, a, b, rank, scale, as<T>(out)};
        call.run(round_up(n, LANES) / LANES, [&](long panel) {
            chosen->ops(type).merge(args.panel(panel, args.out + panel * LANES * k));
        });
    });
}

void trueroll_merge_into(
    int bfloat16, const void* weight, long n, long k, const float* a, const float* b, long rank, float scale,
    void* packed, bool* finite
) {
    const CallBeside call;
    std::atomic<bool> is_finite{true};
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const Matrix<T> whole{as<T>(packed), n, k};
        const MergeArgs<T> args{as<const T>(weight), n, k, a, b, rank, scale, nullptr};
        call.run(whole.panels(), [&](long panel) {
            T* merged = scratch<T>(MERGED, LANES * k);
            const MergeArgs<T> rows = args.panel(panel, merged);
            chosen->ops(type).merge(rows);
            if (!are_finite(merged, rows.rows * k)) is_finite = false;
            pack(merged, Matrix<T>{whole.plain_panel(panel), rows.rows, k});
        });
    });
    *finite = is_finite;
}

void trueroll_embedding(
    long threads, int bfloat16, const int64_t* ids, long count, const void* w, long n, long k, void* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        embed(ids, count, Matrix<T>{as<T>(w), n, k}, as<T>(out));
    });
}

void trueroll_linear(
    long threads, int bfloat16, const void* x, long count, long k, const void* w, int format, long n, const void* bias,
    const void* residual, long pieces, long length, void* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const Matrix<T> weight = {as<T>(w), n, k, format_of(format)};
        const Input<T> rows = input<T>(x, count, k);
        const LinearArgs<T> args = {
            rows, weight, as<const T>(bias), as<const T>(residual), as<T>(out), {pieces, length}
        };
        chosen->ops(type).linear(args);
    });
}

void trueroll_head_linear(
    long threads, int bfloat16, const void* x, long count, long heads, long k, const void* w, long n, void* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        chosen->ops(type).head_linear({as<const T>(x), count, heads, {as<T>(w), heads * n, k}, as<T>(out)});
    });
}

void trueroll_back_sums(
    long threads, int bfloat16, const void* x, long count, long k, const void* w, int format, long n, long pieces,
    long length, const float* peaks, float* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const Matrix<T> weight = {as<T>(w), n, k, format_of(format)};
        LinearArgs<T> args = {input<T>(x, count, k), weight, nullptr, nullptr, nullptr, {pieces, length}};
        args.sums = out, args.peaks = peaks;
        chosen->ops(type).linear(args);
    });
}

void trueroll_logits(
    long threads, int bfloat16, const void* x, long count, long k, const void* w, long n, float scale, float soft_cap,
    float* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        chosen->ops(type).logits(input<T>(x, count, k), {as<T>(w), n, k}, {scale, soft_cap}, out);
    });
}

void trueroll_gate_up(
    long threads, int bfloat16, const void* x, long count, long k, const void* gate, int gate_format, const void* up,
    int up_format, long n, int activation, void* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const Matrix<T> weights[2] = {
            {as<T>(gate), n, k, format_of(gate_format)}, {as<T>(up), n, k, format_of(up_format)}
        };
        const Activation function = static_cast<Activation>(activation);
        chosen->ops(type).gate_up({input<T>(x, count, k), weights[0], weights[1], function, as<T>(out)});
    });
}

void trueroll_qkv(
    long threads, int bfloat16, const void* x, long count, long k, const AttentionNumbers* numbers,
    const QkvPointers* weights, int q_format, int k_format, int v_format, void* keys, void* values,
    const float* cosines, const float* sines, const float* q_scale, const int64_t* slots, long block_size, void* q
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const CachePointers caches = {keys, values};
        const Input<T> rows = input<T>(x, count, k);
        const RotationPointers rotation = {cosines, sines, q_scale};
        const double formats[3] = {1.0 * q_format, 1.0 * k_format, 1.0 * v_format};
        QkvArgs<T> args = qkv_args(rows, *numbers, *weights, formats, caches, rotation, slots, block_size);
        args.q = as<T>(q);
        if (numbers->is_gated != 0.0) args.gates = args.q + args.stride, args.stride *= 2;
        chosen->ops(type).qkv(args);
    });
}

void trueroll_write_kv(
    long threads, int bfloat16, const void* k, const void* v, const int64_t* slots, long count, void* keys, void* values,
    int format, long block_size, long kv_heads, long head_dim, long value_dim
) {
    const Call call(threads);
    const Sizes sizes = {kv_heads, kv_heads, head_dim, value_dim, block_size, static_cast<CacheFormat>(format)};
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        chosen->ops(type).write_kv(sizes.caches<T>({keys, values}), as<const T>(k), as<const T>(v), slots, count);
    });
}

void trueroll_attention(
    long threads, int bfloat16, const void* q, const void* keys, const void* values, int format, long heads,
    long kv_heads, long head_dim, long value_dim, long block_size, long sequences, const int64_t* query_starts,
    const int64_t* context_lens, const int64_t* tables, long max_blocks, const int64_t* ends, float scale, long window,
    float soft_cap, const void* sinks, void* out
) {
    const Call call(threads);
    const Sizes sizes = {heads, kv_heads, head_dim, value_dim, block_size, static_cast<CacheFormat>(format)};
    const Batch batch = {sequences, query_starts, context_lens, tables, max_blocks, ends};
    const Scoring scoring = {scale, window, soft_cap, sinks};
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        chosen->ops(type).attention(attention_args<T>(q, {keys, values}, sizes, batch, scoring, out));
    });
}

void trueroll_layers(
    long threads, int bfloat16, const void* x, long count, long k, const LayerNumbers* numbers,
    const LayerPointers* weights, const MemoryPointers* memories, const PagePointers* pages, long num_layers,
    const RotationPointers* rotations, long block_size, long sequences, const int64_t* query_starts,
    const int64_t* context_lens, const int64_t* ends, const int64_t* reads, const int64_t* writes, int32_t* routes,
    void* projected, void* convolved, void* gates, void* rates, void* mixed, void* middle, void* active, void* out,
    RankExchange* ranks
) {
    const Call call(threads);
    const StateBatch states = {sequences, query_starts, reads, writes, nullptr};
    const LayerRun run = {
        count, k, rotations, block_size, sequences, query_starts, context_lens, ends, states, projected, convolved,
        gates, rates, mixed, middle, active, out
    };
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        std::vector<LayerArgs<T>> args;
        args.reserve(static_cast<size_t>(num_layers));
        int32_t* next = routes;
        for (long i = 0; i < num_layers; ++i) {
            const void* from = i == 0 ? x : out;
            args.push_back(layer_args<T>(run, from, numbers[i], weights[i], memories[i], pages[i], next));
            if (next != nullptr) next += count * static_cast<long>(numbers[i].top_k);
        }
        chosen->ops(type).layers(args.data(), num_layers, ranks);
    });
}

void trueroll_head_sections(
    long threads, int bfloat16, const void* hidden, long columns, const void* w, long n, float scale, float soft_cap,
    long first, long count,
    const int64_t* rows, const float* temperatures, const uint8_t* raw, const int64_t* seeds,
    const int64_t* positions, const int64_t* targets, SectionResult* sections, int has_statistics, long k,
    float* top_values, int64_t* top_ids, const HeadEdits* edits
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const HeadArgs<T> args = {
            as<const T>(hidden), {as<T>(w), n, columns}, {scale, soft_cap}, first, count, rows, temperatures, raw, seeds, positions,
            targets, has_statistics != 0, k, edits
        };
        chosen->ops(type).head_sections(args, {sections, top_values, top_ids});
    });
}

void trueroll_fold_sections(
    long threads, long count, long num_sections, const SectionResult* sections, long offered, const float* values,
    const int64_t* ids, int64_t* tokens, float* logprobs, uint8_t* finite, long k, float* entropies, int64_t* top_ids,
    float* top_logprobs, const HeadEdits* edits, float* target_logprobs
) {
    const Call call(threads);
    const HeadSections from = {
        const_cast<SectionResult*>(sections), const_cast<float*>(values), const_cast<int64_t*>(ids)
    };
    const HeadResults out = {
        tokens, logprobs, finite, k, entropies, top_ids, top_logprobs, edits, target_logprobs
    };
    chosen->fold_sections(from, count, num_sections, offered, out);
}

void trueroll_rmsnorm(
    long threads, int bfloat16, const void* x, long count, long k, const void* weight, float eps,
    int zero_centered, void* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        chosen->ops(type).rmsnorm(input<T>(x, count, k, norm_of<T>(weight, eps, zero_centered)), as<T>(out), k);
    });
}

void trueroll_gate_mul(
    long threads, int bfloat16, const void* gate, const void* up, long count, int activation, void* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const Activation function = static_cast<Activation>(activation);
        chosen->ops(type).gate_mul(as<const T>(gate), as<const T>(up), function, count, as<T>(out));
    });
}

void trueroll_convolve(
    long threads, int bfloat16, const void* x, long, long k, const void* weight, const void* bias, long kernel,
    void* tails, long sequences, const int64_t* starts, const int64_t* reads, const int64_t* writes,
    const int64_t* drafted, void* out
) {
    const Call call(threads);
    const StateBatch batch = {sequences, starts, reads, writes, drafted};
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        chosen->ops(type).convolve(
            {as<const T>(x), as<const T>(weight), as<const T>(bias), k, kernel, as<T>(tails), batch, as<T>(out)}
        );
    });
}

void trueroll_delta_rule(
    long threads, int bfloat16, const void* qkv, const void* b, const void* a, const void* decay, const void* bias,
    long key_heads, long value_heads, long key_dim, long value_dim, float* states, long sequences,
    const int64_t* starts, const int64_t* reads, const int64_t* writes, const int64_t* drafted, void* out
) {
    const Call call(threads);
    const StateBatch batch = {sequences, starts, reads, writes, drafted};
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        chosen->ops(type).delta_rule(
            {as<const T>(qkv), as<const T>(b), as<const T>(a), as<const T>(decay), as<const T>(bias), key_heads,
             value_heads, key_dim, value_dim, states, batch, as<T>(out)}
        );
    });
}

void trueroll_state_space(
    long threads, int bfloat16, const void* xbc, const void* steps, const void* decay, const void* bias,
    const void* skip, float least, float most, long groups, long heads, long state_dim, long head_dim, float* states,
    long sequences, const int64_t* starts, const int64_t* reads, const int64_t* writes, const int64_t* drafted,
    void* out
) {
    const Call call(threads);
    const StateBatch batch = {sequences, starts, reads, writes, drafted};
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        chosen->ops(type).state_space(
            {as<const T>(xbc), as<const T>(steps), as<const T>(decay), as<const T>(bias), as<const T>(skip), least,
             most, groups, heads, state_dim, head_dim, states, batch, as<T>(out)}
        );
    });
}

void trueroll_route(
    long threads, int bfloat16, const void* logits, long count, long experts, long top_k, const void* router,
    const float* correction, int is_replayed, int32_t* ids, float* gates
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const Router routing = router_of(*static_cast<const RouterNumbers*>(router));
        chosen->ops(type).route(
            {as<const T>(logits), count, experts, top_k, routing, correction, is_replayed != 0, ids, gates}
        );
    });
}

void trueroll_experts(
    long threads, int bfloat16, const void* x, long count, long k, const void* gate_up, const void* gate_up_bias,
    const void* down, const void* down_bias, int gate_up_format, int down_format, long experts, long n, long top_k,
    int gated, int activation,
    const int32_t* ids, const float* gates, const void* shared, long groups, void* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const long rows = experts * (gated != 0 ? 2 : 1) * n;
        const Matrix<T> inner = {as<T>(gate_up), rows, k, format_of(gate_up_format)};
        const Matrix<T> outer = {as<T>(down), experts * k, n, format_of(down_format)};
        const Activation function = static_cast<Activation>(activation);
        chosen->ops(type).experts(
            {as<const T>(x), count, inner, outer, as<const T>(gate_up_bias), as<const T>(down_bias), experts, top_k,
             function, ids, gates, as<const T>(shared), nullptr, as<T>(out), groups, 0, nullptr, gated != 0}
        );
    });
}

void trueroll_expert_sums(
    long threads, int bfloat16, const void* x, long count, long k, const void* gate_up, const void* gate_up_bias,
    const void* down, const void* down_bias, int gate_up_format, int down_format, long first, long experts, long n,
    long top_k, int gated, int activation,
    const int32_t* ids, const float* gates, long groups, float* out
) {
    const Call call(threads);
    with_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        const long rows = experts * (gated != 0 ? 2 : 1) * n;
        const Matrix<T> inner = {as<T>(gate_up), rows, k, format_of(gate_up_format)};
        const Matrix<T> outer = {as<T>(down), experts * k, n, format_of(down_format)};
        chosen->ops(type).experts(
            {as<const T>(x), count, inner, outer, as<const T>(gate_up_bias), as<const T>(down_bias), experts, top_k,
             static_cast<Activation>(activation), ids, gates, nullptr, nullptr, nullptr, groups, first, out, gated != 0}
        );
    });
}

void trueroll_rotation(
    long threads, const int64_t* positions, long count, const float* inv_freq, long half, float scale, float* cosines,
    float* sines
) {
    const Call call(threads);
    parallel(count, [&](long row) {
        for (long i = 0; i < half; ++i) {
            const float angle = static_cast<float>(positions[row]) * inv_freq[i];
            cosines[row * half + i] = std::cos(angle) * scale;
            sines[row * half + i] = std::sin(angle) * scale;
        }
    });
}

void trueroll_log_probs(
    long threads, const float* logits, long count, long n, const int64_t* tokens, long k, float* out
) {
    const Call call(threads);
    parallel(count, [&](long row) {
        float peak, total;
        chosen->log_sum_exp(logits + row * n, n, &peak, &total);
        for (long i = row * k; i < (row + 1) * k; ++i) {
            out[i] = log_prob(logits[row * n + tokens[i]], peak, total);
        }
    });
}

void trueroll_token_statistics(
    long threads, const float* logits, long count, long n, const int64_t* tokens, long k, float* log_probs,
    float* entropies, int64_t* top_ids, float* top_log_probs
) {
    const Call call(threads);
    parallel(count, [&](long row) {
        const Statistics out = {log_probs + row, entropies + row, top_ids + row * k, top_log_probs + row * k};
        chosen->statistics(logits + row * n, n, tokens[row], k, out);
    });
}

void trueroll_sample(
    long threads, const float* logits, long count, long n, const int64_t* seeds, const int64_t* positions, int64_t* out
) {
    const Call call(threads);
    parallel(count, [&](long row) { chosen->sample(logits + row * n, n, seeds[row], positions[row], out + row); });
}

void trueroll_mask_logits(
    long threads, float* logits, long n, const int64_t* rows, long count, const uint32_t* masks
) {
    const Call call(threads);
    const long words = round_up(n, MASK_BITS) / MASK_BITS;
    parallel(count, [&](long i) { mask_row(logits + rows[i] * n, n, masks + i * words); });
}

void trueroll_filter(
    long threads, float* logits, long count, long n, const int64_t* top_k, const float* top_p, const float* min_p,
    float* sums, uint8_t* bits
) {
    const Call call(threads);
    parallel(count, [&](long row) {
        const Kept kept = {sums + 2 * row, bits + row * (round_up(n, 8) / 8)};
        const Filters filters = {top_k[row], top_p[row], min_p[row]};
        filter_row(logits + row * n, n, filters, bits == nullptr ? nullptr : &kept);
    });
}

void trueroll_log_probs_of(long count, const float* logits, const float* sums, float* out) {
    for (long i = 0; i < count; ++i) out[i] = log_prob(logits[i], sums[2 * i], sums[2 * i + 1]);
}

}  // extern "C"
}  // namespace trueroll
