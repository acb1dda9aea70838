// Quantized matrices: the expansion of panels of codes and scales to values of T. kernels/cpu/quantized.py describes the
// panels, kernels/quantization.py the values. A part of kernels.h.
//
// A value is the float32 product of a number and a scale, rounded to T. A group with ordinary scales is expanded in a
// faster way, which gives the same bits. With ordinary scales, no product of a number and a scale overflows or is a
// denormal number. The CPU's own conversion to bfloat16 would treat denormal numbers as zero.

constexpr long EXPANDED_PANELS = 4;
constexpr float LEAST_ORDINARY = 0x1p-100f, LARGEST_ORDINARY = 64.0f;
constexpr float LARGEST_E4M3 = 448.0f;

// Each format stores the columns [c, c + 2) of 16 rows in BYTES bytes of codes. `numbers` gives the numbers of both
// columns, divided by FACTOR.
struct E4m3 {
    static constexpr long BYTES = 2 * LANES;
    static constexpr float FACTOR = 0x1p120f;

    static void numbers(const uint8_t* p, F, F& x, F& y) {
        const U pairs = e4m3_pairs(p);
        x = floats(shift_left<16>(pairs)), y = floats(bit_and(pairs, set1(0xFFFF0000u)));
    }
};

// As E4m3, for matrices with scales that multiply sums of products (dynamic.h): the values are the numbers.
struct E4m3Numbers : E4m3 {};

// Whether values are numbers that every T represents exactly, so that they need no rounding.
template <class Element>
constexpr bool ARE_EXACT = std::is_same_v<Element, E4m3Numbers>;

struct Int8 {
    static constexpr long BYTES = 2 * LANES;
    static constexpr float FACTOR = 1.0f;

    static void numbers(const uint8_t* p, F, F& x, F& y) { x = signed_bytes(p), y = signed_bytes(p + LANES); }
};

struct E2m1 {
    static constexpr long BYTES = LANES;
    static constexpr float FACTOR = 1.0f;

    static void numbers(const uint8_t* p, F, F& x, F& y) {
        const U codes = load(p);
        x = e2m1(codes), y = e2m1(shift_right<4>(codes));
    }
};

// A float32 in [2^23, 2^24) has an integer in its lowest 23 bits.
constexpr uint32_t LARGE_BITS = 0x4B000000u;

// `zero`: the zero points, plus 2^23.
struct Int4 {
    static constexpr long BYTES = LANES;
    static constexpr float FACTOR = 1.0f;

    static void numbers(const uint8_t* p, F zero, F& x, F& y) {
        const U codes = load(p);
        x = sub(floats(bit_xor(bit_and(codes, set1(15u)), set1(LARGE_BITS))), zero);
        y = sub(floats(bit_xor(shift_right<4>(codes), set1(LARGE_BITS))), zero);
    }
};

// Calls body(Element{}) with the kind of a format's codes.
template <class Body>
auto with_element(Format format, const Body& body) {
    switch (format) {
        case Format::INT8: return body(Int8{});
        case Format::MXFP4: case Format::NVFP4: return body(E2m1{});
        case Format::AWQ: return body(Int4{});
        case Format::FP8_DYNAMIC: return body(E4m3Numbers{});
        default: return body(E4m3{});
    }
}

// Where a quantized panel has the codes of a column, and the bytes that the columns of a group share.
struct CodePlaces {
    const CodeSizes& sizes;
    long column_bytes, group_bits;

    explicit CodePlaces(Format format)
        : sizes(CODE_SIZES[static_cast<long>(format)]), column_bytes(LANES * sizes.bits / 8),
          group_bits(__builtin_ctzl(static_cast<unsigned long>(sizes.group))) {}

    long shared(long column) const {
        return sizes.header + (column >> group_bits) * (sizes.shared + sizes.group * column_bytes);
    }
    long codes(long column) const {
        return shared(column) + sizes.shared + (column & (sizes.group - 1)) * column_bytes;
    }
    long group_end(long column) const { return ((column >> group_bits) + 1) << group_bits; }
};

// The scales and zero points of a panel's rows in one group of columns.
struct Shared {
    F scales, zeros;

    Shared() = default;
    // `panel`: the beginning of the panel. `at`: the bytes before the group's codes.
    Shared(Format format, const char* panel, const char* at) : scales(), zeros(set1(0.0f)) {
        const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(at);
        if (format == Format::MXFP8 || format == Format::MXFP4) {
            // Code 0 is the denormal number 2^-127.
            scales = max(floats(shift_left<23>(load(bytes))), floats(set1(0x00400000u)));
        } else if (format == Format::NVFP4) {
            const U code = load(bytes), sign = shift_left<24>(bit_and(code, set1(0x80u)));
            const F small = floats(bit_xor(sign, shift_left<20>(bit_and(code, set1(0x7Fu)))));
            scales = mul(mul(small, set1(E4m3::FACTOR)), load(reinterpret_cast<const float*>(panel)));
        } else if (format == Format::AWQ) {
            const U half = bits(load(reinterpret_cast<const bf16*>(at)));  // in the upper 16 bits of each lane
            const U magnitude = shift_right<3>(bit_and(half, set1(0x7FFF0000u)));
            scales = mul(floats(bit_xor(bit_and(half, set1(0x80000000u)), magnitude)), set1(0x1p112f));
            zeros = floats(bit_xor(load(bytes + 2 * LANES), set1(LARGE_BITS)));
        } else if (format == Format::FP8_DYNAMIC) {
            scales = set1(1.0f);
        } else {
            scales = load(reinterpret_cast<const float*>(at));
        }
    }

