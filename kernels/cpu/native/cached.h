// Keys and values of 8 bits: how vectors become codes, and how codes become values. `Caches` (common.h) has the layout,
// kernels/cache_formats.py the definition. A part of kernels.h.

constexpr float LEAST_SCALE = 0x1p-24f, LARGEST_HALF = 65504.0f;
constexpr uint16_t NAN_HALF = 0x7E00;

inline uint32_t bits_of(float x) {
    uint32_t raw;
    memcpy(&raw, &x, sizeof(raw));
    return raw;
}

// Returns the bits of a float16, for |x| up to the largest float16.
inline uint16_t to_half(float x) {
    const uint32_t raw = bits_of(x), sign = raw >> 16 & 0x8000u, magnitude = raw & 0x7FFFFFFFu;
    // Adding 0.5 aligns the lowest bit with that of a denormal float16.
    const uint32_t small = bits_of(fabsf(x) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = ((magnitude + 0xFFFu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
    return static_cast<uint16_t>(sign | (fabsf(x) < 0x1p-14f ? small : normal));
}

// Returns 16 float16. NaN and infinity become NaN.
inline F load_halves(const uint16_t* p) {
    const U half = bits(load(reinterpret_cast<const bf16*>(p)));  // in the upper 16 bits of each lane
    const U magnitude = shift_right<3>(bit_and(half, set1(0x7FFF0000u)));
    const F x = mul(floats(bit_xor(bit_and(half, set1(0x80000000u)), magnitude)), set1(0x1p112f));
    const F top = mul(x, set1(0x1p112f));  // infinite beyond the largest float16
    return add(x, sub(top, top));
}

// Returns the code of a number up to LARGEST_E4M3.
inline uint8_t to_e4m3(float x) {
    const uint32_t raw = bits_of(x), sign = raw >> 24 & 0x80u, magnitude = raw & 0x7FFFFFFFu;
    // Adding 2^14 aligns the lowest bit with that of a denormal number.
    const uint32_t small = bits_of(fabsf(x) + 0x1p14f) - bits_of(0x1p14f);
    const uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    return static_cast<uint8_t>(sign | (fabsf(x) < 0x1p-6f ? small : normal));
}

// The codes of a vector, and the float16 numbers that the codes share: the scale and, for INT8, the zero point.
struct CodedVector {
    uint8_t* codes;
    uint16_t shared[2];
};

// Quantizes a vector of n elements, a multiple of LANES. `codes`: memory for the codes.
template <class T>
CodedVector encode(const T* x, long n, CacheFormat format, uint8_t* codes) {
    const bool has_zeros = format == CacheFormat::INT8;
    F most = load(x), opposite = sub(set1(0.0f), most), zeros = set1(0.0f);
    for (long i = 0; i < n; i += LANES) {
        const F value = load(x + i);
        most = max(most, value), opposite = max(opposite, sub(set1(0.0f), value));
        zeros = fma(value, set1(0.0f), zeros);
    }
    if (!(sum(zeros) == 0.0f)) {  // an element is NaN or infinite
        memset(codes, 0, static_cast<size_t>(n));
        return {codes, {NAN_HALF, NAN_HALF}};
    }
    const float high = peak(most), low = -peak(opposite);
    const auto bounded = [](float number, float least) {
        return number < least ? least : number > LARGEST_HALF ? LARGEST_HALF : number;
    };
    const float spread = has_zeros ? (high - low) / 255.0f : (high > -low ? high : -low) / LARGEST_E4M3;
    uint16_t shared[LANES] = {to_half(bounded(spread, LEAST_SCALE)), to_half(bounded(low, -LARGEST_HALF))};
    if (shared[1] == 0x8000) shared[1] = 0;  // no negative zero
    float numbers[LANES];
    store(numbers, load_halves(shared));
    const F scale = set1(numbers[0]), zero = set1(numbers[1]);
    const F first = set1(has_zeros ? 0.0f : -LARGEST_E4M3), last = set1(has_zeros ? 255.0f : LARGEST_E4M3);
    for (long i = 0; i < n; i += LANES) {
        const F value = load(x + i);
        F quotient = max(first, min(last, div(has_zeros ? sub(value, zero) : value, scale)));
        if (has_zeros) quotient = round(quotient);
        store(numbers, quotient);
        for (long lane = 0; lane < LANES; ++lane)
            codes[i + lane] = has_zeros ? static_cast<uint8_t>(numbers[lane]) : to_e4m3(numbers[lane]);
    }
    return {codes, {shared[0], shared[1]}};
}

// Stores a part of a key, the elements [start, start + n).
template <class T>
void write_key_part(const Caches<T>& caches, long slot, long head, const T* key, long part, long start, long n) {
    const CodedVector vector = encode(key + start, n, caches.format, scratch<uint8_t>(CODES, n));
    const long B = caches.block_size, block = slot / B, offset = slot % B;
    uint8_t* codes = caches.key_codes(block, head) + start * B + offset;
    for (long i = 0; i < n; ++i) codes[i * B] = vector.codes[i];
    uint16_t* shared = caches.key_shared(block, head, part) + offset;
    for (long i = 0; i < caches.shared_numbers(); ++i) shared[i * B] = vector.shared[i];
}

template <class T>
void write_coded_key(const Caches<T>& caches, long slot, long head, const T* key) {
    const long first = caches.first_part(), rest = caches.head_dim - first;
    write_key_part(caches, slot, head, key, 0, 0, first);
    if (rest > 0) write_key_part(caches, slot, head, key, 1, first, rest);
}

template <class T>
void write_coded_value(const Caches<T>& caches, long slot, long head, const T* value) {
    const long B = caches.block_size, block = slot / B, offset = slot % B, V = caches.value_dim;
    const CodedVector vector = encode(value, V, caches.format, caches.value_codes(block, head) + offset * V);
    uint16_t* shared = caches.value_shared(block, head) + offset;
    for (long i = 0; i < caches.shared_numbers(); ++i) shared[i * B] = vector.shared[i];
}

// Computes values from 16 codes.
template <CacheFormat FORMAT>
inline F cached_values(const uint8_t* codes, F scales, F zeros) {
    // The product of a code and a scale is exact, so the fused product has the bits of the separate steps.
    if (FORMAT == CacheFormat::INT8) return fma(unsigned_bytes(codes), scales, zeros);
    return mul(mul(e4m3_bytes(codes), set1(0x1p120f)), scales);
}

// The codes of the keys and values of 16 tokens. Keys are [head_dim][key_stride], values [16][value_dim]. `key_shared`,
// `value_shared`: the scales of the first vectors. The zero points lie `shared_stride` later, and the numbers of the
// second vectors follow in the same way. `next_keys`, `next_values`: codes that are needed later, which are prefetched.
struct CodedPanel {
    const uint8_t *keys, *values;
    long key_stride;
    const uint16_t *key_shared, *value_shared;
    long shared_stride;
    const uint8_t *next_keys, *next_values;
};

// The panels of a split of the keys. `scales`, `zeros`: the scale and the zero point of each token's values; 0 for
// tokens that no query sees.
struct CodedSplit {
    CodedPanel panels[KV_SPLIT / LANES];
    long count;
    float scales[KV_SPLIT], zeros[KV_SPLIT];
};

// The scales and zero points of vectors, as float32.
struct SharedNumbers {
    F scales, zeros;

    SharedNumbers() = default;
    SharedNumbers(const uint16_t* at, long stride, bool has_zeros)
        : scales(load_halves(at)), zeros(has_zeros ? load_halves(at + stride) : set1(0.0f)) {}
};

// The shared numbers of the vectors of a panel's keys. `part`: 0 for the first elements of the keys; in latent
// attention, 1 for the rest.
template <CacheFormat FORMAT, class T>
SharedNumbers shared_by_keys(const Caches<T>& caches, const CodedPanel& panel, long part) {
    const uint16_t* at = panel.key_shared + part * caches.shared_numbers() * panel.shared_stride;
    return {at, panel.shared_stride, FORMAT == CacheFormat::INT8};
}

// Expands the keys of a panel to the values of their codes.
template <CacheFormat FORMAT, class T>
void expand_keys(const Caches<T>& caches, const CodedPanel& panel, T* out) {
    const long stride = panel.key_stride, D = caches.head_dim;
    for (long part = 0, d = 0; part < caches.key_parts(); ++part) {
        const SharedNumbers shared = shared_by_keys<FORMAT>(caches, panel, part);
        for (const long end = part == 0 ? caches.first_part() : D; d < end; d += 2) {
            __builtin_prefetch(panel.next_keys + d * stride);
            const uint8_t* codes = panel.keys + d * stride;
            const F x = cached_values<FORMAT>(codes, shared.scales, shared.zeros);
            const F y = cached_values<FORMAT>(codes + stride, shared.scales, shared.zeros);
            store_columns<true>(out + d * LANES, x, y);
        }
    }
}

inline void store_tokens(float* out, long V, F x, F y) { store(out, x), store(out + V, y); }
inline void store_tokens(bf16* out, long, F x, F y) { store_columns<true>(out, x, y); }

// Expands the values of a panel. `scales`, `zeros`: the scales and zero points of the 16 tokens.
template <CacheFormat FORMAT, class T>
void expand_values(const Caches<T>& caches, const CodedPanel& panel, const float* scales, const float* zeros, T* out) {
    const long V = caches.value_dim;
    for (long t = 0; t < LANES; t += 2) {
        const uint8_t *codes = panel.values + t * V, *next = panel.next_values + t * V;
        const F scale[2] = {set1(scales[t]), set1(scales[t + 1])}, zero[2] = {set1(zeros[t]), set1(zeros[t + 1])};
        for (long d = 0; d < V; d += LANES) {
            __builtin_prefetch(next + 2 * d);
            const F x = cached_values<FORMAT>(codes + d, scale[0], zero[0]);
            const F y = cached_values<FORMAT>(codes + V + d, scale[1], zero[1]);
            store_tokens(out + t * V + d * PAIR<T>, V, x, y);
        }
    }
}

// For up to this number of rows, attention expands codes in registers instead of in memory. Both ways give the same
// bits.
#ifdef HAS_TILES
constexpr long CODED_ROWS = 0;
#else
constexpr long CODED_ROWS = ACCUMULATORS >= 24 ? 12 : 0;
#endif

template <int M, int N>
inline void clear(F (&acc)[M][N]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = set1(0.0f);
}
template <int M, int N>
inline void store_all(const F (&acc)[M][N], float* c, long ldc) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) store(c + m * ldc + n * LANES, acc[m][n]);
}

// The products of M queries and the keys of N panels.
template <CacheFormat FORMAT, int M, int N>
void coded_scores(const Caches<bf16>& caches, const bf16* q, const CodedPanel* panels, float* scores, long ldc) {
    const long D = caches.head_dim, stride = panels->key_stride;
    F acc[M][N];
    clear(acc);
    for (long part = 0, d = 0; part < caches.key_parts(); ++part) {
        SharedNumbers shared[N];
        for (int n = 0; n < N; ++n) shared[n] = shared_by_keys<FORMAT>(caches, panels[n], part);
        for (const long end = part == 0 ? caches.first_part() : D; d < end; d += 4) {
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) __builtin_prefetch(panels[n].next_keys + d * stride);
#pragma GCC unroll 2
            for (long i = d; i < d + 4; i += 2)
                step_of(acc, q + i, D, [&](int n) {
                    const uint8_t* codes = panels[n].keys + i * stride;
                    const F x = cached_values<FORMAT>(codes, shared[n].scales, shared[n].zeros);
                    const F y = cached_values<FORMAT>(codes + stride, shared[n].scales, shared[n].zeros);
                    return rounded_to_pairs<true>(x, y);
                });
        }
    }
    store_all(acc, scores, ldc);
}

