// The sums of several ranks. A part of kernels.h.

constexpr long MOST_RANKS = 8;

// Adds 16 columns of the subtrees of SIZE ranks as a balanced binary tree.
template <long SIZE>
F add_subtrees(const float* const* slots, long at, long rest) {
    F sums[SIZE];
    for (long rank = 0; rank < SIZE; ++rank) sums[rank] = load(slots[rank] + at, rest);
    for (long left = SIZE / 2; left > 0; left /= 2)
        for (long i = 0; i < left; ++i) sums[i] = add(sums[2 * i], sums[2 * i + 1]);
    return sums[0];
}

template <long SIZE, class Finish>
void add_rows(const float* const* slots, long start, long rows, long columns, const Finish& finish) {
    constexpr long TASK_ROWS = 32;
    parallel(round_up(rows, TASK_ROWS) / TASK_ROWS, [&](long task) {
        for (long row = task * TASK_ROWS; row < smaller(rows, (task + 1) * TASK_ROWS); ++row)
            for (long column = 0; column < columns; column += LANES)
                finish(start + row, column, add_subtrees<SIZE>(slots, row * columns + column, columns - column));
    });
}

// Returns the peaks of rows of which each rank has some columns (kernels/dynamic.py). A row's peak is NaN if the peak
// of any rank's columns is NaN. After a failure, the peaks are arbitrary.
template <class T>
const float* exchange_peaks(RankExchange& ranks, const Input<T>& x) {
    float* peaks = scratch<float>(PEAKS, x.count);
    const long most = ranks.slot_bytes / static_cast<long>(sizeof(float));
    for (long start = 0; start < x.count; start += most) {
        const long rows = smaller(most, x.count - start);
        const float* slots[MOST_RANKS];
        for (long rank = 0; rank < ranks.size; ++rank) slots[rank] = next_slot(ranks, rank);
        float* own = next_slot(ranks, ranks.rank);
        parallel(rows, [&](long row) { own[row] = row_peak(x.data + (start + row) * x.columns, x.columns); });
        if (!meet(ranks)) return peaks;
        for (long row = 0; row < rows; ++row) {
            float peak = slots[0][row];
            for (long rank = 1; rank < ranks.size; ++rank)
                if (!(slots[rank][row] <= peak)) peak = peak != peak ? peak : slots[rank][row];
            peaks[start + row] = peak;
        }
    }
    return peaks;
}

// Computes sums [count, columns], of which each rank computes a subtree, and passes them to `finish(row, column, sums)`,
// 16 columns at a time. `add_own(start, rows, out)` writes this rank's subtrees for the rows [start, start + rows) to `out`
// [rows, columns]. Each rank adds the subtrees of all ranks as a balanced binary tree.
//
// After a failure, `finish` is no longer called.
template <class Add, class Finish>
void exchange_sums(RankExchange& ranks, long count, long columns, const Add& add_own, const Finish& finish) {
    const long most = ranks.slot_bytes / (columns * static_cast<long>(sizeof(float)));  // at least 1
    const auto add_all = ranks.size == 8   ? add_rows<8, Finish>
                         : ranks.size == 4 ? add_rows<4, Finish>
                         : ranks.size == 2 ? add_rows<2, Finish>
                                           : add_rows<1, Finish>;
    for (long start = 0; start < count && !ranks.has_failed; start += most) {
        const long rows = smaller(most, count - start);
        const float* slots[MOST_RANKS];
        for (long rank = 0; rank < ranks.size; ++rank) slots[rank] = next_slot(ranks, rank);
        add_own(start, rows, next_slot(ranks, ranks.rank));
        if (!meet(ranks)) return;
        add_all(slots, start, rows, columns, finish);
    }
}