    bool are_ordinary() const {
        return !any_greater(set1(LEAST_ORDINARY), scales) && !any_greater(scales, set1(LARGEST_ORDINARY));
    }
};

inline U rounding(F x) {
    const U raw = bits(x);
    return add(raw, add(set1(0x7FFFu), bit_and(shift_right<16>(raw), set1(1u))));
}

// Returns pairs of values rounded to bfloat16, in the order of a panel. IS_EXACT: bfloat16 represents the values
// exactly.
template <bool IS_ORDINARY, bool IS_EXACT = false>
inline U rounded_pairs(F x, F y) {
    if constexpr (IS_EXACT) return bit_xor(shift_right<16>(bits(x)), bit_and(bits(y), set1(0xFFFF0000u)));
#ifdef HAS_DOT_BF16
    if (IS_ORDINARY) {
        static constexpr uint16_t ORDER[2 * LANES] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(y.v, x.v);
        return {_mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), apart)};
    }
#endif
    return bit_xor(shift_right<16>(rounding(x)), bit_and(rounding(y), set1(0xFFFF0000u)));
}

// Stores the values of two neighbouring columns in a plain panel.
template <bool IS_ORDINARY, bool IS_EXACT = false>
inline void store_columns(float* out, F x, F y) { store(out, x), store(out + LANES, y); }
template <bool IS_ORDINARY, bool IS_EXACT = false>
inline void store_columns(bf16* out, F x, F y) {
    store(reinterpret_cast<float*>(out), floats(rounded_pairs<IS_ORDINARY, IS_EXACT>(x, y)));
}

constexpr long LINE = 64;  // codes are read line by line

// Computes the values of two neighbouring columns. `scales`: if the scales are ordinary, they are already multiplied by
// the element's FACTOR.
template <class Element, bool IS_ORDINARY>
inline void values_of(const uint8_t* codes, F scales, F zeros, F& x, F& y) {
    Element::numbers(codes, zeros, x, y);
    if (!IS_ORDINARY) x = mul(x, set1(Element::FACTOR)), y = mul(y, set1(Element::FACTOR));
    x = mul(x, scales), y = mul(y, scales);
}

// Expands `bytes` bytes of codes, a multiple of LINE, and prefetches the lines `ahead` bytes later.
template <class T, class Element, bool IS_ORDINARY>
void expand_codes(const uint8_t* codes, long bytes, long ahead, const Shared& shared, T* out) {
    const F scales = IS_ORDINARY ? mul(shared.scales, set1(Element::FACTOR)) : shared.scales;
    for (const uint8_t* const end = codes + bytes; codes != end; codes += LINE) {
        __builtin_prefetch(codes + ahead);
#pragma GCC unroll 4
        for (long i = 0; i < LINE; i += Element::BYTES, out += 2 * LANES) {
            F x, y;
            values_of<Element, IS_ORDINARY>(codes + i, scales, shared.zeros, x, y);
            store_columns<IS_ORDINARY, ARE_EXACT<Element>>(out, x, y);
        }
    }
}

// Expands the steps [start, end) of a quantized panel, and up to CODE_COLUMNS columns before and after them, to a plain
// panel at `out`. Returns the place of step `start`. Prefetches as many bytes as it reads, from `next` on; if `next` is
// null, from the end of the steps on.
template <class T>
const T* expand(const Panel<T>& panel, long start, long end, const char* next, T* out) {
    const CodePlaces places(panel.format);
    const long first = start * PAIR<T> / CODE_COLUMNS * CODE_COLUMNS, last = round_up(end * PAIR<T>, CODE_COLUMNS);
    const long ahead =
        next == nullptr ? places.codes(last) - places.codes(first) : next - panel.data - places.codes(first);
    with_element(panel.format, [&](auto element) {
        using Element = decltype(element);
        T* values = out;
        for (long column = first, stop; column < last; column = stop) {
            stop = smaller(last, places.group_end(column));
            const Shared shared(panel.format, panel.data, panel.data + places.shared(column));
            const auto expand_some = shared.are_ordinary() ? expand_codes<T, Element, true> : expand_codes<T, Element, false>;
            const uint8_t* const codes = reinterpret_cast<const uint8_t*>(panel.data + places.codes(column));
            expand_some(codes, (stop - column) * places.column_bytes, ahead, shared, values);
            values += (stop - column) * LANES;
        }
    });
    return out + (start * PAIR<T> - first) * LANES;
}
