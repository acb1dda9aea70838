// Sixteen lanes as an array, which the compiler may vectorize. No fused multiply-add.

struct F {
    float v[16];
};
struct U {
    uint32_t v[16];
};

#define EACH_LANE(type, expression) \
    type out; \
    for (int i = 0; i < 16; ++i) out.v[i] = expression; \
    return out

inline F set1(float x) { EACH_LANE(F, x); }
inline F load(const float* p) { EACH_LANE(F, p[i]); }
inline void store(float* p, F x) { memcpy(p, x.v, sizeof(x.v)); }
inline F add(F a, F b) { EACH_LANE(F, a.v[i] + b.v[i]); }
inline F sub(F a, F b) { EACH_LANE(F, a.v[i] - b.v[i]); }
inline F mul(F a, F b) { EACH_LANE(F, a.v[i] * b.v[i]); }
inline F div(F a, F b) { EACH_LANE(F, a.v[i] / b.v[i]); }
inline F fma(F a, F b, F c) { EACH_LANE(F, a.v[i] * b.v[i] + c.v[i]); }
inline F max(F a, F b) { EACH_LANE(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F min(F a, F b) { EACH_LANE(F, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
// Exact for |x| < 2^22. Callers pass no larger values.
inline F round(F x) { EACH_LANE(F, (x.v[i] + 12582912.0f) - 12582912.0f); }
inline F floor(F x) {
    const F nearest = round(x);
    EACH_LANE(F, nearest.v[i] > x.v[i] ? nearest.v[i] - 1.0f : nearest.v[i]);
}

inline U set1(uint32_t x) { EACH_LANE(U, x); }
inline U load(const uint32_t* p) { EACH_LANE(U, p[i]); }
inline U load(const uint8_t* p) { EACH_LANE(U, p[i]); }
inline U add(U a, U b) { EACH_LANE(U, a.v[i] + b.v[i]); }
inline U sub(U a, U b) { EACH_LANE(U, a.v[i] - b.v[i]); }
inline U bit_xor(U a, U b) { EACH_LANE(U, a.v[i] ^ b.v[i]); }
inline U bit_and(U a, U b) { EACH_LANE(U, a.v[i] & b.v[i]); }
template <int N>
inline U shift_left(U a) { EACH_LANE(U, a.v[i] << N); }
template <int N>
inline U shift_right(U a) { EACH_LANE(U, a.v[i] >> N); }

inline U bits(F x) {
    U out;
    memcpy(out.v, x.v, sizeof(x.v));
    return out;
}
inline F floats(U x) {
    F out;
    memcpy(out.v, x.v, sizeof(x.v));
    return out;
}
inline F convert_signed(U x) { EACH_LANE(F, static_cast<float>(static_cast<int32_t>(x.v[i]))); }
inline F convert_unsigned(U x) { EACH_LANE(F, static_cast<float>(x.v[i])); }
inline F times_power_of_2(F x, F n) {
    // Two exact steps give correct results beyond the range of a single factor.
    const F bounded = max(set1(-250.0f), min(set1(250.0f), n));
    const F first = round(mul(bounded, set1(0.5f))), second = sub(bounded, first);
    const auto power = [](F e) {
        U exponent;
        for (int i = 0; i < 16; ++i) {
            // The comparison replaces NaN, which no integer can represent.
            const float held = e.v[i] >= -126.0f ? e.v[i] : -126.0f;
            exponent.v[i] = static_cast<uint32_t>(static_cast<int32_t>(held) + 127) << 23;
        }
        return floats(exponent);
    };
    return mul(mul(x, power(first)), power(second));
}

// Splits x into a fraction in [0, 1] and floor(x), for `times_power_of_2`. Beyond +-250 the fraction is arbitrary.
inline F split(F x, F& fraction) {
    const F held = max(set1(-250.0f), min(set1(250.0f), x)), whole = floor(held);
    fraction = sub(held, whole);
    return whole;
}

inline F signed_bytes(const uint8_t* p) { EACH_LANE(F, static_cast<float>(static_cast<int8_t>(p[i]))); }
// Stores integers from -128 to 127.
inline void store_bytes(int8_t* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x.v[i]);
}
// In each lane, adds the sum of the products of its signed halves.
inline U add_half_products(U sums, U a, U b) {
    const auto half = [](uint32_t x, int shift) { return static_cast<int32_t>(static_cast<int16_t>(x >> shift)); };
    EACH_LANE(
        U, sums.v[i] + static_cast<uint32_t>(half(a.v[i], 0) * half(b.v[i], 0)) +
               static_cast<uint32_t>(half(a.v[i], 16) * half(b.v[i], 16))
    );
}
inline F unsigned_bytes(const uint8_t* p) { EACH_LANE(F, static_cast<float>(p[i])); }

// Like `e4m3_pairs`, with one number in each lane: the numbers of e4m3 codes, divided by 2^120.
inline F e4m3_bytes(const uint8_t* p) {
    const U codes = load(p);
    return floats(bit_xor(shift_left<24>(bit_and(codes, set1(0x80u))), shift_left<20>(bit_and(codes, set1(0x7Fu)))));
}

// The numbers of e4m3 codes, divided by 2^120, as two bfloat16 in each lane. Sign, exponent and fraction of a code are
// moved to their places in a bfloat16.
inline U e4m3_pairs(const uint8_t* p) {
    U codes;
    for (int i = 0; i < 16; ++i) codes.v[i] = static_cast<uint32_t>(p[2 * i]) | static_cast<uint32_t>(p[2 * i + 1]) << 16;
    const U signs = shift_left<8>(bit_and(codes, set1(0x00800080u)));
    return bit_xor(signs, shift_left<4>(bit_and(codes, set1(0x007F007Fu))));
}

// The numbers of e2m1 codes, which are in the lowest four bits of each lane. Other bits are ignored.
inline F e2m1(U codes) {
    const U magnitude = shift_left<22>(bit_and(codes, set1(7u))), sign = shift_left<28>(bit_and(codes, set1(8u)));
    return floats(bit_xor(bits(mul(floats(magnitude), set1(0x1p126f))), sign));
}

inline bool any_greater(F a, F b) {
    bool any = false;
    for (int i = 0; i < 16; ++i) any |= a.v[i] > b.v[i];
    return any;
}
inline U select_nan(F a, U x, U y) { EACH_LANE(U, a.v[i] != a.v[i] ? x.v[i] : y.v[i]); }

// In each quarter, swaps lane i of x[j] and lane j of x[i].
inline void transpose_quarters(F (&x)[4]) {
    for (int quarter = 0; quarter < 16; quarter += 4)
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < i; ++j) std::swap(x[i].v[quarter + j], x[j].v[quarter + i]);
}

inline void multiply_wide(U a, uint32_t b, U& high, U& low) {
    for (int i = 0; i < 16; ++i) {
        const uint64_t product = static_cast<uint64_t>(a.v[i]) * b;
        high.v[i] = static_cast<uint32_t>(product >> 32);
        low.v[i] = static_cast<uint32_t>(product);
    }
}

inline F load(const bf16* p) {
    U out;
    for (int i = 0; i < 16; ++i) out.v[i] = static_cast<uint32_t>(p[i].bits) << 16;
    return floats(out);
}
inline void store_halves(bf16* p, U x) {
    for (int i = 0; i < 16; ++i) p[i].bits = static_cast<uint16_t>(x.v[i]);
}

// Sums and maxima of the lanes: halves are joined until one lane is left.
inline float sum(F x) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    return x.v[0];
}
inline float peak(F x) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}

#undef EACH_LANE

// The product of the low and the high half of each word.
inline Words multiply_halves(Words x) { return (x & 0xFFFFFFFF) * (x >> 32); }
