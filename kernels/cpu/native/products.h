// Matrix products. A part of kernels.h.
//
// Each element of a product has its own accumulator. For tiles of any shape, the accumulator adds the steps over K in
// order.

// The maximum number of steps of a packed matrix that are multiplied before the next block is read.
constexpr long BLOCK = 128;
// The maximum number of panels in one product, needed for a head of size 512 or a chunk of the vocabulary.
constexpr long MAX_PANELS = 32;

template <int M, int N>
inline void step(F (&acc)[M][N], const float* a, long lda, const float* const* b, long offset) {
    F right[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) right[n] = load(b[n] + offset);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const F left = set1(a[m * lda]);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = fma(left, right[n], acc[m][n]);
    }
}

// Pairs of bfloat16, ready for products.
#ifdef HAS_DOT_BF16
struct Pairs {
    __m512bh v;
};
inline Pairs pairs_of(U pairs) { return {(__m512bh)pairs.v}; }
template <bool IS_ORDINARY, bool IS_EXACT = false>
inline Pairs rounded_to_pairs(F x, F y) { return pairs_of(rounded_pairs<IS_ORDINARY, IS_EXACT>(x, y)); }
inline F add_products(F sums, const Pairs& left, const Pairs& right) {
    return {_mm512_dpbf16_ps(sums.v, left.v, right.v)};
}
#else
inline F lower_half(U pairs) { return floats(shift_left<16>(pairs)); }
inline F upper_half(U pairs) { return floats(bit_and(pairs, set1(0xFFFF0000u))); }

struct Pairs {
    F lower, upper;
};
inline Pairs pairs_of(U pairs) { return {lower_half(pairs), upper_half(pairs)}; }
template <bool IS_ORDINARY, bool IS_EXACT = false>
inline Pairs rounded_to_pairs(F x, F y) {
    if constexpr (IS_EXACT) return {x, y};
    return {upper_half(rounding(x)), upper_half(rounding(y))};
}
inline F add_products(F sums, const Pairs& left, const Pairs& right) {
    return fma(left.upper, right.upper, fma(left.lower, right.lower, sums));
}
#endif

// `pairs(n)`: the step of panel n.
template <int M, int N, class PairsOf>
inline void step_of(F (&acc)[M][N], const bf16* a, long lda, const PairsOf& pairs) {
    Pairs right[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) right[n] = pairs(n);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const Pairs left = pairs_of(set1(word_at(a + m * lda)));
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = add_products(acc[m][n], left, right[n]);
    }
}
template <int M, int N>
inline void step(F (&acc)[M][N], const bf16* a, long lda, const bf16* const* b, long offset) {
    step_of(acc, a, lda, [&](int n) { return pairs_of(load(reinterpret_cast<const uint32_t*>(b[n] + offset))); });
}

// One product: c[m][16 * n + lane] (+)= the sum over the rounds and their steps of a[m] times b[round][n]. `stride`:
// from one step of a panel to the next. `width`: panels in a round. The product also prefetches data for later: at each
// step, the line at next[round][n] + next_offset + step * next_stride. `multiply` passes over the panels once for every
// few rows. All passes share one table `next`, or each pass has its own table, `next_table` entries after the previous
// pass's table.
template <class T>
struct Factors {
    const T* a;
    long lda;
    const T* const* b;
    long width, stride, rounds, steps;
    const T* const* next;
    long next_stride, next_table = 0, next_offset = 0;
};

