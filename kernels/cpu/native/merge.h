// `Backend.merge`: weights with a merged adapter. A part of kernels.h.
//
// Each element adds its products one by one, and each product is rounded before the addition. The bits are therefore
// the same on every instruction set, and in torch. `exact_bf16` is used because AVX-512's own rounding to bfloat16
// flushes denormal numbers.

constexpr long MERGE_ROWS = 4, MERGE_VECTORS = 4;

inline void store_exact(float* p, F x) { store(p, x); }
inline void store_exact(bf16* p, F x) { store_halves(p, exact_bf16(x)); }
template <class T>
inline void store_exact(T* p, F x, long n) {
    if (n >= LANES) return store_exact(p, x);
    T part[LANES];
    store_exact(static_cast<T*>(part), x);
    memcpy(p, part, static_cast<size_t>(n) * sizeof(T));
}

// ROWS rows from `row` on, and VECTORS vectors of columns from `column` on. If IS_CUT, the last vector has `n` columns.
template <long ROWS, long VECTORS, bool IS_CUT, class T>
inline void merge_block(const MergeArgs<T>& args, long row, long column, long n = LANES) {
    const auto read = [n](const auto* p) { return IS_CUT ? load(p, n) : load(p); };
    F sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (auto& each : sums)
#pragma GCC unroll 16
        for (F& sum : each) sum = set1(0.0f);
    for (long k = 0; k < args.rank; ++k) {
        F a[VECTORS];
#pragma GCC unroll 16
        for (long j = 0; j < VECTORS; ++j) a[j] = read(args.a + k * args.columns + column + j * LANES);
#pragma GCC unroll 16
        for (long i = 0; i < ROWS; ++i) {
            const F b = set1(args.b[(row + i) * args.rank + k]);
#pragma GCC unroll 16
            for (long j = 0; j < VECTORS; ++j) sums[i][j] = add(sums[i][j], mul(b, a[j]));
        }
    }
    const F scale = set1(args.scale);
#pragma GCC unroll 16
    for (long i = 0; i < ROWS; ++i)
#pragma GCC unroll 16
        for (long j = 0; j < VECTORS; ++j) {
            const long place = (row + i) * args.columns + column + j * LANES;
            store_exact(args.out + place, add(read(args.weight + place), mul(sums[i][j], scale)), n);
        }
}

template <long ROWS, class T>
inline void merge_rows(const MergeArgs<T>& args, long row) {
    constexpr long WIDTH = MERGE_VECTORS * LANES;
    long column = 0;
    for (; column + WIDTH <= args.columns; column += WIDTH) merge_block<ROWS, MERGE_VECTORS, false>(args, row, column);
    for (; column < args.columns; column += LANES)
        merge_block<ROWS, 1, true>(args, row, column, args.columns - column);
}

template <class T>
void merge(const MergeArgs<T>& args) {
    const long whole = args.rows / MERGE_ROWS * MERGE_ROWS;
    for (long row = 0; row < whole; row += MERGE_ROWS) merge_rows<MERGE_ROWS>(args, row);
    for (long row = whole; row < args.rows; ++row) merge_rows<1>(args, row);
}
