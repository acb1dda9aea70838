// Masks of logits: a bit for each token, the lowest bit first. A part of api.cpp and of kernels.h.

constexpr long MASK_BITS = 32;  // as in kernels/contract.py

struct EachBit {
    uint32_t value[MASK_BITS];
    constexpr EachBit() : value() {
        for (long i = 0; i < MASK_BITS; ++i) value[i] = 1u << i;
    }
};
constexpr EachBit BIT;  // vectors have no shift by different numbers of bits on every machine

// Sets the logits without their bit in `word` to -inf.
inline void mask_word(float* logits, long n, uint32_t word) {
    for (long i = 0; i < n; ++i) logits[i] = (word & BIT.value[i]) != 0 ? logits[i] : -INFINITY;
}

// Sets n logits without their bit in `mask` to -inf.
inline void mask_row(float* logits, long n, const uint32_t* mask) {
    constexpr uint32_t ALL = 0xFFFFFFFFu;
    for (long i = 0; i + MASK_BITS <= n; i += MASK_BITS)
        if (mask[i / MASK_BITS] != ALL) mask_word(logits + i, MASK_BITS, mask[i / MASK_BITS]);
    const long whole = n / MASK_BITS * MASK_BITS;
    if (whole < n) mask_word(logits + whole, n - whole, mask[whole / MASK_BITS]);
}