template <class T, int M, int N>
void tile(const Factors<T>& factors, bool add_to, float* c, long ldc) {
    const auto& [a, lda, b, width, stride, rounds, steps, next, next_stride, next_table, next_offset] = factors;
    F acc[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = set1(0.0f);
    for (long round = 0; round < rounds; ++round) {
        const T *const *panels = b + round * width, *const *later = next + round * width;
        const T* left = a + round * steps * PAIR<T>;
        for (long s = 0; s < steps; ++s) {
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) __builtin_prefetch(later[n] + next_offset + s * next_stride);
            step(acc, left + s * PAIR<T>, lda, panels, s * stride);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            float* out = c + m * ldc + n * LANES;
            store(out, add_to ? add(load(out), acc[m][n]) : acc[m][n]);
        }
}

template <class T>
using Tile = void (*)(const Factors<T>&, bool, float*, long);

// Returns the tile of m rows.
template <class T, int N, int... M>
Tile<T> tile_of(long m, std::integer_sequence<int, M...>) {
    static constexpr Tile<T> tiles[] = {tile<T, M + 1, N>...};
    return tiles[m - 1];
}

// Changes the factors in place and restores them. A copy would have to wait for the stores that just filled the
// factors.
template <class T, int N>
void multiply_panels(Factors<T>& factors, long m, bool add_to, float* c, long ldc) {
    constexpr int MOST = ACCUMULATORS / N;
    const long parts = (m + MOST - 1) / MOST, fewest = m / parts, longer = m % parts;
    const T *const a = factors.a, *const *const next = factors.next;
    const long stride = factors.next_stride;
    const bool shared = factors.next_table == 0;
    // Each tile prefetches its share of the data, so that fetching takes as long as computing.
    const long share = shared ? factors.steps * stride / parts : 0;
    if (shared) factors.next_stride = (stride + parts - 1) / parts;
    for (long i = 0; i < parts; ++i) {
        const long rows = fewest + (i < longer);
        tile_of<T, N>(rows, std::make_integer_sequence<int, MOST>())(factors, add_to, c, ldc);
        factors.a += rows * factors.lda, c += rows * ldc;
        factors.next += factors.next_table, factors.next_offset += share;
    }
    factors.a = a, factors.next = next, factors.next_stride = stride, factors.next_offset = 0;
}

constexpr int WIDE = ACCUMULATORS >= 24 ? 4 : 2, NARROW = ACCUMULATORS >= 12 ? 2 : 1;

// Like `multiply_panels`, for any number of rows m and all panels of a round. Changes the factors.
template <class T>
void multiply(Factors<T>& factors, long m, bool add_to, float* c, long ldc) {
    const long n = factors.width;
    for (long i = 0, width; i < n; i += width) {
        width = m * WIDE <= ACCUMULATORS && n - i >= WIDE ? WIDE : n - i >= NARROW ? NARROW : 1;
        if (width == WIDE)
            multiply_panels<T, WIDE>(factors, m, add_to, c, ldc);
        else if (width == NARROW)
            multiply_panels<T, NARROW>(factors, m, add_to, c, ldc);
        else
            multiply_panels<T, 1>(factors, m, add_to, c, ldc);
        factors.b += width, factors.next += width, c += width * LANES;
    }
}

// The maximum number of rows that `multiply` processes in one pass over its panels. The last pass may include one more
// row.
template <class T>
constexpr long PASS_ROWS = ACCUMULATORS / NARROW;

#ifdef HAS_TILES
#include "isa/tiles_amx.h"
#elif !defined(HAS_DOT_BF16)
// With at least this number of rows, a product first converts both factors to float32. The conversion does not change
// the bits. With AVX2, a tile of float32 factors takes two thirds of the time of a tile that converts the factors at
// each step. Converting a panel takes as long as multiplying the panel with two rows.
constexpr long CONVERTED_ROWS = 3 * PASS_ROWS<bf16>;

// Converts the first n panels of each round. `table`: receives the places of the converted panels.
inline void convert_panels(const Factors<bf16>& factors, long n, float* out, const float** table) {
    const auto& [a, lda, b, width, stride, rounds, steps, next, next_stride, next_table, next_offset] = factors;
    for (long round = 0; round < rounds; ++round)
        for (long i = 0; i < n; ++i) {
            table[round * width + i] = out;
            for (long s = 0; s < steps; ++s, out += 2 * LANES) {
                const U pairs = load(reinterpret_cast<const uint32_t*>(b[round * width + i] + s * stride));
                store(out, lower_half(pairs)), store(out + LANES, upper_half(pairs));
            }
        }
}

template <int N>
void multiply_converted(Factors<bf16>& factors, const float* a, long m, bool add_to, float* c, long ldc) {
    const long width = factors.width, own = factors.rounds * width, columns = 2 * factors.rounds * factors.steps;
    const long tables = factors.next_table > 0 ? (m * N + ACCUMULATORS - 1) / ACCUMULATORS : 1;
    const float** table = scratch<const float*>(CONVERTED_TABLE, own * (1 + tables));
    convert_panels(factors, N, scratch<float>(CONVERTED_PANELS, N * LANES * columns), table);
    for (long i = 0; i < tables * factors.rounds; ++i)
        for (long j = 0; j < N; ++j)
            table[own + i * width + j] = reinterpret_cast<const float*>(factors.next[i * width + j]);
    Factors<float> converted = {
        a, columns, table, width, LANES, factors.rounds, 2 * factors.steps, table + own, factors.next_stride / 4,
        factors.next_table > 0 ? own : 0
    };
    multiply_panels<float, N>(converted, m, add_to, c, ldc);
    factors.b += N, factors.next += N;
}

inline void multiply(Factors<bf16>& factors, long m, bool add_to, float* c, long ldc) {
    if (m < CONVERTED_ROWS) return multiply<bf16>(factors, m, add_to, c, ldc);
    const long n = factors.width, columns = 2 * factors.rounds * factors.steps;
    float* a = scratch<float>(LEFT, m * columns);
    for (long i = 0; i < m; ++i)
        for (long k = 0; k < columns; k += LANES) store(a + i * columns + k, load(factors.a + i * factors.lda + k));
    long i = 0;
    for (; n - i >= NARROW; i += NARROW) multiply_converted<NARROW>(factors, a, m, add_to, c + i * LANES, ldc);
    for (; i < n; ++i) multiply_converted<1>(factors, a, m, add_to, c + i * LANES, ldc);
}
#endif

// The blocks into which the steps of a panel are cut: all equal, so that the last block of a panel is long enough to
// prefetch the first block of the next panel. Each block is summed from zero and added to the sum of the previous
// blocks; AMX instead continues from that sum.
template <class T>
long block_of(long steps) {
    const long blocks = (steps + BLOCK - 1) / BLOCK;
    return round_up((steps + blocks - 1) / blocks, COLUMN_MULTIPLE<T> / PAIR<T>);
}

// As `multiply_all`, for plain panels.
template <class T>
void multiply_plain(
    const T* a, long lda, long m, const Panel<T>* panels, long n, long first, long end, long hop, float* c, long ldc
) {
    constexpr long STRIDE = LANES * PAIR<T>;
    const long block = block_of<T>(end - first), steps = panels->steps();
    for (long start = first; start < end; start += block) {
        const long some = smaller(block, end - start);
        const T *b[MAX_PANELS], *next[MAX_PANELS];
        for (long i = 0; i < n; ++i) {
            b[i] = panels[i].from(start);
            next[i] = start + some < steps ? b[i] + some * STRIDE : reinterpret_cast<const T*>(panels[i].later(hop));
        }
        Factors<T> factors = {a + start * PAIR<T>, lda, b, n, STRIDE, 1, some, next, STRIDE};
        multiply(factors, m, start > first, c, ldc);
    }
}

// As `multiply_all`, for at most EXPANDED_PANELS panels of one quantized format. Each block is expanded to T, and
// multiplied from the cache. The expansion prefetches the next block.
template <class T>
void multiply_expanded(
    const T* a, long lda, long m, const Panel<T>* panels, long n, long first, long end, long hop, float* c, long ldc
) {
    constexpr long STRIDE = LANES * PAIR<T>, MOST = (BLOCK * PAIR<T> + 2 * CODE_COLUMNS) * LANES;
    const long block = block_of<T>(end - first), steps = panels->steps();
    T* expanded = scratch<T>(EXPANDED, EXPANDED_PANELS * MOST);
    for (long start = first; start < end; start += block) {
        const long some = smaller(block, end - start);
        const T* b[EXPANDED_PANELS];
        for (long i = 0; i < n; ++i) {
            const char* next = start + some < steps ? nullptr : panels[i].later(hop);
            b[i] = expand(panels[i], start, start + some, next, expanded + i * MOST);
        }
        Factors<T> factors = {a + start * PAIR<T>, lda, b, n, STRIDE, 1, some, b, 0};
        multiply(factors, m, start > first, c, ldc);
    }
}

// For up to this number of rows, codes are expanded in registers, separately for each tile.
#ifdef HAS_TILES
constexpr long FUSED_ROWS = 0;
#else
constexpr long FUSED_ROWS = ACCUMULATORS >= 24 ? 4 : ACCUMULATORS >= 6 ? 1 : 0;
#endif

// Adds the products of rows with N panels of codes to the accumulators, over `bytes` bytes of each panel.
template <class Element, bool IS_ORDINARY, int M, int N>
inline void step_codes(
    F (&acc)[M][N], const bf16* a, long lda, const uint8_t* const* codes, long bytes, long ahead, const Shared* shared
) {
    F scales[N], zeros[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
        scales[n] = IS_ORDINARY ? mul(shared[n].scales, set1(Element::FACTOR)) : shared[n].scales;
        zeros[n] = shared[n].zeros;
    }
    for (long line = 0; line < bytes; line += LINE) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) __builtin_prefetch(codes[n] + line + ahead);
#pragma GCC unroll 4
        for (long i = line; i < line + LINE; i += Element::BYTES, a += 2)
            step_of(acc, a, lda, [&](int n) {
                F x, y;
                values_of<Element, IS_ORDINARY>(codes[n] + i, scales[n], zeros[n], x, y);
                return rounded_to_pairs<IS_ORDINARY, ARE_EXACT<Element>>(x, y);
            });
    }
}

