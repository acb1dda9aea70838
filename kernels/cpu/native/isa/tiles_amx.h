// The product of bfloat16 on AMX tiles: two tiles of up to 16 rows times two panels at a time.
//
// A tile instruction sums its 16 steps (32 columns) from zero and adds the sum to the accumulator. Columns are
// therefore cut at multiples of 32 for any number of rows.

#ifdef EMULATE_TILES
#include "tiles_emulated.h"
#endif

constexpr long TILE_ROWS = 16, TILE_STEPS = 16;
template <>
constexpr long PASS_ROWS<bf16> = 2 * TILE_ROWS;

// Accumulators 0 to 3: (upper, lower) rows by (left, right) panel; 4 and 5: upper and lower rows; 6 and 7: panels.
inline void configure_tiles(long upper, long lower, long steps) {
    alignas(64) uint8_t config[64] = {1};
    const auto shape = [&](int tile, long rows, long bytes) {
        const uint16_t width = static_cast<uint16_t>(rows > 0 ? bytes : 0);
        memcpy(config + 16 + 2 * tile, &width, sizeof(width));
        config[48 + tile] = static_cast<uint8_t>(rows);
    };
    for (int i = 0; i < 4; ++i) shape(i, i < 2 ? upper : lower, 4 * LANES);
    shape(4, upper, 4 * steps);
    shape(5, lower, 4 * steps);
    shape(6, steps, 4 * LANES);
    shape(7, steps, 4 * LANES);
    asm volatile("" : : "m"(config));  // GCC 12 thinks the next line reads 8 bytes, and may drop the other stores
    _tile_loadconfig(config);
}

// Computes one block of accumulators over steps [first, first + count * height) of every round.
template <bool LOWER, bool RIGHT>
void tile_block(const Factors<bf16>& factors, long first, long count, long height, bool add_to, float* c, long ldc) {
    const auto& [a, lda, b, width, stride, rounds, steps, next, next_stride, next_table, next_offset] = factors;
    const long row_bytes = lda * 2, step_bytes = stride * 2, out_bytes = ldc * 4;
    float* lower = c + TILE_ROWS * ldc;
    if (add_to) {
        _tile_loadd(0, c, out_bytes);
        if (RIGHT) _tile_loadd(1, c + LANES, out_bytes);
        if (LOWER) _tile_loadd(2, lower, out_bytes);
        if (LOWER && RIGHT) _tile_loadd(3, lower + LANES, out_bytes);
    } else {
        _tile_zero(0);
        if (RIGHT) _tile_zero(1);
        if (LOWER) _tile_zero(2);
        if (LOWER && RIGHT) _tile_zero(3);
    }
    for (long i = 0; i < rounds * count; ++i) {
        const long round = i / count, s = first + i % count * height;
        const bf16 *const *panels = b + round * width, *const *later = next + round * width;
        const bf16* left = a + (round * steps + s) * PAIR<bf16>;
        for (long j = s; j < s + height; ++j) {
            __builtin_prefetch(later[0] + j * next_stride);
            if (RIGHT) __builtin_prefetch(later[1] + j * next_stride);
        }
        _tile_loadd(4, left, row_bytes);
        _tile_loadd(6, panels[0] + s * stride, step_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (RIGHT) _tile_loadd(7, panels[1] + s * stride, step_bytes);
        if (RIGHT) _tile_dpbf16ps(1, 4, 7);
        if (LOWER) _tile_loadd(5, left + TILE_ROWS * lda, row_bytes);
        if (LOWER) _tile_dpbf16ps(2, 5, 6);
        if (LOWER && RIGHT) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, out_bytes);
    if (RIGHT) _tile_stored(1, c + LANES, out_bytes);
    if (LOWER) _tile_stored(2, lower, out_bytes);
    if (LOWER && RIGHT) _tile_stored(3, lower + LANES, out_bytes);
}

inline void multiply_tiles(
    const Factors<bf16>& factors, long m, long first, long count, long height, bool add_to, float* c, long ldc
) {
    for (long row = 0; row < m; row += PASS_ROWS<bf16>) {
        const long upper = smaller(TILE_ROWS, m - row), lower = larger(0, smaller(TILE_ROWS, m - row - TILE_ROWS));
        configure_tiles(upper, lower, height);
        for (long i = 0; i < factors.width; i += 2) {
            const bool right = i + 1 < factors.width;
            const auto block = lower > 0 ? (right ? tile_block<true, true> : tile_block<true, false>)
                                         : (right ? tile_block<false, true> : tile_block<false, false>);
            Factors<bf16> part = factors;
            part.a += row * part.lda, part.b += i, part.next += i;
            if (part.next_table > 0)
                part.next += row / PASS_ROWS<bf16> * part.next_table;
            else if (row > 0)
                part.next = part.b, part.next_stride = part.stride;  // the first pass has prefetched the data
            block(part, first, count, height, add_to, c + row * ldc + i * LANES, ldc);
        }
    }
}

template <>
inline void multiply(Factors<bf16>& factors, long m, bool add_to, float* c, long ldc) {
    const long whole = factors.steps / TILE_STEPS, rest = factors.steps % TILE_STEPS;
    if (whole > 0) multiply_tiles(factors, m, 0, whole, TILE_STEPS, add_to, c, ldc);
    if (rest > 0) multiply_tiles(factors, m, whole * TILE_STEPS, 1, rest, add_to || whole > 0, c, ldc);
}
