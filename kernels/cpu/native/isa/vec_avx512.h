// Sixteen lanes as one AVX-512 register. Needs AVX512F, DQ, BW and VL.

struct F {
    __m512 v;
};
struct U {
    __m512i v;
};

inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F round(F x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F times_power_of_2(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// Splits x into a fraction in [0, 1] and the argument that `times_power_of_2` needs for floor(x). The argument is x
// itself, since `times_power_of_2` takes the floor.
inline F split(F x, F& fraction) {
    fraction.v = _mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return x;
}

inline U set1(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline U load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline U load(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline U add(U a, U b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline U sub(U a, U b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline U bit_xor(U a, U b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline U bit_and(U a, U b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int N>
inline U shift_left(U a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N>
inline U shift_right(U a) { return {_mm512_srli_epi32(a.v, N)}; }

inline U bits(F x) { return {_mm512_castps_si512(x.v)}; }
inline F floats(U x) { return {_mm512_castsi512_ps(x.v)}; }
inline F convert_signed(U x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline F convert_unsigned(U x) { return {_mm512_cvtepu32_ps(x.v)}; }

inline F signed_bytes(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Stores integers from -128 to 127.
inline void store_bytes(int8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
// In each lane, adds the sum of the products of its bytes: unsigned bytes of a, and signed bytes of b.
#ifdef HAS_DOT_INT8
inline U add_byte_products(U sums, U a, U b) { return {_mm512_dpbusd_epi32(sums.v, a.v, b.v)}; }
#endif
// In each lane, adds the sum of the products of its signed halves.
inline U add_half_products(U sums, U a, U b) {
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(a.v, b.v))};
}
inline F unsigned_bytes(const uint8_t* p) { return {_mm512_cvtepi32_ps(load(p).v)}; }

// Like `e4m3_pairs`, with one number in each lane: the numbers of e4m3 codes, divided by 2^120.
inline F e4m3_bytes(const uint8_t* p) {
    const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return floats(bit_and({_mm512_slli_epi32(codes, 20)}, set1(0x87F00000u)));
}

// The numbers of e4m3 codes, divided by 2^120, as two bfloat16 in each lane. Sign, exponent and fraction of a code are
// moved to their places in a bfloat16.
inline U e4m3_pairs(const uint8_t* p) {
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i spread = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 4);
    return {_mm512_and_si512(spread, _mm512_set1_epi32(static_cast<int>(0x87F087F0u)))};
}

// The numbers of e2m1 codes, which are in the lowest four bits of each lane. Other bits are ignored.
inline F e2m1(U codes) {
    const __m512 numbers = _mm512_setr_ps(
        0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f
    );
    return {_mm512_permutexvar_ps(codes.v, numbers)};
}

inline bool any_greater(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }
inline U select_nan(F a, U x, U y) {
    return {_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), y.v, x.v)};
}

// In each quarter, swaps lane i of x[j] and lane j of x[i].
inline void transpose_quarters(F (&x)[4]) {
    const __m512 a = _mm512_unpacklo_ps(x[0].v, x[1].v), b = _mm512_unpackhi_ps(x[0].v, x[1].v);
    const __m512 c = _mm512_unpacklo_ps(x[2].v, x[3].v), d = _mm512_unpackhi_ps(x[2].v, x[3].v);
    x[0].v = _mm512_shuffle_ps(a, c, 0x44), x[1].v = _mm512_shuffle_ps(a, c, 0xEE);
    x[2].v = _mm512_shuffle_ps(b, d, 0x44), x[3].v = _mm512_shuffle_ps(b, d, 0xEE);
}

inline void multiply_wide(U a, uint32_t b, U& high, U& low) {
    const __m512i factor = _mm512_set1_epi64(b);
    const __m512i even = _mm512_mul_epu32(a.v, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), factor);
    high.v = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    low.v = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}

inline F load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline void store_halves(bf16* p, U x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}

// Sums and maxima of the lanes: halves are joined until one lane is left.
inline float sum(F x) { return _mm512_reduce_add_ps(x.v); }
inline float peak(F x) { return _mm512_reduce_max_ps(x.v); }

// The product of the low and the high half of each word.
inline Words multiply_halves(Words x) {
    const __m512i words = reinterpret_cast<__m512i>(x);
    return reinterpret_cast<Words>(_mm512_mul_epu32(words, _mm512_srli_epi64(words, 32)));
}