// The products of M rows of weights and the elements [first, first + 16 N) of the values of some panels. `scales`,
// `zeros`: the scales and zero points of all tokens.
template <CacheFormat FORMAT, int M, int N>
void coded_sums(
    const Caches<bf16>& caches, const bf16* weights, const CodedPanel* panels, long count, const float* scales,
    const float* zeros, long first, float* out
) {
    const long V = caches.value_dim;
    F acc[M][N];
    clear(acc);
    for (long i = 0; i < count; ++i)
        for (long t = 0; t < LANES; t += 2) {
            const long token = i * LANES + t;
            const F scale[2] = {set1(scales[token]), set1(scales[token + 1])};
            const F zero[2] = {set1(zeros[token]), set1(zeros[token + 1])};
            const uint8_t* codes = panels[i].values + t * V + first;
            __builtin_prefetch(panels[i].next_values + t * V + first);
            __builtin_prefetch(panels[i].next_values + (t + 1) * V + first);
            step_of(acc, weights + token, KV_SPLIT, [&](int n) {
                const F x = cached_values<FORMAT>(codes + n * LANES, scale[0], zero[0]);
                const F y = cached_values<FORMAT>(codes + V + n * LANES, scale[1], zero[1]);
                return rounded_to_pairs<true>(x, y);
            });
        }
    store_all(acc, out + first, V);
}

