// Products with quantized activations. kernels/dynamic.py has the definition, and kernels/cpu/quantized.py the panels.
// A part of kernels.h.
//
// INTEGERS: the codes of a panel are the integers of the matrix plus 128, since the instructions for products of bytes
// multiply unsigned by signed bytes. 128 times the sum of a row's integers is subtracted from its products.
// Intermediate sums of 32 bits may wrap around, but the final sum is exact.
//
// E4M3_NUMBERS: every T represents the numbers exactly. Rows of activations are converted to rows of numbers, and
// panels are expanded to numbers (codes.h). The product is then computed as for plain rows and plain panels
// (products.h).

// The integers of rows of activations, padded with zeros to a multiple of CODE_COLUMNS. Without products of bytes, the
// integers have 16 bits, and each four columns are in the order 0, 2, 1, 3.
#ifdef HAS_DOT_INT8
typedef int8_t Code;
constexpr int DYNAMIC_ACCUMULATORS = ACCUMULATORS;
#else
typedef int16_t Code;
constexpr int DYNAMIC_ACCUMULATORS = ACCUMULATORS >= 3 ? ACCUMULATORS * 2 / 3 : 1;
#endif
constexpr long QUAD = 4, DYNAMIC_BLOCK = 512;
constexpr int DYNAMIC_WIDE = DYNAMIC_ACCUMULATORS >= 16 ? 4 : 1, DYNAMIC_NARROW = DYNAMIC_ACCUMULATORS >= 8 ? 2 : 1;
constexpr float LARGEST_INT8 = 127.0f, LEAST_CODE_SCALE = 0x1p-126f;

// Rows of activations as integers, `size` integers in each row. `data`: null if no matrix needs them. A row also has the
// sums of its integers before every LANES columns, and its scale.
struct CodedRows {
    char* data = nullptr;
    long size = 0;

    long row_bytes() const {
        const long sums = size / LANES + 1;
        return round_up(size * static_cast<long>(sizeof(Code)) + sums * 4 + static_cast<long>(sizeof(float)), 64);
    }
    long stride() const { return row_bytes() / static_cast<long>(sizeof(Code)); }
    CodedRows from(long row) const { return data == nullptr ? *this : CodedRows{data + row * row_bytes(), size}; }
    Code* codes() const { return reinterpret_cast<Code*>(data); }
    int32_t* sums() const { return reinterpret_cast<int32_t*>(codes() + size); }
    float& scale() const { return *reinterpret_cast<float*>(sums() + size / LANES + 1); }
};

// Rows of activations as numbers of the kind e4m3, and their scales. `data`: null if no matrix needs them.
template <class T>
struct NumberRows {
    T* data = nullptr;
    long stride = 0;
    float* scales = nullptr;

    NumberRows from(long row) const {
        return data == nullptr ? *this : NumberRows{data + row * stride, stride, scales + row};
    }
};

// The rows of a product's left side.
template <class T>
struct Rows {
    const T* data;
    long stride;
    CodedRows coded = {};
    NumberRows<T> numbers = {};

    Rows from(long row) const { return {data + row * stride, stride, coded.from(row), numbers.from(row)}; }
};

// Returns the largest magnitude of a row, or NaN if an element is NaN or infinite.
template <class T>
float row_peak(const T* x, long n) {
    F most = set1(0.0f), zeros = set1(0.0f);
    for (long i = 0; i < n; i += LANES) {
        const F value = load(x + i, n - i);
        most = max(most, floats(bit_and(bits(value), set1(0x7FFFFFFFu))));
        zeros = fma(value, set1(0.0f), zeros);
    }
    return sum(zeros) == 0.0f ? peak(most) : NAN;
}

// Returns the scale of a row with this peak, for numbers up to `largest`. NaN if the peak is NaN.
inline float scale_of(float peak, float largest) {
    const float most = static_cast<float>((1.0 - 0x1p-22) * 0x1p127 * 2.0 / static_cast<double>(largest));
    const float scale = peak / largest;
    return scale < LEAST_CODE_SCALE ? LEAST_CODE_SCALE : scale > most ? most : scale;
}

inline F bounded_quotient(F x, float scale, float largest) {
    return max(set1(-largest), min(set1(largest), div(x, set1(scale))));
}

// Quantizes a row of n elements with this peak to integers.
template <class T>
void quantize_row(const T* x, long n, float peak, const CodedRows& row) {
    const float scale = scale_of(peak, LARGEST_INT8);
    if (scale != scale) memset(row.data, 0, static_cast<size_t>(row.row_bytes()));
    row.scale() = scale;
    if (scale != scale) return;
    Code* const codes = row.codes();
    int32_t total = 0;
    for (long i = 0; i < row.size; i += LANES) {
        const F number = round(bounded_quotient(i < n ? load(x + i, n - i) : set1(0.0f), scale, LARGEST_INT8));
        row.sums()[i / LANES] = total;
        total += static_cast<int32_t>(sum(number));
#ifdef HAS_DOT_INT8
        store_bytes(codes + i, number);
#else
        int8_t bytes[LANES];
        store_bytes(bytes, number);
        for (long j = 0; j < LANES; j += QUAD)
            for (long k = 0; k < QUAD; ++k) codes[i + j + k] = bytes[j + (k % 2 * 2 + k / 2)];
#endif
    }
    row.sums()[row.size / LANES] = total;
}

