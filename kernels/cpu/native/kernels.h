// The ops, written once over 16 lanes. Each isa_*.cpp includes this file in a namespace of its own, after the vector
// type F (16 float32), the integer type U (16 uint32) and ACCUMULATORS, the number of F that fit into registers beside
// the operands of a product.
//
// Why a row's result does not depend on other rows: whatever the shape of a tile, each element of a product has an
// accumulator of its own, to which the steps over K are added in order; every KB bytes of K the accumulator starts
// from zero and is then added to the sum. Everything else is computed row by row.

// ---- Numbers.

template <class T>
inline F rounded(F x);
template <>
inline F rounded<float>(F x) { return x; }

// The upper half of each float32, rounded to nearest even, in the lower half of the result.
inline U bf16_bits(F x) {
    const U raw = bits(x);
    const U even = bit_and(shift_right<16>(raw), set1(1u));
    const U nearest = shift_right<16>(add(raw, add(even, set1(0x7FFFu))));
    return select_nan(x, set1(0x7FC0u), nearest);
}
template <>
inline F rounded<bf16>(F x) { return floats(shift_left<16>(bf16_bits(x))); }
inline void store(bf16* p, F x) { store_halves(p, bf16_bits(x)); }

// The first n values; the other lanes are 0.
template <class T>
inline F load(const T* p, long n) {
    if (n >= LANES) return load(p);
    T part[LANES] = {};
    memcpy(part, p, static_cast<size_t>(n) * sizeof(T));
    return load(static_cast<const T*>(part));
}
template <class T>
inline void store(T* p, F x, long n) {
    if (n >= LANES) return store(p, x);
    T part[LANES];
    store(static_cast<T*>(part), x);
    memcpy(p, part, static_cast<size_t>(n) * sizeof(T));
}

template <class Fold>
inline float fold_lanes(F x, Fold fold) {
    float lanes[LANES];
    store(lanes, x);
    for (long half = LANES / 2; half > 0; half /= 2)
        for (long i = 0; i < half; ++i) lanes[i] = fold(lanes[i], lanes[i + half]);
    return lanes[0];
}
inline float sum(F x) {
    return fold_lanes(x, [](float a, float b) { return a + b; });
}
inline float peak(F x) {
    return fold_lanes(x, [](float a, float b) { return a > b ? a : b; });
}

// e^x to about one unit in the last place: x = n ln 2 + r, and e^r by its Taylor polynomial to the 7th power.
inline F exp(F x) {
    const F n = round(max(set1(-200.0f), min(set1(200.0f), mul(x, set1(1.44269504f)))));
    const F r = fma(n, set1(-1.42860677e-6f), fma(n, set1(-0.693145752f), x));
    F p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(mul(r, r), p, r);
    const F result = times_power_of_2(add(set1(1.0f), p), n);
    return select_greater(set1(-150.0f), x, set1(0.0f), select_greater(x, set1(150.0f), set1(INFINITY), result));
}

// ln x for normal x > 0: x = 2^n m with m in [sqrt(1/2), sqrt(2)), and ln m = 2 atanh((m - 1) / (m + 1)).
inline F log(F x) {
    const U shifted = sub(bits(x), set1(0x3F3504F3u));
    // The exponent with its sign: an arithmetic shift of 32 bits, by way of an offset.
    const F n = sub(convert_unsigned(shift_right<23>(add(shifted, set1(0x40000000u)))), set1(128.0f));
    const F m = floats(add(bit_and(shifted, set1(0x007FFFFFu)), set1(0x3F3504F3u)));
    const F f = sub(m, set1(1.0f));
    const F s = div(f, add(set1(2.0f), f)), z = mul(s, s);
    F p = set1(2.0f / 11);
    p = fma(p, z, set1(2.0f / 9));
    p = fma(p, z, set1(2.0f / 7));
    p = fma(p, z, set1(2.0f / 5));
    p = fma(p, z, set1(2.0f / 3));
    // 2 atanh(s) = 2 s + s z p, and 2 s = f - s f: small terms first, so that the leading one is rounded last.
    const F small = fma(n, set1(-1.42860677e-6f), mul(s, sub(mul(z, p), f)));
    return fma(n, set1(0.693148613f), add(f, small));
}

// -ln(1 - u) for u in (0, 1), with its full resolution for small u: 1 - u is rounded to y, and the log of y corrected
// by what the rounding lost.
inline F exponential(F u) {
    const F y = sub(set1(1.0f), u);
    const F lost = sub(sub(set1(1.0f), y), u);
    return sub(div(sub(set1(0.0f), lost), y), log(y));
}

// ---- Matrix products.

constexpr long KB = 512, MAX_PANELS = 32;

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

inline uint32_t pair_at(const bf16* p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return pair;
}

#ifdef HAS_DOT_BF16
template <int M, int N>
inline void step(F (&acc)[M][N], const bf16* a, long lda, const bf16* const* b, long offset) {
    __m512bh right[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) right[n] = (__m512bh)_mm512_loadu_si512(b[n] + offset);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const __m512bh left = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair_at(a + m * lda)));
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n].v = _mm512_dpbf16_ps(acc[m][n].v, left, right[n]);
    }
}
#else
inline F lower_half(U pairs) { return floats(shift_left<16>(pairs)); }
inline F upper_half(U pairs) { return floats(bit_and(pairs, set1(0xFFFF0000u))); }