constexpr int CODED_WIDE = 4, CODED_NARROW = 2;

template <CacheFormat FORMAT, int N, int... M>
auto coded_scores_of(long m, std::integer_sequence<int, M...>) {
    static constexpr decltype(&coded_scores<FORMAT, 1, N>) tiles[] = {coded_scores<FORMAT, M + 1, N>...};
    return tiles[m - 1];
}
template <CacheFormat FORMAT, int N, int... M>
auto coded_sums_of(long m, std::integer_sequence<int, M...>) {
    static constexpr decltype(&coded_sums<FORMAT, 1, N>) tiles[] = {coded_sums<FORMAT, M + 1, N>...};
    return tiles[m - 1];
}

// Calls body(N, first) for the panels [first, first + N) of `count` panels, where N is a constant: as many as fit into
// registers for m rows.
template <class Body>
void visit_panels(long m, long count, const Body& body) {
    for (long i = 0; i < count;) {
        if (m * CODED_WIDE <= ACCUMULATORS && count - i >= CODED_WIDE)
            body(std::integral_constant<int, CODED_WIDE>(), i), i += CODED_WIDE;
        else if (count - i >= CODED_NARROW)
            body(std::integral_constant<int, CODED_NARROW>(), i), i += CODED_NARROW;
        else
            body(std::integral_constant<int, 1>(), i), ++i;
    }
}

template <int N>
using RowsOfTile = std::make_integer_sequence<int, larger(1, smaller(CODED_ROWS, ACCUMULATORS / N))>;

// The scores [m, KV_SPLIT] of m queries for the keys of some panels.
template <CacheFormat FORMAT>
void multiply_keys(const Caches<bf16>& caches, const bf16* q, long m, const CodedPanel* panels, long count, float* scores) {
    visit_panels(m, count, [&](auto N, long first) {
        coded_scores_of<FORMAT, N>(m, RowsOfTile<N>())(caches, q, panels + first, scores + first * LANES, KV_SPLIT);
    });
}

// The sums [m, value_dim] of the values of some panels with m rows of weights [m, KV_SPLIT].
template <CacheFormat FORMAT>
void multiply_values(
    const Caches<bf16>& caches, const bf16* weights, long m, const CodedPanel* panels, long count, const float* scales,
    const float* zeros, float* out
) {
    visit_panels(m, caches.value_dim / LANES, [&](auto N, long first) {
        coded_sums_of<FORMAT, N>(m, RowsOfTile<N>())(
            caches, weights, panels, count, scales, zeros, first * LANES, out
        );
    });
}
