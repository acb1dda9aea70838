// The 64-bit XXH3 hash of Collet's xxHash (algorithm: doc/xxhash_spec.md of xxHash 0.8.2), for more than 240 bytes,
// without a seed and with the default secret. A part of kernels.h.
//
// A hash takes its input in stripes of 64 bytes, and scrambles its 8 accumulators after each block of 16 stripes.

inline uint64_t read_64(const uint8_t* p) {
    uint64_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

inline Words read_words(const uint8_t* p) {
    typedef uint64_t Unaligned __attribute__((vector_size(64), aligned(1), may_alias));
    return *reinterpret_cast<const Unaligned*>(p);  // compilers copy less well with memcpy
}

inline Words swap_neighbours(Words x) {
#if defined(__clang__)
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    return __builtin_shuffle(x, Words{1, 0, 3, 2, 5, 4, 7, 6});
#endif
}

// Adds stripes to the sums. Each word of a stripe is added to the sum of its neighbour.
inline void add_stripes(Words& sums, const uint8_t* data, long count) {
    Words words = {};
#pragma GCC unroll 16
    for (long i = 0; i < count; ++i) {
        const Words stripe = read_words(data + HASH_STRIPE * i);
        words += stripe;
        sums += multiply_halves(stripe ^ read_words(HASH_SECRET + 8 * i));
    }
    sums += swap_neighbours(words);
}

// Adds whole blocks to the sums.
inline void add_blocks(Words& sums, const uint8_t* data, long count) {
    const Words secret = read_words(HASH_SECRET + sizeof(HASH_SECRET) - HASH_STRIPE);
    for (long block = 0; block < count; ++block, data += HASH_BLOCK) {
        add_stripes(sums, data, HASH_BLOCK / HASH_STRIPE);
        sums = (sums ^ sums >> 47 ^ secret) * 0x9E3779B1;
    }
}

// Adds the last, incomplete block of an input of `bytes` bytes, which ends at `end`. Returns the hash.
inline uint64_t finish_hash(Words sums, const uint8_t* end, long bytes) {
    const long rest = (bytes - 1) % HASH_BLOCK + 1;
    add_stripes(sums, end - rest, (rest - 1) / HASH_STRIPE);
    const Words last = read_words(end - HASH_STRIPE);
    sums += swap_neighbours(last);
    sums += multiply_halves(last ^ read_words(HASH_SECRET + sizeof(HASH_SECRET) - HASH_STRIPE - 7));
    uint64_t hash = static_cast<uint64_t>(bytes) * 0x9E3779B185EBCA87;
    for (long i = 0; i < 8; i += 2) {
        const uint64_t a = sums[i] ^ read_64(HASH_SECRET + 11 + 8 * i), b = sums[i + 1] ^ read_64(HASH_SECRET + 19 + 8 * i);
        const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
        hash += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9;
    return hash ^ hash >> 32;
}

// Whether no value has all bits of `infinity`, the bits of the exponent of infinities and NaN. Adding the lowest bit of
// the exponent to such a value carries into the sign bit.
template <class Bits>
inline bool have_no(Bits infinity, const uint8_t* data, long bytes) {
    const Bits lowest = static_cast<Bits>(infinity & -infinity);
    Bits carried = 0;
    for (long i = 0; i < bytes; i += static_cast<long>(sizeof(Bits))) {
        Bits bits;
        memcpy(&bits, data + i, sizeof(bits));
        carried |= static_cast<Bits>((bits & infinity) + lowest);
    }
    return !(carried >> (8 * sizeof(Bits) - 1));
}

// See `PieceArgs` in common.h.
inline uint64_t take_piece(const PieceArgs& args, bool* finite) {
    const uint8_t* const data = args.data;
    const long last_block = (args.bytes - 1) / HASH_BLOCK;  // the last block may be incomplete
    Words sums = {0xC2B2AE3D,         0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                  0x85EBCA77C2B2AE63, 0x85EBCA77,         0x27D4EB2F165667C5, 0x9E3779B1};
    long hashed = 0;
    for (long start = 0; start < args.bytes; start += args.step) {
        const long end = start + args.step < args.bytes ? start + args.step : args.bytes;
        const long blocks = end < args.bytes ? end / HASH_BLOCK : last_block;
        add_blocks(sums, data + hashed * HASH_BLOCK, blocks - hashed);
        hashed = blocks;
        if (args.infinity > 0xFFFF)
            *finite &= have_no(static_cast<uint32_t>(args.infinity), data + start, end - start);
        else if (args.infinity > 0)
            *finite &= have_no(static_cast<uint16_t>(args.infinity), data + start, end - start);
        args.write(args.target, data, start, end);
    }
    return finish_hash(sums, data + args.bytes, args.bytes);
}