// Rounds x to the nearest number of the kind e4m3, for |x| up to LARGEST_E4M3.
inline F rounded_to_e4m3(F x) {
    const U sign = bit_and(bits(x), set1(0x80000000u));
    const F magnitude = floats(bit_xor(bits(x), sign));
    // Near x, e4m3 numbers are 2^-3 * `power` apart, and so are float32 numbers near `aligned`. Adding `aligned`
    // therefore rounds to e4m3.
    const F power = max(set1(0x1p-6f), floats(bit_and(bits(x), set1(0x7F800000u))));
    const F aligned = mul(power, set1(0x1p20f));
    return floats(bit_xor(bits(sub(add(magnitude, aligned), aligned)), sign));
}

// Quantizes a row with this peak to numbers of the kind e4m3.
template <class T>
void quantize_row(const T* x, float peak, const NumberRows<T>& row) {
    const float scale = scale_of(peak, LARGEST_E4M3);
    *row.scales = scale;
    if (scale != scale) {
        memset(row.data, 0, static_cast<size_t>(row.stride) * sizeof(T));
        return;
    }
    for (long i = 0; i < row.stride; i += LANES) {
        const long rest = row.stride - i;
        store(row.data + i, rounded_to_e4m3(bounded_quotient(load(x + i, rest), scale, LARGEST_E4M3)), rest);
    }
}

constexpr long QUANTIZED_ROWS = 4;

// Quantizes `count` rows of `columns` elements to these kinds of numbers. Zeros pad each row to its stride. `purpose`:
// what the memory is for. `peaks`: the peaks of whole rows if `rows` has only some of their columns; otherwise null.
template <class T>
void quantize(
    Rows<T>& rows, unsigned kinds, long count, long columns, Purpose purpose, const float* peaks = nullptr
) {
    if (kinds == 0) return;
    CodedRows coded = {nullptr, round_up(columns, CODE_COLUMNS)};
    const long codes = (kinds & INTEGERS) != 0 ? count * coded.row_bytes() : 0;
    const long numbers = (kinds & E4M3_NUMBERS) != 0 ? round_up(count * rows.stride * static_cast<long>(sizeof(T)), 64) : 0;
    coded.data = scratch<char>(purpose, codes + numbers + count * static_cast<long>(sizeof(float)));
    if ((kinds & E4M3_NUMBERS) != 0) {
        char* const data = coded.data + codes;
        rows.numbers = {reinterpret_cast<T*>(data), rows.stride, reinterpret_cast<float*>(data + numbers)};
    }
    if ((kinds & INTEGERS) != 0) rows.coded = coded;
    parallel(round_up(count, QUANTIZED_ROWS) / QUANTIZED_ROWS, [&](long task) {
        for (long row = task * QUANTIZED_ROWS; row < smaller(count, (task + 1) * QUANTIZED_ROWS); ++row) {
            const T* own = rows.data + row * rows.stride;
            const float peak = peaks != nullptr ? peaks[row] : row_peak(own, columns);
            if ((kinds & INTEGERS) != 0) quantize_row(own, columns, peak, rows.coded.from(row));
            if ((kinds & E4M3_NUMBERS) != 0) quantize_row(own, peak, rows.numbers.from(row));
        }
    });
}

// Adds the products of the four columns of 16 rows of a matrix with M rows of activations.
template <int M, int N>
inline void coded_step(U (&acc)[M][N], const Code* a, long lda, const uint8_t* const* b, long offset) {
#ifdef HAS_DOT_INT8
    U right[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) right[n] = load(reinterpret_cast<const uint32_t*>(b[n] + offset));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const U left = set1(word_at(a + m * lda));
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = add_byte_products(acc[m][n], right[n], left);
    }
#else
    U even[N], odd[N];
    const U lower = set1(0x00FF00FFu);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
        const U codes = load(reinterpret_cast<const uint32_t*>(b[n] + offset));
        even[n] = bit_and(codes, lower), odd[n] = bit_and(shift_right<8>(codes), lower);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const U first = set1(word_at(a + m * lda)), second = set1(word_at(a + m * lda + 2));
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            acc[m][n] = add_half_products(add_half_products(acc[m][n], even[n], first), odd[n], second);
    }
#endif
}

// As `tile`, for `quads` times four columns. The sums are integers. Prefetches the line at next[n] + step * next_stride
// in each step.
template <int M, int N>
void coded_tile(
    const Code* a, long lda, const uint8_t* const* b, long quads, const uint8_t* const* next, long next_stride,
    bool add_to, float* c, long ldc
) {
    U acc[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = set1(0u);
    for (long s = 0; s < quads; ++s) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) __builtin_prefetch(next[n] + s * next_stride);
        coded_step(acc, a + s * QUAD, lda, b, s * QUAD * LANES);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            float* out = c + m * ldc + n * LANES;
            store(out, floats(add_to ? add(bits(load(out)), acc[m][n]) : acc[m][n]));
        }
}

