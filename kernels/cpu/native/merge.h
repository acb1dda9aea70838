// `Backend.merge`: weights with an adapter in them. A part of kernels.h.
//
// Each element adds its products one by one, and products are rounded before they are added, so that its bits are those
// that any other instruction set, or torch, gives. So bfloat16 is rounded without the machine's own instructions.

constexpr long MERGE_ROWS = 4;

inline void store_exact(float* p, F x) { store(p, x); }
inline void store_exact(bf16* p, F x) { store_halves(p, exact_bf16(x)); }
template <class T>
inline void store_exact(T* p, F x, long n) {
    if (n >= LANES) return store_exact(p, x);
    T part[LANES];
    store_exact(static_cast<T*>(part), x);
    memcpy(p, part, static_cast<size_t>(n) * sizeof(T));
}

// ROWS rows from `row` on, and the columns of a vector from `column` on.
template <long ROWS, class T>
inline void merge_block(const MergeArgs<T>& args, long row, long column) {
    const long n = args.columns - column;
    F sums[ROWS];
    for (F& sum : sums) sum = set1(0.0f);
    for (long k = 0; k < args.rank; ++k) {
        const F a = load(args.a + k * args.columns + column, n);
        for (long i = 0; i < ROWS; ++i) sums[i] = add(sums[i], mul(set1(args.b[(row + i) * args.rank + k]), a));
    }
    for (long i = 0; i < ROWS; ++i) {
        const long place = (row + i) * args.columns + column;
        store_exact(args.out + place, add(load(args.weight + place, n), mul(sums[i], set1(args.scale))), n);
    }
}

template <class T>
void merge(const MergeArgs<T>& args) {
    const long whole = args.rows / MERGE_ROWS * MERGE_ROWS;
    for (long row = 0; row < whole; row += MERGE_ROWS)
        for (long column = 0; column < args.columns; column += LANES) merge_block<MERGE_ROWS>(args, row, column);
    for (long row = whole; row < args.rows; ++row)
        for (long column = 0; column < args.columns; column += LANES) merge_block<1>(args, row, column);
}
