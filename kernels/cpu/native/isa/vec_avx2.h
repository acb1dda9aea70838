// Sixteen lanes as two AVX2 registers. Needs AVX2 and FMA.

struct F {
    __m256 v[2];
};
struct U {
    __m256i v[2];
};

#define BOTH(expression) \
    { \
        { [&](int i) { return expression; }(0), [&](int i) { return expression; }(1) } \
    }

inline F set1(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
inline F load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.v[0]);
    _mm256_storeu_ps(p + 8, x.v[1]);
}
inline F add(F a, F b) { return BOTH(_mm256_add_ps(a.v[i], b.v[i])); }
inline F sub(F a, F b) { return BOTH(_mm256_sub_ps(a.v[i], b.v[i])); }
inline F mul(F a, F b) { return BOTH(_mm256_mul_ps(a.v[i], b.v[i])); }
inline F div(F a, F b) { return BOTH(_mm256_div_ps(a.v[i], b.v[i])); }
inline F fma(F a, F b, F c) { return BOTH(_mm256_fmadd_ps(a.v[i], b.v[i], c.v[i])); }
inline F max(F a, F b) { return BOTH(_mm256_max_ps(a.v[i], b.v[i])); }
inline F min(F a, F b) { return BOTH(_mm256_min_ps(a.v[i], b.v[i])); }
inline F round(F x) { return BOTH(_mm256_round_ps(x.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline F floor(F x) { return BOTH(_mm256_round_ps(x.v[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)); }

inline U set1(uint32_t x) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(x));
    return {{all, all}};
}
inline U load(const uint32_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {{_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)}};
}
inline U load(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))}};
}
inline U add(U a, U b) { return BOTH(_mm256_add_epi32(a.v[i], b.v[i])); }
inline U sub(U a, U b) { return BOTH(_mm256_sub_epi32(a.v[i], b.v[i])); }
inline U bit_xor(U a, U b) { return BOTH(_mm256_xor_si256(a.v[i], b.v[i])); }
inline U bit_and(U a, U b) { return BOTH(_mm256_and_si256(a.v[i], b.v[i])); }
template <int N>
inline U shift_left(U a) { return BOTH(_mm256_slli_epi32(a.v[i], N)); }
template <int N>
inline U shift_right(U a) { return BOTH(_mm256_srli_epi32(a.v[i], N)); }

inline U bits(F x) { return BOTH(_mm256_castps_si256(x.v[i])); }
inline F floats(U x) { return BOTH(_mm256_castsi256_ps(x.v[i])); }
inline F convert_signed(U x) { return BOTH(_mm256_cvtepi32_ps(x.v[i])); }
inline F convert_unsigned(U x) {
    // Both halves and the product are exact, so only the sum rounds.
    const F high = convert_signed(shift_right<16>(x)), low = convert_signed(bit_and(x, set1(0xFFFFu)));
    return add(mul(high, set1(65536.0f)), low);
}
inline F times_power_of_2(F x, F n) {
    // Two exact steps give correct results beyond the range of a single factor.
    const F bounded = max(set1(-250.0f), min(set1(250.0f), n));
    const F first = round(mul(bounded, set1(0.5f))), second = sub(bounded, first);
    const auto power = [](__m256 e) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(e), _mm256_set1_epi32(127)), 23));
    };
    return BOTH(_mm256_mul_ps(_mm256_mul_ps(x.v[i], power(first.v[i])), power(second.v[i])));
}

// Splits x into a fraction in [0, 1] and floor(x), for `times_power_of_2`. Beyond +-250 the fraction is arbitrary.
inline F split(F x, F& fraction) {
    const F held = max(set1(-250.0f), min(set1(250.0f), x)), whole = floor(held);
    fraction = sub(held, whole);
    return whole;
}

inline F signed_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const U numbers = {{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))}};
    return convert_signed(numbers);
}
// Stores integers from -128 to 127.
inline void store_bytes(int8_t* p, F x) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.v[0]), _mm256_cvtps_epi32(x.v[1]));
    const __m256i halves = _mm256_permute4x64_epi64(mixed, 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
// In each lane, adds the sum of the products of its signed halves.
inline U add_half_products(U sums, U a, U b) {
    return BOTH(_mm256_add_epi32(sums.v[i], _mm256_madd_epi16(a.v[i], b.v[i])));
}
inline F unsigned_bytes(const uint8_t* p) { return convert_signed(load(p)); }

// Like `e4m3_pairs`, with one number in each lane: the numbers of e4m3 codes, divided by 2^120.
inline F e4m3_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const U codes = {{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))}};
    return floats(bit_and(shift_left<20>(codes), set1(0x87F00000u)));
}

