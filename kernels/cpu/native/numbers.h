// Numbers: bfloat16, partial vectors, exp and log. A part of kernels.h.

// bfloat16 is the upper half of a float32, rounded to nearest even.
inline U exact_bf16(F x) {
    const U raw = bits(x);
    const U even = bit_and(shift_right<16>(raw), set1(1u));
    const U nearest = shift_right<16>(add(raw, add(even, set1(0x7FFFu))));
    return select_nan(x, set1(0x7FC0u), nearest);
}

// The CPU's own conversion instructions, used on some instruction sets, treat denormal numbers as zero.
#ifdef HAS_DOT_BF16
inline __m256i to_bf16(F x) { return (__m256i)_mm512_cvtneps_pbh(x.v); }
inline F from_bf16(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
inline void store(bf16* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
#else
inline U to_bf16(F x) { return exact_bf16(x); }
inline F from_bf16(U x) { return floats(shift_left<16>(x)); }
inline void store(bf16* p, U x) { store_halves(p, x); }
#endif

inline void store(bf16* p, F x) { store(p, to_bf16(x)); }

inline float widened(float x) { return x; }
inline float widened(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

template <class T>
inline F rounded(F x);
template <>
inline F rounded<float>(F x) { return x; }
template <>
inline F rounded<bf16>(F x) { return from_bf16(to_bf16(x)); }

// The four bytes at p.
inline uint32_t word_at(const void* p) {
    uint32_t word;
    memcpy(&word, p, sizeof(word));
    return word;
}

// Stores two vectors one after the other, and adds the stored values to `sums`. Only the sum over all lanes is
// meaningful, since the instruction set determines the lane that adds a value.
inline void store_and_add(float* p, F x, F y, F& sums) {
    store(p, x), store(p + LANES, y);
    sums = add(add(sums, x), y);
}
inline void store_and_add(bf16* p, F x, F y, F& sums) {
#ifdef HAS_DOT_BF16
    const __m512bh pairs = _mm512_cvtne2ps_pbh(y.v, x.v), ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    _mm512_storeu_si512(p, (__m512i)pairs);
    sums.v = _mm512_dpbf16_ps(sums.v, pairs, ones);
#else
    const U left = to_bf16(x), right = to_bf16(y);
    store(p, left), store(p + LANES, right);
    sums = add(add(sums, from_bf16(left)), from_bf16(right));
#endif
}

// Loads the first n values; the other lanes are 0.
template <class T>
inline F load(const T* p, long n) {
    if (n >= LANES) return load(p);
    T part[LANES] = {};
    memcpy(part, p, static_cast<size_t>(n) * sizeof(T));
    return load(static_cast<const T*>(part));
}
template <class T>
inline void store(T* p, F x, long n) {
    if (n >= LANES) return store(p, x);
    T part[LANES];
    store(static_cast<T*>(part), x);
    memcpy(p, part, static_cast<size_t>(n) * sizeof(T));
}

// e^x to about one unit in the last place: x = n ln 2 + r, with e^r by its Taylor polynomial of degree 7. The bounds on
// x lie far beyond the range of float32, and keep NaN.
inline F exp(F any) {
    const F x = max(set1(-200.0f), min(set1(200.0f), any));
    const F n = round(mul(x, set1(1.44269504f)));
    const F r = fma(n, set1(-1.42860677e-6f), fma(n, set1(-0.693145752f), x));
    F p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(mul(r, r), p, r);
    return times_power_of_2(add(set1(1.0f), p), n);
}

// soft_cap * tanh(x / soft_cap), computed with exponentials.
inline F capped(F x, float soft_cap) {
    const U sign = bit_and(bits(x), set1(0x80000000u));
    const F decay = exp(mul(floats(bit_xor(bits(x), sign)), set1(-2.0f / soft_cap)));
    const F bounded = mul(div(sub(set1(1.0f), decay), add(set1(1.0f), decay)), set1(soft_cap));
    return floats(bit_xor(bits(bounded), sign));
}

// e^(scale x), for a result that is rounded to T. For bfloat16, the result is accurate to 3e-6. With y = scale x / ln
// 2, the result is 2^floor(y) times a polynomial of the fraction, which is 1 at 0.
template <class T>
inline F scaled_exp(F x, float scale) { return exp(mul(x, set1(scale))); }
template <>
inline F scaled_exp<bf16>(F x, float scale) {
    const F y = mul(x, set1(scale * 1.44269504f));
    F f;
    const F whole = split(y, f);
    F p = set1(0.0134266876f);
    p = fma(p, f, set1(0.0522424690f));
    p = fma(p, f, set1(0.241280213f));
    p = fma(p, f, set1(0.693044841f));
    return times_power_of_2(fma(p, f, set1(1.0f)), whole);
}

// ln x for normal x > 0: x = 2^n m with m in [sqrt(1/2), sqrt(2)), and ln m = 2 atanh((m - 1) / (m + 1)).
inline F log(F x) {
    const U shifted = sub(bits(x), set1(0x3F3504F3u));
    // The signed exponent. The offset emulates an arithmetic 32-bit shift.
    const F n = sub(convert_unsigned(shift_right<23>(add(shifted, set1(0x40000000u)))), set1(128.0f));
    const F m = floats(add(bit_and(shifted, set1(0x007FFFFFu)), set1(0x3F3504F3u)));
    const F f = sub(m, set1(1.0f));
    const F s = div(f, add(set1(2.0f), f)), z = mul(s, s);
    F p = set1(2.0f / 11);
    p = fma(p, z, set1(2.0f / 9));
    p = fma(p, z, set1(2.0f / 7));
    p = fma(p, z, set1(2.0f / 5));
    p = fma(p, z, set1(2.0f / 3));
    // 2 atanh(s) = 2 s + s z p, and 2 s = f - s f. Small terms are added first, so that the leading term is rounded
    // last.
    const F small = fma(n, set1(-1.42860677e-6f), mul(s, sub(mul(z, p), f)));
    return fma(n, set1(0.693148613f), add(f, small));
}

// -ln(1 - u) for u in (0, 1), with full resolution for small u. 1 - u is rounded to y, and ln y is corrected for the
// rounding error.
inline F exponential(F u) {
    const F y = sub(set1(1.0f), u);
    const F lost = sub(sub(set1(1.0f), y), u);
    return sub(div(sub(set1(0.0f), lost), y), log(y));
}