template <int M, int N>
inline void step(F (&acc)[M][N], const bf16* a, long lda, const bf16* const* b, long offset) {
    F right[N][2];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
        const U pairs = load(reinterpret_cast<const uint32_t*>(b[n] + offset));
        right[n][0] = lower_half(pairs), right[n][1] = upper_half(pairs);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const U pair = set1(pair_at(a + m * lda));
        const F left[2] = {lower_half(pair), upper_half(pair)};
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = fma(left[1], right[n][1], fma(left[0], right[n][0], acc[m][n]));
    }
}
#endif

// One product: c[m][16 * n + lane] (+)= sum over the steps of a[m] times b[n]. `stride`: from one step of a panel to
// the next. Meanwhile fetches for each panel what will be read afterwards: one line a step at `next[n]`, `next_stride`
// apart.
template <class T>
struct Factors {
    const T* a;
    long lda;
    const T* const* b;
    long stride, steps;
    const T* const* next;
    long next_stride;
};

template <class T, int M, int N>
void tile(const Factors<T>& factors, bool add_to, float* c, long ldc) {
    const auto [a, lda, b, stride, steps, next, next_stride] = factors;
    F acc[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = set1(0.0f);
    for (long s = 0; s < steps; ++s) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) __builtin_prefetch(next[n] + s * next_stride);
        step(acc, a + s * PAIR<T>, lda, b, s * stride);
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

// The tile of M rows, by M - 1.
template <class T, int N, int... M>
Tile<T> tile_of(long m, std::integer_sequence<int, M...>) {
    static constexpr Tile<T> tiles[] = {tile<T, M + 1, N>...};
    return tiles[m - 1];
}

template <class T, int N>
void multiply_panels(Factors<T> factors, long m, bool add_to, float* c, long ldc) {
    constexpr int MOST = ACCUMULATORS / N;
    const long parts = (m + MOST - 1) / MOST;
    const T* const* next = factors.next;
    const T* once[N];
    for (long i = 0; i < parts; ++i) {
        const long rows = m / parts + (i < m % parts);
        // With several tiles, each of the first fetches what follows one of the panels.
        if (parts > 1)
            for (int n = 0; n < N; ++n) once[n] = i < N ? next[i] : factors.b[n];
        if (parts > 1) factors.next = once;
        tile_of<T, N>(rows, std::make_integer_sequence<int, MOST>())(factors, add_to, c, ldc);
        factors.a += rows * factors.lda, c += rows * ldc;
    }
}

constexpr int WIDE = ACCUMULATORS >= 24 ? 4 : 2, NARROW = ACCUMULATORS >= 12 ? 2 : 1;

// The same for any number of rows m and panels n.
template <class T>
void multiply(Factors<T> factors, long m, long n, bool add_to, float* c, long ldc) {
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

#ifdef HAS_TILES
#include "tiles_amx.h"
#endif

// c[m][16 * n] = rows [m, K] times n panels of a packed matrix with `steps` steps. `hop`: how far behind a panel stands
// the one that will be read after it.
template <class T>
void multiply_all(
    const T* a, long lda, long m, const T* const* panels, long n, long steps, long hop, float* c, long ldc
) {
    constexpr long STRIDE = LANES * PAIR<T>, BLOCK = KB / static_cast<long>(sizeof(T)) / PAIR<T>;
    for (long start = 0; start < steps; start += BLOCK) {
        const T *b[MAX_PANELS], *next[MAX_PANELS];
        for (long i = 0; i < n; ++i) {
            b[i] = panels[i] + start * STRIDE;
            next[i] = start + BLOCK < steps ? b[i] + BLOCK * STRIDE : panels[i] + hop;
        }
        const long some = smaller(BLOCK, steps - start);
        multiply(Factors<T>{a + start * PAIR<T>, lda, b, STRIDE, some, next, STRIDE}, m, n, start > 0, c, ldc);
    }
}

// ---- Norms, and inputs of products.

// x over its root mean square, rounded, times weight; all float32 and of `n` values.
template <class T, class Load>
inline float inverse_rms(long n, float eps, const Load& at) {
    F squares = set1(0.0f);
    for (long i = 0; i < n; i += LANES) {
        const F x = at(i);
        squares = fma(x, x, squares);
    }
    return 1.0f / sqrtf(sum(squares) / static_cast<float>(n) + eps);
}

template <class T>
void normalize(const T* x, long n, const T* weight, float eps, T* out) {
    const F scale = set1(inverse_rms<T>(n, eps, [&](long i) { return load(x + i, n - i); }));
    for (long i = 0; i < n; i += LANES) {
        const F normed = rounded<T>(mul(load(x + i, n - i), scale));
        store(out + i, mul(normed, load(weight + i, n - i)), n - i);
    }
}

constexpr long NORM_ROWS = 16;

template <class T>
void rmsnorm(const Input<T>& x, T* out, long stride) {
    parallel(round_up(x.count, NORM_ROWS) / NORM_ROWS, [&](long task) {
        for (long row = task * NORM_ROWS; row < smaller(x.count, (task + 1) * NORM_ROWS); ++row)
            normalize(x.data + row * x.columns, x.columns, x.norm, x.eps, out + row * stride);
    });
}

template <class T>
void rmsnorm_rows(const Input<T>& x, T* out) { rmsnorm(x, out, x.columns); }

// The rows of a product's left side: normed, and filled up with zeros to whole steps.
template <class T>
struct Left {
    const T* data;
    long stride;

    explicit Left(const Input<T>& x) : data(x.data), stride(round_up(x.columns, COLUMN_MULTIPLE<T>)) {
        if (x.norm == nullptr && stride == x.columns) return;
        T* rows = scratch<T>(INPUT, x.count * stride);
        if (x.norm != nullptr) rmsnorm(x, rows, stride);
        for (long i = 0; i < x.count; ++i) {
            T* row = rows + i * stride;
            if (x.norm == nullptr) memcpy(row, x.data + i * x.columns, static_cast<size_t>(x.columns) * sizeof(T));
            memset(row + x.columns, 0, static_cast<size_t>(stride - x.columns) * sizeof(T));
        }
        data = rows;
    }
};

constexpr long ROWS = 96;

// Cuts the product of rows [count, K] and `groups` groups of columns into tasks, and calls body(first row, number of
// rows, group) for each.
template <class Body>
void for_tiles(long count, long groups, const Body& body) {
    const long chunks = round_up(count, ROWS) / ROWS;
    parallel(chunks * groups, [&](long task) {
        const long chunk = task / groups;
        const long start = count * chunk / chunks, end = count * (chunk + 1) / chunks;
        body(start, end - start, task % groups);
    });
}

// Few rows wait for memory and want fewer, longer tasks; many rows want tasks that divide evenly.
inline long panels_in_group(long count) { return count > ACCUMULATORS / 4 ? 2 : 4; }

// From a panel to the one that the same thread will most likely read next, if tasks have `width` panels each.
template <class T>
long hop(const Matrix<T>& weight, long width) { return num_threads() * width * (weight.panel(1) - weight.panel(0)); }

template <class T>
void linear(const LinearArgs<T>& args) {
    const Left<T> left(args.x);
    const long N = args.weight.rows, panels = args.weight.panels(), width = panels_in_group(args.x.count);
    for_tiles(args.x.count, round_up(panels, width) / width, [&](long start, long rows, long group) {
        const long first = group * width, n = smaller(width, panels - first), ldc = n * LANES;
        const T* b[MAX_PANELS];
        for (long i = 0; i < n; ++i) b[i] = args.weight.panel(first + i);
        float* c = scratch<float>(PRODUCT, rows * ldc);
        const T* a = left.data + start * left.stride;
        multiply_all(a, left.stride, rows, b, n, args.weight.steps(), hop(args.weight, width), c, ldc);
        for (long row = 0; row < rows; ++row)
            for (long i = 0; i < ldc; i += LANES) {
                const long column = first * LANES + i, rest = N - column;
                F x = load(c + row * ldc + i);
                if (args.bias != nullptr) x = add(x, load(args.bias + column, rest));
                const long at = (start + row) * N + column;
                if (args.residual != nullptr) x = add(rounded<T>(x), load(args.residual + at, rest));
                store(args.out + at, x, rest);
            }
    });
}

inline F silu_times(F gate, F up) {
    return mul(div(gate, add(set1(1.0f), exp(sub(set1(0.0f), gate)))), up);
}

template <class T>
void gate_up(const GateUpArgs<T>& args) {
    const Left<T> left(args.x);
    const long N = args.gate.rows, panels = args.gate.panels(), width = panels_in_group(args.x.count) / 2;
    for_tiles(args.x.count, round_up(panels, width) / width, [&](long start, long rows, long group) {
        const long first = group * width, n = smaller(width, panels - first), ldc = 2 * n * LANES;
        const T* b[MAX_PANELS];
        for (long i = 0; i < n; ++i) b[i] = args.gate.panel(first + i), b[n + i] = args.up.panel(first + i);
        float* c = scratch<float>(PRODUCT, rows * ldc);
        const T* a = left.data + start * left.stride;
        multiply_all(a, left.stride, rows, b, 2 * n, args.gate.steps(), hop(args.gate, width), c, ldc);
        for (long row = 0; row < rows; ++row)
            for (long i = 0; i < n * LANES; i += LANES) {
                const float* both = c + row * ldc + i;
                const F gate = rounded<T>(load(both)), up = rounded<T>(load(both + n * LANES));
                const long column = first * LANES + i;
                store(args.out + (start + row) * N + column, silu_times(gate, up), N - column);
            }
    });
}

// ---- Queries, keys and values.

// Rotates the pairs (i, i + half) of a head.
template <class In, class Out>
inline void rotate(const In* x, long half, const float* cosines, const float* sines, Out* out) {
    for (long i = 0; i < half; i += LANES) {
        const long rest = half - i;
        const F low = load(x + i, rest), high = load(x + half + i, rest);
        const F cosine = load(cosines + i, rest), sine = load(sines + i, rest);
        store(out + i, sub(mul(low, cosine), mul(high, sine)), rest);
        store(out + half + i, add(mul(high, cosine), mul(low, sine)), rest);
    }
}

template <class T>
void write_key(const Caches<T>& caches, long slot, long head, const T* key) {
    T* block = caches.key_block(slot / caches.block_size, head) + slot % caches.block_size * PAIR<T>;
    for (long i = 0; i < caches.head_dim; i += PAIR<T>)
        memcpy(block + i * caches.block_size, key + i, sizeof(T) * PAIR<T>);
}

template <class T>
void write_value(const Caches<T>& caches, long slot, long head, const T* value) {
    const long offset = slot % caches.block_size;
    T* block = caches.value_block(slot / caches.block_size, head);
    block += offset / PAIR<T> * PAIR<T> * caches.head_dim + offset % PAIR<T>;
    for (long i = 0; i < caches.head_dim; ++i) block[i * PAIR<T>] = value[i];
}

template <class T>
void write_kv(const Caches<T>& caches, const T* keys, const T* values, const int64_t* slots, long count) {
    for (long i = 0; i < count * caches.kv_heads; ++i) {
        const long slot = slots[i / caches.kv_heads], head = i % caches.kv_heads;
        write_key(caches, slot, head, keys + i * caches.head_dim);
        write_value(caches, slot, head, values + i * caches.head_dim);
    }
}

// One head of q (part 0), k (1) or v (2) for one row, from the product's float32 `c`.
template <class T>
void finish_head(const QkvArgs<T>& args, long part, long head, long row, const float* c) {
    const long D = args.caches.head_dim, half = D / 2;
    T* values = scratch<T>(ROW, 2 * D + LANES);
    T* rotated = values + D;
    const T* bias = args.biases[part];
    for (long i = 0; i < D; i += LANES) {
        const F x = load(c + i);
        store(values + i, bias == nullptr ? x : add(x, load(bias + head * D + i)));
    }
    if (part == 2) return write_value(args.caches, args.slots[row], head, values);
    if (args.norms[part] != nullptr) normalize(values, D, args.norms[part], args.head_eps, values);
    T* out = part == 0 ? args.q + row * args.weights[0].rows + head * D : rotated;
    rotate(values, half, args.cosines + row * half, args.sines + row * half, out);
    if (part == 1) write_key(args.caches, args.slots[row], head, rotated);
}

template <class T>
void qkv(const QkvArgs<T>& args) {
    const Left<T> left(args.x);
    const long D = args.caches.head_dim, panels = D / LANES;
    const long heads = args.weights[0].rows / D, kv_heads = args.caches.kv_heads;
    for_tiles(args.x.count, heads + 2 * kv_heads, [&](long start, long rows, long group) {
        const long part = group < heads ? 0 : group < heads + kv_heads ? 1 : 2;
        const long head = part == 0 ? group : (group - heads) % kv_heads;
        const T* b[MAX_PANELS];
        for (long i = 0; i < panels; ++i) b[i] = args.weights[part].panel(head * panels + i);
        float* c = scratch<float>(PRODUCT, rows * D);
        const T* a = left.data + start * left.stride;
        const Matrix<T>& weight = args.weights[part];
        multiply_all(a, left.stride, rows, b, panels, weight.steps(), hop(weight, panels), c, D);
        for (long row = 0; row < rows; ++row) finish_head(args, part, head, start + row, c + row * D);
    });
}

// ---- Attention.

// A part of a softmax over the keys, for several query rows: the largest score, the sum of the exponentials relative
// to it, and the sum of the values weighted by them [rows, head_dim]. A peak of -inf: no key was seen.
struct Partial {
    float *peaks, *totals, *out;

    static long size(long rows, long head_dim) { return rows * (head_dim + 2); }
    Partial(float* memory, long rows) : peaks(memory), totals(memory + rows), out(memory + 2 * rows) {}
};

// Adds the next part to a softmax (Milakov and Gimelshein 2018).
inline void fold(const Partial& state, const Partial& next, long rows, long head_dim) {
    for (long row = 0; row < rows; ++row) {
        if (next.peaks[row] == -INFINITY) continue;
        const float before = state.peaks[row], after = next.peaks[row];
        const float top = before > after ? before : after;
        float scales[LANES] = {before - top, after - top};
        store(scales, exp(load(static_cast<const float*>(scales))));
        state.peaks[row] = top;
        state.totals[row] = state.totals[row] * scales[0] + next.totals[row] * scales[1];
        float *left = state.out + row * head_dim, *right = next.out + row * head_dim;
        for (long i = 0; i < head_dim; i += LANES)
            store(left + i, add(mul(load(left + i), set1(scales[0])), mul(load(right + i), set1(scales[1]))));
    }
}

inline void clear(const Partial& state, long rows, long head_dim) {
    for (long row = 0; row < rows; ++row) state.peaks[row] = -INFINITY, state.totals[row] = 0.0f;
    for (long i = 0; i < rows * head_dim; ++i) state.out[i] = 0.0f;
}

// Queries [first, first + count) of a sequence, for the heads that share one key-value head. Its rows are (query, head
// of the group) pairs. The query at row 0 has the absolute position `position`.
struct QueryTile {
    long sequence, kv_head, first, count, position;

    long context() const { return position + count; }
    long splits() const { return round_up(context(), KV_SPLIT) / KV_SPLIT; }
};

template <class T>
class Attention {
  public:
    explicit Attention(const AttentionArgs<T>& args)
        : args_(args), caches_(args.caches), dim_(args.caches.head_dim), group_(args.heads / args.caches.kv_heads) {}

    long rows(const QueryTile& tile) const { return tile.count * group_; }

    // Computes a tile over one split of the keys after the other. `next`: the tile that this thread will most likely
    // compute afterwards.
    void run(const QueryTile& tile, const QueryTile& next) const {
        const long n = rows(tile), size = Partial::size(n, dim_);
        float* memory = scratch<float>(PARTIALS, 2 * size);
        const Partial state(memory, n), part(memory + size, n);
        clear(state, n, dim_);
        for (long split = 0; split < tile.splits(); ++split) {
            const bool last = split + 1 == tile.splits();
            reduce(tile, split, last ? next : tile, last ? 0 : split + 1, part);
            fold(state, part, n, dim_);
        }
        finish(tile, state);
    }

    // Keys [split * KV_SPLIT, (split + 1) * KV_SPLIT) for all rows of a tile; fetches the next split of the next tile.
    void reduce(
        const QueryTile& tile, long split, const QueryTile& next_tile, long next_split, const Partial& out
    ) const {
        const long start = split * KV_SPLIT, n = rows(tile), D = dim_;
        const long keys = smaller(KV_SPLIT, tile.context() - start), panels = round_up(keys, LANES) / LANES;
        const Split at(*this, tile, start, keys);
        float* scores = scratch<float>(SCORES, n * KV_SPLIT);
        T* weights = scratch<T>(WEIGHTS, n * KV_SPLIT);
        const Factors<T> scoring = {
            queries(tile), D, at.keys, at.key_stride, D / PAIR<T>, at.values, LANES * PAIR<T>
        };
        multiply(scoring, n, panels, false, scores, KV_SPLIT);
        for (long row = 0; row < n; ++row) {
            const long seen = larger(0, smaller(keys, tile.position + row / group_ + 1 - start));
            weigh(scores + row * KV_SPLIT, seen, panels, weights + row * KV_SPLIT, out.peaks[row], out.totals[row]);
        }
        for (long i = 0; i < panels; ++i) {
            const T* next_key = key_panel(next_tile, next_split * KV_SPLIT + i * LANES);
            const T *b[MAX_PANELS], *next[MAX_PANELS];
            for (long j = 0; j < D / LANES; ++j) {
                b[j] = at.values[i] + j * LANES * PAIR<T>;
                next[j] = next_key + j * LANES / PAIR<T> * at.key_stride;
            }
            const Factors<T> weighing = {
                weights + i * LANES, KV_SPLIT, b, D * PAIR<T>, LANES / PAIR<T>, next, at.key_stride
            };
            multiply(weighing, n, D / LANES, i > 0, out.out, D);
        }
    }

    void finish(const QueryTile& tile, const Partial& state) const {
        for (long row = 0; row < rows(tile); ++row) {
            T* out = args_.out + place(tile, row);
            const F total = set1(state.totals[row]);
            for (long i = 0; i < dim_; i += LANES) store(out + i, div(load(state.out + row * dim_ + i), total));
        }
    }

    // Where the 16-token panels of a split stand: in the cache, or copied where the cache has no whole panel.
    struct Split {
        const T *keys[KV_SPLIT / LANES], *values[KV_SPLIT / LANES];
        long key_stride;

        Split(const Attention& attention, const QueryTile& tile, long start, long count) {
            const Caches<T>& caches = attention.caches_;
            const int64_t* table = attention.table(tile);
            const long D = caches.head_dim;
            const bool aligned = caches.block_size % LANES == 0;
            key_stride = (aligned ? caches.block_size : LANES) * PAIR<T>;
            T* copies = scratch<T>(TAIL, 2 * KV_SPLIT * D);
            for (long i = 0; i * LANES < count; ++i, copies += 2 * LANES * D) {
                const long token = start + i * LANES, tokens = smaller(LANES, start + count - token);
                keys[i] = attention.key_panel(tile, token);
                values[i] = attention.value_panel(tile, token);
                if (!aligned) keys[i] = copy_keys(caches, table, tile.kv_head, token, tokens, copies);
                // What stands past the last token may be no number, which even a weight of 0 would pass on.
                if (!aligned || tokens < LANES)
                    values[i] = copy_values(caches, table, tile.kv_head, token, tokens, copies + LANES * D);
            }
        }

        static T* copy_keys(const Caches<T>& caches, const int64_t* table, long head, long token, long n, T* out) {
            const long block_size = caches.block_size;
            for (long t = 0; t < n; ++t) {
                const long offset = (token + t) % block_size * PAIR<T>;
                const T* block = caches.key_block(table[(token + t) / block_size], head) + offset;
                for (long d = 0; d < caches.head_dim; d += PAIR<T>)
                    memcpy(out + d * LANES + t * PAIR<T>, block + d * block_size, sizeof(T) * PAIR<T>);
            }
            return out;
        }

        static T* copy_values(const Caches<T>& caches, const int64_t* table, long head, long token, long n, T* out) {
            const long D = caches.head_dim, block_size = caches.block_size;
            memset(static_cast<void*>(out), 0, static_cast<size_t>(LANES * D) * sizeof(T));
            for (long t = 0; t < n; t += PAIR<T>) {
                const long offset = (token + t) % block_size;
                const T* block = caches.value_block(table[(token + t) / block_size], head) + offset * D;
                if (t + PAIR<T> <= n)
                    memcpy(out + t * D, block, static_cast<size_t>(D * PAIR<T>) * sizeof(T));
                else
                    for (long d = 0; d < D; ++d) out[t * D + d * PAIR<T>] = block[d * PAIR<T>];
            }
            return out;
        }
    };

  private:
    const int64_t* table(const QueryTile& tile) const { return args_.tables + tile.sequence * args_.max_blocks; }

    // Where the cache holds a token, or the sequence's last one if there are fewer.
    const T* key_panel(const QueryTile& tile, long token) const {
        const long t = smaller(token, tile.context() - 1), block = table(tile)[t / caches_.block_size];
        return caches_.key_block(block, tile.kv_head) + t % caches_.block_size * PAIR<T>;
    }
    const T* value_panel(const QueryTile& tile, long token) const {
        const long block = table(tile)[token / caches_.block_size];
        return caches_.value_block(block, tile.kv_head) + token % caches_.block_size * dim_;
    }

    // The rows of a tile [rows, head_dim], one after the other.
    const T* queries(const QueryTile& tile) const {
        T* q = scratch<T>(QUERIES, rows(tile) * dim_);
        const size_t bytes = static_cast<size_t>(group_ * dim_) * sizeof(T);
        for (long i = 0; i < tile.count; ++i) memcpy(q + i * group_ * dim_, args_.q + place(tile, i * group_), bytes);
        return q;
    }

    long place(const QueryTile& tile, long row) const {
        const long query = args_.query_starts[tile.sequence] + tile.first + row / group_;
        return (query * args_.heads + tile.kv_head * group_ + row % group_) * dim_;
    }

    // Turns a row's scores into the softmax weights of its `seen` keys, rounded to T, and zeros up to `panels` panels.
    void weigh(float* scores, long seen, long panels, T* weights, float& top, float& total) const {
        const F scale = set1(args_.scale), nothing = set1(-INFINITY);
        F most = nothing;
        for (long i = seen; i < round_up(seen, LANES); ++i) scores[i] = -INFINITY;
        for (long i = 0; i < seen; i += LANES) {
            const F x = mul(load(scores + i), scale);
            store(scores + i, x);
            most = max(most, x);
        }
        top = peak(most);
        const F shift = set1(top == -INFINITY ? 0.0f : top);
        F sums = set1(0.0f);
        for (long i = 0; i < panels * LANES; i += LANES) {
            const F weight = i < seen ? rounded<T>(exp(sub(load(scores + i), shift))) : set1(0.0f);
            sums = add(sums, weight);
            store(weights + i, weight);
        }
        total = sum(sums);
    }

    const AttentionArgs<T>& args_;
    const Caches<T>& caches_;
    const long dim_, group_;
};

constexpr long QUERY_ROWS = 48;

template <class T, class Visit>
void for_query_tiles(const AttentionArgs<T>& args, const Visit& visit) {
    const long kv_heads = args.caches.kv_heads, most = larger(1, QUERY_ROWS / (args.heads / kv_heads));
    for (long i = 0; i < args.sequences; ++i) {
        const long queries = args.query_starts[i + 1] - args.query_starts[i], computed = args.context_lens[i] - queries;
        for (long first = 0; first < queries; first += most)
            for (long head = 0; head < kv_heads; ++head)
                visit(QueryTile{i, head, first, smaller(most, queries - first), computed + first});
    }
}

// Fewer tiles than threads can share: every split of the keys is a task, and the splits are folded afterwards.
template <class T>
void attend_by_splits(const Attention<T>& attention, const QueryTile* tiles, long count, long head_dim) {
    struct Task {
        long tile, split;
        float* memory;
    };
    long splits = 0, memory = 0;
    for (long i = 0; i < count; ++i) {
        splits += tiles[i].splits();
        memory += (tiles[i].splits() + 1) * Partial::size(attention.rows(tiles[i]), head_dim);
    }
    Task* tasks = scratch<Task>(OUTPUT, splits);
    float* partials = scratch<float>(INPUT, memory);
    Task* task = tasks;
    float* next = partials;
    for (long i = 0; i < count; ++i)
        for (long split = 0; split <= tiles[i].splits(); ++split) {
            if (split > 0) *task++ = {i, split - 1, next};
            next += Partial::size(attention.rows(tiles[i]), head_dim);
        }
    parallel(splits, [&](long i) {
        const QueryTile& tile = tiles[tasks[i].tile];
        attention.reduce(tile, tasks[i].split, tile, tasks[i].split, Partial(tasks[i].memory, attention.rows(tile)));
    });
    next = partials;
    for (long i = 0; i < count; ++i) {
        const long rows = attention.rows(tiles[i]), size = Partial::size(rows, head_dim);
        const Partial state(next, rows);
        clear(state, rows, head_dim);
        for (long split = 0; split < tiles[i].splits(); ++split)
            fold(state, Partial(next += size, rows), rows, head_dim);
        attention.finish(tiles[i], state);
        next += size;
    }
}

template <class T>
void attention(const AttentionArgs<T>& args) {
    const Attention<T> op(args);
    long count = 0;
    for_query_tiles(args, [&](const QueryTile&) { ++count; });
    QueryTile* tiles = scratch<QueryTile>(ROW, count);
    QueryTile* next = tiles;
    for_query_tiles(args, [&](const QueryTile& tile) { *next++ = tile; });
    if (count < 4 * num_threads())
        attend_by_splits(op, tiles, count, args.caches.head_dim);
    else
        parallel(count, [&](long i) { op.run(tiles[i], tiles[smaller(i + num_threads(), count - 1)]); });
}

// ---- The head: logits, log-probs, sampling.

constexpr long CHUNK = 512;

// Logits of `rows` rows from `start` on, for the vocabulary ids [first, first + n): c [rows, CHUNK].
template <class T>
void multiply_chunk(const Left<T>& left, const Matrix<T>& weight, long start, long rows, long first, float* c) {
    const long n = smaller(CHUNK / LANES, weight.panels() - first / LANES);
    const T* b[MAX_PANELS];
    for (long i = 0; i < n; ++i) b[i] = weight.panel(first / LANES + i);
    const T* a = left.data + start * left.stride;
    const long two_panels = 2 * (weight.panel(1) - weight.panel(0));
    for (long i = 0; i < n; i += 2) {
        float* out = c + i * LANES;
        multiply_all(a, left.stride, rows, b + i, smaller(2, n - i), weight.steps(), two_panels, out, CHUNK);
    }
}

template <class T>
void logits(const Input<T>& x, const Matrix<T>& weight, float* out) {
    const Left<T> left(x);
    const long V = weight.rows;
    for_tiles(x.count, round_up(V, CHUNK) / CHUNK, [&](long start, long rows, long group) {
        const long first = group * CHUNK, n = smaller(CHUNK, V - first);
        float* c = scratch<float>(PRODUCT, rows * CHUNK);
        multiply_chunk(left, weight, start, rows, first, c);
        for (long row = 0; row < rows; ++row)
            memcpy(out + (start + row) * V + first, c + row * CHUNK, static_cast<size_t>(n) * sizeof(float));
    });
}

// The maximum of n values and the sum of their exponentials relative to it, cut at multiples of CHUNK like those of
// `head`.
struct LogSumExp {
    float peak = -INFINITY, total = 0.0f;

    void add_chunk(const LogSumExp& next) {
        if (next.peak == -INFINITY) return;
        const float top = peak > next.peak ? peak : next.peak;
        float scales[LANES] = {peak - top, next.peak - top};
        store(scales, exp(load(static_cast<const float*>(scales))));
        total = total * scales[0] + next.total * scales[1];
        peak = top;
    }
};

inline LogSumExp reduce_chunk(const float* x, long n) {
    F most = set1(-INFINITY);
    for (long i = 0; i + LANES <= n; i += LANES) most = max(most, load(x + i));
    float top = peak(most);
    for (long i = n / LANES * LANES; i < n; ++i) top = x[i] > top ? x[i] : top;
    const F shift = set1(top == -INFINITY ? 0.0f : top);
    F sums = set1(0.0f);
    long i = 0;
    for (; i + LANES <= n; i += LANES) sums = add(sums, exp(sub(load(x + i), shift)));
    if (i < n) {
        float last[LANES];
        for (long lane = 0; lane < LANES; ++lane) last[lane] = i + lane < n ? x[i + lane] : -INFINITY;
        sums = add(sums, exp(sub(load(static_cast<const float*>(last)), shift)));
    }
    return {top, sum(sums)};
}

void log_sum_exp(const float* x, long n, float* peak, float* total) {
    LogSumExp all;
    for (long first = 0; first < n; first += CHUNK) all.add_chunk(reduce_chunk(x + first, smaller(CHUNK, n - first)));
    *peak = all.peak, *total = all.total;
}

// Random words for 64 vocabulary ids from `first` (a multiple of 64) on: Philox4x32-10 (Salmon et al. 2011). Key: the
// two halves of the seed. Counter: (id / 4, low and high half of the position, 0); id % 4 chooses the word.
inline void philox(uint64_t seed, uint64_t position, uint32_t first, U (&c)[4]) {
    static constexpr uint32_t iota[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    c[0] = add(set1(first / 4), load(iota));
    c[1] = set1(static_cast<uint32_t>(position));
    c[2] = set1(static_cast<uint32_t>(position >> 32));
    c[3] = set1(0u);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int i = 0; i < 10; ++i, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        U high0, low0, high1, low1;
        multiply_wide(c[0], 0xD2511F53u, high0, low0);
        multiply_wide(c[2], 0xCD9E8D57u, high1, low1);
        c[0] = bit_xor(bit_xor(high1, c[1]), set1(k0));
        c[2] = bit_xor(bit_xor(high0, c[3]), set1(k1));
        c[1] = low1;
        c[3] = low0;
    }
}

// Standard Gumbel noise for those ids: -ln(E) with E = -ln(1 - u).
inline void gumbel(uint64_t seed, uint64_t position, uint32_t first, float* out) {
    U words[4];
    philox(seed, position, first, words);
    float noise[4][LANES];
    for (int word = 0; word < 4; ++word) {
        const F half = add(convert_unsigned(words[word]), set1(0.5f));
        const F u = min(mul(half, set1(0x1p-32f)), set1(1.0f - 0x1p-24f));
        store(noise[word], sub(set1(0.0f), log(exponential(u))));
    }
    for (long lane = 0; lane < LANES; ++lane)
        for (int word = 0; word < 4; ++word) out[lane * 4 + word] = noise[word][lane];
}

// The id with the highest value; the lower one of equals.
struct Best {
    float value = -INFINITY;
    int64_t id = 0;

    void offer(float other, int64_t other_id) {
        if (other > value || (other == value && other_id < id)) value = other, id = other_id;
    }
};

// The best of the ids [first, first + n), with noise if `noisy`; first is a multiple of CHUNK.
inline Best best_in_chunk(const float* x, long n, bool noisy, uint64_t seed, uint64_t position, long first) {
    F values = set1(-INFINITY);
    U ids = set1(static_cast<uint32_t>(first));
    static constexpr uint32_t iota[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float noise[64] = {};
    for (long i = 0; i < n; i += LANES) {
        if (noisy && i % 64 == 0) gumbel(seed, position, static_cast<uint32_t>(first + i), noise);
        float last[LANES];
        const float* at = x + i;
        if (n - i < LANES) {
            for (long lane = 0; lane < LANES; ++lane) last[lane] = i + lane < n ? at[lane] : -INFINITY;
            at = last;
        }
        const F value = add(load(at), load(static_cast<const float*>(noise + i % 64)));
        const U id = add(set1(static_cast<uint32_t>(first + i)), load(iota));
        ids = select_greater(value, values, id, ids);
        values = select_greater(value, values, value, values);
    }
    float lanes[LANES];
    uint32_t lane_ids[LANES];
    store(lanes, values);
    store(lane_ids, ids);
    Best best;
    best.id = first;
    for (long lane = 0; lane < LANES; ++lane)
        if (lanes[lane] > -INFINITY) best.offer(lanes[lane], lane_ids[lane]);
    return best;
}

void sample(const float* x, long n, int64_t seed, int64_t position, int64_t* token) {
    Best best;
    for (long first = 0; first < n; first += CHUNK) {
        const Best next = best_in_chunk(
            x + first, smaller(CHUNK, n - first), true, static_cast<uint64_t>(seed), static_cast<uint64_t>(position),
            first
        );
        if (next.value > best.value) best = next;
    }
    *token = best.id;
}

// What one chunk of the vocabulary holds for one row. `basis`: the logit that the log-prob is taken of; `scaled`: the
// one over the temperature.
struct ChunkResult {
    LogSumExp sums;
    Best best;
    float basis, scaled;
};

template <class T>
ChunkResult read_chunk(const HeadArgs<T>& args, long row, const float* raw, long n, long first) {
    float* scaled = scratch<float>(ROW, CHUNK);
    const F temperature = set1(args.temperatures[row]);
    for (long i = 0; i < n; i += LANES) store(scaled + i, div(load(raw + i), temperature));
    const float* basis = args.raw[row] ? raw : scaled;
    ChunkResult result = {reduce_chunk(basis, n), Best(), 0.0f, 0.0f};
    const int64_t target = args.targets[row];
    if (target >= 0) {
        result.best.id = target;
        result.best.value = target >= first && target < first + n ? INFINITY : -INFINITY;
    } else {
        result.best = best_in_chunk(
            scaled, n, target == SAMPLE, static_cast<uint64_t>(args.seeds[row]),
            static_cast<uint64_t>(args.positions[row]), first
        );
    }
    const long at = result.best.id - first;
    if (at >= 0 && at < n) result.basis = basis[at], result.scaled = scaled[at];
    return result;
}

template <class T>
void head(const HeadArgs<T>& args) {
    const Left<T> left(args.x);
    const long V = args.weight.rows, chunks = round_up(V, CHUNK) / CHUNK;
    ChunkResult* results = scratch<ChunkResult>(OUTPUT, args.x.count * chunks);
    for_tiles(args.x.count, chunks, [&](long start, long rows, long group) {
        const long first = group * CHUNK, n = smaller(CHUNK, V - first);
        float* c = scratch<float>(PRODUCT, rows * CHUNK);
        multiply_chunk(left, args.weight, start, rows, first, c);
        for (long row = 0; row < rows; ++row)
            results[(start + row) * chunks + group] = read_chunk(args, start + row, c + row * CHUNK, n, first);
    });
    for (long row = 0; row < args.x.count; ++row) {
        const ChunkResult* result = results + row * chunks;
        LogSumExp all;
        const ChunkResult* best = result;
        for (long i = 0; i < chunks; ++i) {
            all.add_chunk(result[i].sums);
            if (result[i].best.value > best->best.value) best = result + i;
        }
        args.tokens[row] = best->best.id;
        args.logprobs[row] = (best->basis - all.peak) - logf(all.total);
        args.finite[row] = isfinite(best->scaled);
    }
}

template <class T>
constexpr Ops<T> ALL_OPS = {
    linear<T>, logits<T>, gate_up<T>, qkv<T>, write_kv<T>, attention<T>, head<T>, rmsnorm_rows<T>,
};
