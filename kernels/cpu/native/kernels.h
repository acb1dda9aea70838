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

// Stores x and returns what was stored.
inline F store_rounded(float* p, F x) {
    store(p, x);
    return x;
}
inline F store_rounded(bf16* p, F x) {
    const U half = bf16_bits(x);
    store_halves(p, half);
    return floats(shift_left<16>(half));
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

// One product: c[m][16 * n + lane] (+)= sum over the rounds and their steps of a[m] times b[round][n]. `stride`: from one
// step of a panel to the next; `width`: panels in a round. Meanwhile fetches what will be read afterwards, a line a step:
// next[round][n], `next_stride` apart.
template <class T>
struct Factors {
    const T* a;
    long lda;
    const T* const* b;
    long width, stride, rounds, steps;
    const T* const* next;
    long next_stride;
};

template <class T, int M, int N>
void tile(const Factors<T>& factors, bool add_to, float* c, long ldc) {
    const auto [a, lda, b, width, stride, rounds, steps, next, next_stride] = factors;
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
            for (int n = 0; n < N; ++n) __builtin_prefetch(later[n] + s * next_stride);
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
    for (long i = 0; i < parts; ++i) {
        const long rows = m / parts + (i < m % parts);
        tile_of<T, N>(rows, std::make_integer_sequence<int, MOST>())(factors, add_to, c, ldc);
        factors.a += rows * factors.lda, c += rows * ldc;
        factors.next = factors.b, factors.next_stride = factors.stride;  // once is enough
    }
}

constexpr int WIDE = ACCUMULATORS >= 24 ? 4 : 2, NARROW = ACCUMULATORS >= 12 ? 2 : 1;

// The same for any number of rows m, and all panels of a round.
template <class T>
void multiply(Factors<T> factors, long m, bool add_to, float* c, long ldc) {
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
        multiply(Factors<T>{a + start * PAIR<T>, lda, b, n, STRIDE, 1, some, next, STRIDE}, m, start > 0, c, ldc);
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

    // The same from row `row` on.
    Partial from(long row, long head_dim) const {
        Partial rest = *this;
        rest.peaks += row, rest.totals += row, rest.out += row * head_dim;
        return rest;
    }
};

// Adds the next part to a softmax (Milakov and Gimelshein 2018). Rows that see nothing of it keep their bits.
inline void fold(const Partial& state, const Partial& next, long rows, long head_dim) {
    for (long first = 0; first < rows; first += LANES) {
        const long n = smaller(LANES, rows - first);
        float before_scale[LANES], after_scale[LANES];
        const F before = load(state.peaks + first, n), after = load(next.peaks + first, n), top = max(before, after);
        store(before_scale, exp(sub(before, top)));
        store(after_scale, exp(sub(after, top)));
        for (long i = 0; i < n; ++i) {
            const long row = first + i;
            if (next.peaks[row] == -INFINITY) continue;
            state.peaks[row] = state.peaks[row] > next.peaks[row] ? state.peaks[row] : next.peaks[row];
            state.totals[row] = state.totals[row] * before_scale[i] + next.totals[row] * after_scale[i];
            const F left_scale = set1(before_scale[i]), right_scale = set1(after_scale[i]);
            float *left = state.out + row * head_dim, *right = next.out + row * head_dim;
            for (long j = 0; j < head_dim; j += LANES)
                store(left + j, add(mul(load(left + j), left_scale), mul(load(right + j), right_scale)));
        }
    }
}

inline void clear(const Partial& state, long rows, long head_dim) {
    for (long row = 0; row < rows; ++row) state.peaks[row] = -INFINITY, state.totals[row] = 0.0f;
    for (long i = 0; i < rows * head_dim; ++i) state.out[i] = 0.0f;
}

// Queries [first, first + count) of each of the sequences [sequence, sequence + members), for the heads that share one
// key-value head. Its rows are (member, query, head of the group).
struct QueryTile {
    long sequence, members, kv_head, first, count;
};

template <class T>
class Attention {
  public:
    explicit Attention(const AttentionArgs<T>& args)
        : args_(args), caches_(args.caches), dim_(args.caches.head_dim), group_(args.heads / args.caches.kv_heads) {}

    long rows(const QueryTile& tile) const { return tile.members * tile.count * group_; }

    // The keys that the last query of a tile's first member sees, and the splits they lie in.
    long context(const QueryTile& tile) const { return position(tile, 0, tile.count - 1) + 1; }
    long splits(const QueryTile& tile) const { return round_up(context(tile), KV_SPLIT) / KV_SPLIT; }

    // Computes a tile over one split of the keys after the other. `next`: the tile that this thread will most likely
    // compute afterwards.
    void run(const QueryTile& tile, const QueryTile& next) const {
        const long n = rows(tile), size = Partial::size(n, dim_);
        float* memory = scratch<float>(PARTIALS, 2 * size);
        const Partial state(memory, n), part(memory + size, n);
        clear(state, n, dim_);
        for (long split = 0; split < splits(tile); ++split) {
            const bool last = split + 1 == splits(tile);
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
        const long keys = smaller(KV_SPLIT, context(tile) - start), panels = round_up(keys, LANES) / LANES;
        const Split at(*this, tile, start, keys);
        float* scores = scratch<float>(SCORES, n * KV_SPLIT);
        T* weights = scratch<T>(WEIGHTS, n * KV_SPLIT);
        const Factors<T> scoring = {
            queries(tile), D, at.keys, panels, at.key_stride, 1, D / PAIR<T>, at.values, LANES * PAIR<T>
        };
        multiply(scoring, n, false, scores, KV_SPLIT);
        for (long row = 0; row < n; ++row) {
            const long query = row / group_ % tile.count, at_most = position(tile, row / group_ / tile.count, query) + 1;
            const long seen = larger(0, smaller(keys, at_most - start));
            weigh(scores + row * KV_SPLIT, seen, panels, weights + row * KV_SPLIT, out.peaks[row], out.totals[row]);
        }
        const long width = D / LANES;
        const T *b[KV_SPLIT / LANES * MAX_PANELS], *next[KV_SPLIT / LANES * MAX_PANELS];
        for (long i = 0; i < panels; ++i) {
            const T* next_key = key_panel(next_tile, next_split * KV_SPLIT + i * LANES);
            for (long j = 0; j < width; ++j) {
                b[i * width + j] = at.values[i] + j * LANES * PAIR<T>;
                next[i * width + j] = next_key + j * LANES / PAIR<T> * at.key_stride;
            }
        }
        const Factors<T> weighing = {
            weights, KV_SPLIT, b, width, D * PAIR<T>, panels, LANES / PAIR<T>, next, at.key_stride
        };
        multiply(weighing, n, false, out.out, D);
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
        const long t = smaller(token, context(tile) - 1), block = table(tile)[t / caches_.block_size];
        return caches_.key_block(block, tile.kv_head) + t % caches_.block_size * PAIR<T>;
    }
    const T* value_panel(const QueryTile& tile, long token) const {
        const long block = table(tile)[token / caches_.block_size];
        return caches_.value_block(block, tile.kv_head) + token % caches_.block_size * dim_;
    }

    // The absolute position of a query of one of the tile's sequences.
    long position(const QueryTile& tile, long member, long query) const {
        const int64_t* starts = args_.query_starts + tile.sequence + member;
        return args_.context_lens[tile.sequence + member] - (starts[1] - starts[0]) + tile.first + query;
    }

    // The rows of a tile [rows, head_dim], one after the other.
    const T* queries(const QueryTile& tile) const {
        T* q = scratch<T>(QUERIES, rows(tile) * dim_);
        const size_t bytes = static_cast<size_t>(group_ * dim_) * sizeof(T);
        for (long i = 0; i < rows(tile); i += group_) memcpy(q + i * dim_, args_.q + place(tile, i), bytes);
        return q;
    }

    long place(const QueryTile& tile, long row) const {
        const long member = row / group_ / tile.count, query = row / group_ % tile.count;
        const long token = args_.query_starts[tile.sequence + member] + tile.first + query;
        return (token * args_.heads + tile.kv_head * group_ + row % group_) * dim_;
    }

    // Turns a row's scores into the softmax weights of its `seen` keys, rounded to T, and zeros up to `panels` panels.
    void weigh(float* scores, long seen, long panels, T* weights, float& top, float& total) const {
        for (long i = seen; i < round_up(seen, LANES); ++i) scores[i] = -INFINITY;
        F most = set1(-INFINITY);
        for (long i = 0; i < seen; i += LANES) most = max(most, load(scores + i));
        top = peak(most) * args_.scale;
        const F scale = set1(args_.scale), shift = set1(top == -INFINITY ? 0.0f : -top);
        F sums = set1(0.0f);
        for (long i = 0; i < panels * LANES; i += LANES) {
            const F weight = i < seen ? exp(fma(load(scores + i), scale, shift)) : set1(0.0f);
            sums = add(sums, store_rounded(weights + i, weight));
        }
        total = sum(sums);
    }

    const AttentionArgs<T>& args_;
    const Caches<T>& caches_;
    const long dim_, group_;
};

constexpr long QUERY_ROWS = 48;

// One split of the keys for one tile, with where its result goes; the whole of a tile if `split` is WHOLE.
struct AttentionTask {
    QueryTile tile;
    long split;
    float* memory;
};

constexpr long WHOLE = -1;

// Cuts a batch into tasks. A sequence with more queries than fit into one tile is cut into tiles. Of every other one
// each split is a task of its own, so that a long sequence keeps all threads busy; sequences that follow each other and
// hold the same blocks there share the task, and read them once.
template <class T>
class AttentionPlan {
  public:
    explicit AttentionPlan(const AttentionArgs<T>& args)
        : args_(args), op_(args), group_(args.heads / args.caches.kv_heads), most_(larger(1, QUERY_ROWS / group_)) {}

    template <class Visit>
    void visit_tasks(const Visit& visit) const {
        for (long i = 0; i < args_.sequences; ++i)
            if (!is_small(i))
                for (long first = 0; first < queries(i); first += most_)
                    visit_heads({i, 1, 0, first, smaller(most_, queries(i) - first)}, WHOLE, visit);
        for (long split = 0, found = 1; found > 0; ++split) {
            found = 0;
            for (long i = 0, members; i < args_.sequences; i += members) {
                members = 1;
                if (!has_split(i, split)) continue;
                while (i + members < args_.sequences && members * queries(i) < most_ && share(i, i + members, split))
                    ++members;
                visit_heads({i, members, 0, 0, queries(i)}, split, visit);
                found += members;
            }
        }
    }

    bool is_small(long i) const { return queries(i) <= most_; }
    bool has_split(long i, long split) const { return is_small(i) && split * KV_SPLIT < args_.context_lens[i]; }
    long queries(long i) const { return args_.query_starts[i + 1] - args_.query_starts[i]; }
    const Attention<T>& op() const { return op_; }

  private:
    template <class Visit>
    void visit_heads(QueryTile tile, long split, const Visit& visit) const {
        for (tile.kv_head = 0; tile.kv_head < args_.caches.kv_heads; ++tile.kv_head) visit(tile, split);
    }

    // Whether two sequences have the same blocks in a split, all of which all their queries see.
    bool share(long i, long j, long split) const {
        const long end = (split + 1) * KV_SPLIT, block_size = args_.caches.block_size;
        if (queries(i) != queries(j) || end > args_.context_lens[i] - queries(i) + 1) return false;
        if (end > args_.context_lens[j] - queries(j) + 1) return false;
        const int64_t *left = args_.tables + i * args_.max_blocks, *right = args_.tables + j * args_.max_blocks;
        const long first = split * KV_SPLIT / block_size, last = (end - 1) / block_size;
        return memcmp(left + first, right + first, static_cast<size_t>(last + 1 - first) * sizeof(*left)) == 0;
    }

    const AttentionArgs<T>& args_;
    const Attention<T> op_;
    const long group_, most_;
};

template <class T>
void attention(const AttentionArgs<T>& args) {
    const AttentionPlan<T> plan(args);
    const Attention<T>& op = plan.op();
    const long D = args.caches.head_dim, kv_heads = args.caches.kv_heads;
    long count = 0, memory = 0, splits = 0;
    plan.visit_tasks([&](const QueryTile& tile, long split) {
        ++count, splits = larger(splits, split + 1);
        if (split != WHOLE) memory += Partial::size(op.rows(tile), D);
    });
    AttentionTask* tasks = scratch<AttentionTask>(ROW, count);
    float* partials = scratch<float>(INPUT, memory);
    // For every sequence, key-value head and split: the first row of its part.
    Partial* parts = scratch<Partial>(OUTPUT, args.sequences * kv_heads * splits);
    AttentionTask* next = tasks;
    plan.visit_tasks([&](const QueryTile& tile, long split) {
        *next++ = {tile, split, partials};
        if (split == WHOLE) return;
        const long rows = op.rows(tile);
        for (long i = 0; i < tile.members; ++i)
            parts[((tile.sequence + i) * kv_heads + tile.kv_head) * splits + split] =
                Partial(partials, rows).from(i * rows / tile.members, D);
        partials += Partial::size(rows, D);
    });
    parallel(count, [&](long i) {
        const AttentionTask &task = tasks[i], &later = tasks[smaller(i + num_threads(), count - 1)];
        if (task.split == WHOLE)
            op.run(task.tile, later.tile);
        else
            op.reduce(task.tile, task.split, later.tile, larger(0, later.split), Partial(task.memory, op.rows(task.tile)));
    });
    parallel(args.sequences * kv_heads, [&](long i) {
        const long sequence = i / kv_heads;
        if (!plan.is_small(sequence)) return;
        const QueryTile tile = {sequence, 1, i % kv_heads, 0, plan.queries(sequence)};
        const long rows = op.rows(tile);
        const Partial state(scratch<float>(PARTIALS, Partial::size(rows, D)), rows);
        clear(state, rows, D);
        for (long split = 0; plan.has_split(sequence, split); ++split) fold(state, parts[i * splits + split], rows, D);
        op.finish(tile, state);
    });
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

// For each of those ids a float32 u in (0, 1), in order.
inline void uniform(uint64_t seed, uint64_t position, uint32_t first, float* out) {
    U words[4];
    philox(seed, position, first, words);
    float u[4][LANES];
    for (int word = 0; word < 4; ++word) {
        const F half = add(convert_unsigned(words[word]), set1(0.5f));
        store(u[word], min(mul(half, set1(0x1p-32f)), set1(1.0f - 0x1p-24f)));
    }
    for (long lane = 0; lane < LANES; ++lane)
        for (int word = 0; word < 4; ++word) out[lane * 4 + word] = u[word][lane];
}

// The id with the highest value; the lower one of equals. -inf is never the best of anything.
struct Best {
    float value;
    int64_t id;

    void offer(float other, int64_t other_id) {
        if (other > value || (other == value && other > -INFINITY && other_id < id)) value = other, id = other_id;
    }
};

// The highest value that anybody has found for a row so far, for all threads.
inline float read_bound(const float* bound) {
    float value;
    __atomic_load(bound, &value, __ATOMIC_RELAXED);
    return value;
}
inline void raise_bound(float* bound, float value) {
    float before = read_bound(bound);
    while (value > before &&
           !__atomic_compare_exchange(bound, &before, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// The best of 16 values of the ids [first, first + 16), and of `best`.
inline Best best_of(F values, long first, Best best) {
    float lanes[LANES];
    store(lanes, values);
    for (long lane = 0; lane < LANES; ++lane) best.offer(lanes[lane], first + lane);
    return best;
}

inline bool any_greater(F a, F b) { return peak(select_greater(a, b, set1(1.0f), set1(0.0f))) > 0.0f; }

constexpr long GROUP = 64;

// A chunk's values, filled up with -inf to whole groups.
struct Padded {
    float copy[CHUNK];
    const float* values;

    Padded(const float* x, long n) : values(x) {
        if (n % GROUP == 0) return;
        memcpy(copy, x, static_cast<size_t>(n) * sizeof(float));
        for (long i = n; i < round_up(n, GROUP); ++i) copy[i] = -INFINITY;
        values = copy;
    }
};

// The best of the ids [first, first + n); first is a multiple of CHUNK.
inline Best greedy_in_chunk(const float* x, long n, long first) {
    const Padded padded(x, n);
    Best best = {-INFINITY, first};
    for (long i = 0; i < n; i += LANES) {
        const F values = load(padded.values + i);
        if (any_greater(values, set1(best.value))) best = best_of(values, first + i, best);
    }
    return best;
}

// The same with standard Gumbel noise -ln(-ln(1 - u)) added (Gumbel-max).
//
// `bound` is a value that some id of the row is known to reach; ids that cannot reach it are passed over, which changes
// what a chunk finds but never the best of the row. As -ln(1 - u) >= u, a value x + noise can only reach b if
// u <= exp(x - b); and since u >= 2^-33, never if x < b - 22.9. The margin makes up for rounding.
inline Best sample_in_chunk(const float* x, long n, uint64_t seed, uint64_t position, long first, float* bound) {
    constexpr float MOST_NOISE = 23.0f;
    const Padded padded(x, n);
    Best best = {-INFINITY, first};
    for (long start = 0; start < n; start += GROUP) {
        const float* at = padded.values + start;
        const float reached = read_bound(bound), least = reached - (1e-3f + fabsf(reached) * 0x1p-21f);
        const F most = max(max(load(at), load(at + 16)), max(load(at + 32), load(at + 48)));
        if (!any_greater(most, set1(least - MOST_NOISE))) continue;
        float u[GROUP];
        uniform(seed, position, static_cast<uint32_t>(first + start), u);
        for (long i = 0; i < GROUP; i += LANES) {
            const F values = load(at + i), noise = load(static_cast<const float*>(u + i));
            if (!any_greater(exp(sub(values, set1(least))), noise)) continue;
            best = best_of(sub(values, log(exponential(noise))), first + start + i, best);
        }
        raise_bound(bound, best.value);
    }
    return best;
}

void sample(const float* x, long n, int64_t seed, int64_t position, int64_t* token) {
    Best best = {-INFINITY, 0};
    float bound = -INFINITY;
    for (long first = 0; first < n; first += CHUNK) {
        const Best next = sample_in_chunk(
            x + first, smaller(CHUNK, n - first), static_cast<uint64_t>(seed), static_cast<uint64_t>(position), first,
            &bound
        );
        best.offer(next.value, next.id);
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

// `bound`: see `sample_in_chunk`.
template <class T>
ChunkResult read_chunk(const HeadArgs<T>& args, long row, const float* raw, long n, long first, float* bound) {
    float* scaled = scratch<float>(ROW, CHUNK);
    const F temperature = set1(args.temperatures[row]);
    for (long i = 0; i < n; i += LANES) store(scaled + i, div(load(raw + i), temperature));
    const float* basis = args.raw[row] ? raw : scaled;
    ChunkResult result = {reduce_chunk(basis, n), {-INFINITY, first}, 0.0f, 0.0f};
    const int64_t target = args.targets[row];
    if (target == SAMPLE) {
        const uint64_t seed = static_cast<uint64_t>(args.seeds[row]);
        result.best = sample_in_chunk(scaled, n, seed, static_cast<uint64_t>(args.positions[row]), first, bound);
    } else if (target == GREEDY) {
        result.best = greedy_in_chunk(scaled, n, first);
    } else if (target >= first && target < first + n) {
        result.best = {INFINITY, target};
    }
    const long at = result.best.id - first;
    result.basis = basis[at], result.scaled = scaled[at];
    return result;
}

template <class T>
void head(const HeadArgs<T>& args) {
    const Left<T> left(args.x);
    const long V = args.weight.rows, chunks = round_up(V, CHUNK) / CHUNK;
    ChunkResult* results = scratch<ChunkResult>(OUTPUT, args.x.count * chunks);
    float* bounds = scratch<float>(PARTIALS, args.x.count);
    for (long row = 0; row < args.x.count; ++row) bounds[row] = -INFINITY;
    for_tiles(args.x.count, chunks, [&](long start, long rows, long group) {
        const long first = group * CHUNK, n = smaller(CHUNK, V - first);
        float* c = scratch<float>(PRODUCT, rows * CHUNK);
        multiply_chunk(left, args.weight, start, rows, first, c);
        for (long row = 0; row < rows; ++row)
            results[(start + row) * chunks + group] =
                read_chunk(args, start + row, c + row * CHUNK, n, first, bounds + start + row);
    });
    for (long row = 0; row < args.x.count; ++row) {
        const ChunkResult* result = results + row * chunks;
        LogSumExp all;
        const ChunkResult* best = result;  // of equals the one with the lower ids
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