// As `tile`, for panels of codes over the steps [start, end). `next`: as in `expand`, for the first panel.
template <class Element, int M, int N>
void fused_tile(
    const bf16* a, long lda, const Panel<bf16>* panels, long start, long end, const char* next, bool add_to, float* c,
    long ldc
) {
    const CodePlaces places(panels->format);
    const long first = 2 * start, last = 2 * end;
    const long ahead =
        next == nullptr ? places.codes(last) - places.codes(first) : next - panels->data - places.codes(first);
    F acc[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = set1(0.0f);
    for (long column = first, stop; column < last; column = stop) {
        stop = smaller(last, places.group_end(column));
        const uint8_t* codes[N];
        Shared shared[N];
        bool are_ordinary = true;
        for (int n = 0; n < N; ++n) {
            codes[n] = reinterpret_cast<const uint8_t*>(panels[n].data + places.codes(column));
            shared[n] = Shared(panels[n].format, panels[n].data, panels[n].data + places.shared(column));
            are_ordinary &= shared[n].are_ordinary();
        }
        const long bytes = (stop - column) * places.column_bytes;
        if (are_ordinary)
            step_codes<Element, true>(acc, a + column, lda, codes, bytes, ahead, shared);
        else
            step_codes<Element, false>(acc, a + column, lda, codes, bytes, ahead, shared);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            float* out = c + m * ldc + n * LANES;
            store(out, add_to ? add(load(out), acc[m][n]) : acc[m][n]);
        }
}

template <class Element, int N, int... M>
auto fused_tile_of(long m, std::integer_sequence<int, M...>) {
    static constexpr decltype(&fused_tile<Element, 1, N>) tiles[] = {fused_tile<Element, M + 1, N>...};
    return tiles[m - 1];
}

// As `multiply_all`, for at most FUSED_ROWS rows of bfloat16 and panels of one quantized format.
template <class T>
void multiply_fused(
    const T* a, long lda, long m, const Panel<T>* panels, long n, long first, long end, long hop, float* c, long ldc
) {
    const long block = block_of<T>(end - first), steps = panels->steps();
    with_element(panels->format, [&](auto element) {
        using Element = decltype(element);
        constexpr auto ROWS_OF_TILES = std::make_integer_sequence<int, FUSED_ROWS>();
        for (long start = first; start < end; start += block) {
            const long stop = smaller(end, start + block);
            for (long i = 0, width; i < n; i += width) {
                width = n - i >= WIDE ? WIDE : n - i >= NARROW ? NARROW : 1;
                const auto multiply_some = width == WIDE     ? fused_tile_of<Element, WIDE>(m, ROWS_OF_TILES)
                                           : width == NARROW ? fused_tile_of<Element, NARROW>(m, ROWS_OF_TILES)
                                                             : fused_tile_of<Element, 1>(m, ROWS_OF_TILES);
                const char* next = stop < steps ? nullptr : panels[i].later(hop);
                multiply_some(a, lda, panels + i, start, stop, next, start > first, c + i * LANES, ldc);
            }
        }
    });
}

// As `multiply_all`, for panels of one quantized format.
template <class T>
void multiply_codes(
    const T* a, long lda, long m, const Panel<T>* panels, long n, long first, long end, long hop, float* c, long ldc
) {
    if constexpr (sizeof(T) == 2 && FUSED_ROWS > 0)
        if (m <= FUSED_ROWS) return multiply_fused(a, lda, m, panels, n, first, end, hop, c, ldc);
    multiply_expanded(a, lda, m, panels, n, first, end, hop, c, ldc);
}

// c[m][16 * n] = rows [m, K] times n panels, over the steps [first, end) of all steps. `hop`: the distance from a panel
// to the panel that is read next, in panels.
template <class T>
void multiply_all(
    const Rows<T>& a, long m, const Panel<T>* panels, long n, long first, long end, long hop, float* c, long ldc
) {
    for (long i = 0, width; i < n; i += width) {
        const Format format = panels[i].format;
        const unsigned activations = activations_of(format);
        const bool is_expanded = format != Format::PLAIN && activations != INTEGERS;
        const long most = is_expanded ? smaller(n, i + EXPANDED_PANELS) : n;
        for (width = 1; i + width < most && panels[i + width].format == format;) ++width;
        float* out = c + i * LANES;
        if (activations == INTEGERS) {
            multiply_coded(a.coded, m, panels + i, width, first, end, hop, out, ldc);
            continue;
        }
        const T* left = activations == E4M3_NUMBERS ? a.numbers.data : a.data;
        const auto multiply_some = is_expanded ? multiply_codes<T> : multiply_plain<T>;
        multiply_some(left, a.stride, m, panels + i, width, first, end, hop, out, ldc);
        if (activations == E4M3_NUMBERS) finish_numbers(a.numbers, m, panels + i, width, out, ldc);
    }
}