// The numbers of e4m3 codes, divided by 2^120, as two bfloat16 in each lane. Sign, exponent and fraction of a code are
// moved to their places in a bfloat16.
inline U e4m3_pairs(const uint8_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    const U codes = BOTH(_mm256_cvtepu8_epi16(_mm_loadu_si128(q + i)));
    const U spread = BOTH(_mm256_srai_epi16(_mm256_slli_epi16(codes.v[i], 8), 4));
    return bit_and(spread, set1(0x87F087F0u));
}

// The numbers of e2m1 codes, which are in the lowest four bits of each lane. Other bits are ignored.
inline F e2m1(U codes) {
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const U sign = shift_left<28>(bit_and(codes, set1(8u)));
    const F magnitude = BOTH(_mm256_permutevar8x32_ps(magnitudes, codes.v[i]));
    return floats(bit_xor(bits(magnitude), sign));
}

inline bool any_greater(F a, F b) {
    const F greater = BOTH(_mm256_cmp_ps(a.v[i], b.v[i], _CMP_GT_OQ));
    return _mm256_movemask_ps(_mm256_or_ps(greater.v[0], greater.v[1])) != 0;
}
inline U select_nan(F a, U x, U y) {
    return BOTH(_mm256_blendv_epi8(y.v[i], x.v[i], _mm256_castps_si256(_mm256_cmp_ps(a.v[i], a.v[i], _CMP_UNORD_Q))));
}

// In each quarter, swaps lane i of x[j] and lane j of x[i].
inline void transpose_quarters(F (&x)[4]) {
    for (int i = 0; i < 2; ++i) {
        const __m256 a = _mm256_unpacklo_ps(x[0].v[i], x[1].v[i]), b = _mm256_unpackhi_ps(x[0].v[i], x[1].v[i]);
        const __m256 c = _mm256_unpacklo_ps(x[2].v[i], x[3].v[i]), d = _mm256_unpackhi_ps(x[2].v[i], x[3].v[i]);
        x[0].v[i] = _mm256_shuffle_ps(a, c, 0x44), x[1].v[i] = _mm256_shuffle_ps(a, c, 0xEE);
        x[2].v[i] = _mm256_shuffle_ps(b, d, 0x44), x[3].v[i] = _mm256_shuffle_ps(b, d, 0xEE);
    }
}

inline void multiply_wide(U a, uint32_t b, U& high, U& low) {
    const __m256i factor = _mm256_set1_epi64x(b);
    for (int i = 0; i < 2; ++i) {
        const __m256i even = _mm256_mul_epu32(a.v[i], factor);
        const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a.v[i], 32), factor);
        high.v[i] = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
        low.v[i] = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    }
}

inline F load(const bf16* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return BOTH(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + i)), 16)));
}
inline void store_halves(bf16* p, U x) {
    const __m256i mixed = _mm256_packus_epi32(x.v[0], x.v[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xD8));
}

// Sums and maxima of the lanes: halves are joined until one lane is left.
#define REDUCE(operation) \
    const __m256 eight = _mm256_##operation##_ps(x.v[0], x.v[1]); \
    const __m128 four = _mm_##operation##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
    const __m128 two = _mm_##operation##_ps(four, _mm_movehl_ps(four, four)); \
    return _mm_cvtss_f32(_mm_##operation##_ss(two, _mm_shuffle_ps(two, two, 1)))
inline float sum(F x) { REDUCE(add); }
inline float peak(F x) { REDUCE(max); }
#undef REDUCE

// The product of the low and the high half of each word.
inline Words multiply_halves(Words x) {
    typedef long long Half __attribute__((vector_size(32)));
    const auto multiply = [](Half half) {
        return reinterpret_cast<Half>(_mm256_mul_epu32(reinterpret_cast<__m256i>(half), reinterpret_cast<__m256i>(half >> 32)));
    };
    union {
        Words words;
        Half halves[2];
    } both = {x};
    both.halves[0] = multiply(both.halves[0]), both.halves[1] = multiply(both.halves[1]);
    return both.words;
}

#undef BOTH
