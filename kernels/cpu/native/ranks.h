// The sums of several ranks. A part of kernels.h.

constexpr long MOST_RANKS = 8;

// Computes sums [count, columns], of which each rank computes a subtree, and passes them to `finish(row, column, sums)`,
// 16 columns at a time. `add(start, rows, out)` writes this rank's subtrees for the rows [start, start + rows) to `out`
// [rows, columns]. Each rank adds the subtrees of all ranks as a balanced binary tree.
//
// After a failure, `finish` is no longer called.
template <class Add, class Finish>
void exchange_sums(RankExchange& ranks, long count, long columns, const Add& add_own, const Finish& finish) {
    constexpr long FOLDED_ROWS = 4;
    const long most = ranks.slot_bytes / (columns * static_cast<long>(sizeof(float)));  // at least 1
    for (long start = 0; start < count && !ranks.has_failed; start += most) {
        const long rows = smaller(most, count - start);
        const float* slots[MOST_RANKS];
        for (long rank = 0; rank < ranks.size; ++rank) slots[rank] = next_slot(ranks, rank);
        add_own(start, rows, next_slot(ranks, ranks.rank));
        if (!meet(ranks)) return;
        parallel(round_up(rows, FOLDED_ROWS) / FOLDED_ROWS, [&](long task) {
            for (long row = task * FOLDED_ROWS; row < smaller(rows, (task + 1) * FOLDED_ROWS); ++row)
                for (long column = 0; column < columns; column += LANES) {
                    F sums[MOST_RANKS];
                    for (long rank = 0; rank < ranks.size; ++rank)
                        sums[rank] = load(slots[rank] + row * columns + column, columns - column);
                    for (long left = ranks.size / 2; left > 0; left /= 2)
                        for (long i = 0; i < left; ++i) sums[i] = add(sums[2 * i], sums[2 * i + 1]);
                    finish(start + row, column, sums[0]);
                }
        });
    }
}