template <int N, int... M>
auto coded_tile_of(long m, std::integer_sequence<int, M...>) {
    static constexpr decltype(&coded_tile<1, N>) tiles[] = {coded_tile<M + 1, N>...};
    return tiles[m - 1];
}

// Multiplies all rows by N panels. Each tile prefetches its share of `bytes` bytes of each panel.
template <int N>
void multiply_coded_panels(
    const CodedRows& a, long m, long column, const uint8_t* const* b, long bytes, const uint8_t* const* next,
    bool add_to, float* c, long ldc
) {
    constexpr int MOST = DYNAMIC_ACCUMULATORS / N;
    constexpr long LINE_BYTES = QUAD * LANES;
    const long parts = (m + MOST - 1) / MOST, fewest = m / parts, longer = m % parts;
    const Code* left = a.codes() + column;
    for (long i = 0; i < parts; ++i) {
        const long rows = fewest + (i < longer);
        const uint8_t* own[N];
        for (int n = 0; n < N; ++n) own[n] = next[n] + bytes * i / parts;
        coded_tile_of<N>(rows, std::make_integer_sequence<int, MOST>())(
            left, a.stride(), b, bytes / LINE_BYTES, own, (LINE_BYTES + parts - 1) / parts, add_to, c, ldc
        );
        left += rows * a.stride(), c += rows * ldc;
    }
}

// Multiplies sums of 16 rows of a matrix by the scales of these rows, then by the scale of a row of activations.
template <class T>
inline F scaled(F sums, const Panel<T>& panel, float scale) {
    return mul(mul(sums, load(reinterpret_cast<const float*>(panel.data))), set1(scale));
}

// Subtracts the offset of the codes from sums over the columns [first, last), and multiplies the sums by the scales.
template <class T>
void finish_coded(
    const CodedRows& a, long m, const Panel<T>* panels, long n, long first, long last, float* c, long ldc
) {
    for (long row = 0; row < m; ++row) {
        const CodedRows own = a.from(row);
        const int32_t total = own.sums()[last / LANES] - own.sums()[first / LANES];
        const U offset = set1(static_cast<uint32_t>(total) * 128u);
        for (long i = 0; i < n; ++i) {
            float* out = c + row * ldc + i * LANES;
            store(out, scaled(convert_signed(sub(bits(load(out)), offset)), panels[i], own.scale()));
        }
    }
}

// Multiplies sums of products of numbers by the scales.
template <class T>
void finish_numbers(const NumberRows<T>& a, long m, const Panel<T>* panels, long n, float* c, long ldc) {
    for (long row = 0; row < m; ++row)
        for (long i = 0; i < n; ++i) {
            float* out = c + row * ldc + i * LANES;
            store(out, scaled(load(out), panels[i], a.scales[row]));
        }
}

// As `multiply_all`, for panels of integers.
template <class T>
void multiply_coded(
    const CodedRows& a, long m, const Panel<T>* panels, long n, long first_step, long end_step, long hop, float* c,
    long ldc
) {
    constexpr long HEADER = LANES * sizeof(float);
    const long columns = round_up(panels->columns, CODE_COLUMNS), first = first_step * PAIR<T>;
    const long last = end_step == panels->steps() ? columns : end_step * PAIR<T>;
    for (long start = first; start < last; start += DYNAMIC_BLOCK) {
        const long stop = smaller(last, start + DYNAMIC_BLOCK), bytes = (stop - start) * LANES;
        for (long i = 0, width; i < n; i += width) {
            width = m * DYNAMIC_WIDE <= DYNAMIC_ACCUMULATORS && n - i >= DYNAMIC_WIDE ? DYNAMIC_WIDE
                    : n - i >= DYNAMIC_NARROW                                      ? DYNAMIC_NARROW
                                                                                 : 1;
            const uint8_t *b[DYNAMIC_WIDE > DYNAMIC_NARROW ? DYNAMIC_WIDE : DYNAMIC_NARROW], *next[sizeof(b) / sizeof(*b)];
            for (long j = 0; j < width; ++j) {
                const Panel<T>& panel = panels[i + j];
                b[j] = reinterpret_cast<const uint8_t*>(panel.data) + HEADER + start * LANES;
                next[j] = stop < columns ? b[j] + bytes : reinterpret_cast<const uint8_t*>(panel.later(hop));
            }
            const auto multiply_some = width == DYNAMIC_WIDE     ? multiply_coded_panels<DYNAMIC_WIDE>
                                       : width == DYNAMIC_NARROW ? multiply_coded_panels<DYNAMIC_NARROW>
                                                               : multiply_coded_panels<1>;
            multiply_some(a, m, start, b, bytes, next, start > first, c + i * LANES, ldc);
        }
    }
    finish_coded(a, m, panels, n, first, last, c, ldc);
}
