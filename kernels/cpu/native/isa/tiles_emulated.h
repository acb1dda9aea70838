// AMX tiles in plain C++, as Intel's manual describes the instructions, so that tests can run tiles_amx.h on any
// machine.

struct EmulatedTile {
    long rows, bytes;
    unsigned char data[16][64];
};
static thread_local EmulatedTile emulated[8];

inline void emulate_configuration(const void* config) {
    const unsigned char* p = static_cast<const unsigned char*>(config);
    for (int i = 0; i < 8; ++i) {
        uint16_t bytes;
        memcpy(&bytes, p + 16 + 2 * i, sizeof(bytes));
        memset(&emulated[i], 0, sizeof(emulated[i]));
        emulated[i].rows = p[48 + i], emulated[i].bytes = bytes;
    }
}
template <int N>
void emulate_zero() { memset(emulated[N].data, 0, sizeof(emulated[N].data)); }
template <int N>
void emulate_load(const void* p, long bytes) {
    emulate_zero<N>();
    for (long i = 0; i < emulated[N].rows; ++i)
        memcpy(emulated[N].data[i], static_cast<const char*>(p) + i * bytes, static_cast<size_t>(emulated[N].bytes));
}
template <int N>
void emulate_store(void* p, long bytes) {
    for (long i = 0; i < emulated[N].rows; ++i)
        memcpy(static_cast<char*>(p) + i * bytes, emulated[N].data[i], static_cast<size_t>(emulated[N].bytes));
}

inline float emulated_value(const unsigned char* p) {
    uint16_t half;
    memcpy(&half, p, sizeof(half));
    const uint32_t whole = static_cast<uint32_t>(half) << 16;
    float value;
    memcpy(&value, &whole, sizeof(value));
    return value;
}

// A value of the result is the sum of two chains, over the even and over the odd elements of a row of A. The innermost
// loop is over columns, so that the compiler may vectorize it.
template <int C, int A, int B>
void emulate_dot() {
    for (long m = 0; m < emulated[C].rows; ++m) {
        float even[16] = {}, odd[16] = {};
        for (long k = 0; k < emulated[A].bytes / 4; ++k) {
            const float a0 = emulated_value(emulated[A].data[m] + 4 * k);
            const float a1 = emulated_value(emulated[A].data[m] + 4 * k + 2);
            for (int n = 0; n < 16; ++n) {
                even[n] = fmaf(a0, emulated_value(emulated[B].data[k] + 4 * n), even[n]);
                odd[n] = fmaf(a1, emulated_value(emulated[B].data[k] + 4 * n + 2), odd[n]);
            }
        }
        for (long n = 0; n < emulated[C].bytes / 4; ++n) {
            float before;
            memcpy(&before, emulated[C].data[m] + 4 * n, sizeof(before));
            before += even[n] + odd[n];
            memcpy(emulated[C].data[m] + 4 * n, &before, sizeof(before));
        }
    }
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulate_configuration(config)
#define _tile_zero(n) emulate_zero<n>()
#define _tile_loadd(n, p, bytes) emulate_load<n>(p, bytes)
#define _tile_stored(n, p, bytes) emulate_store<n>(p, bytes)
#define _tile_dpbf16ps(c, a, b) emulate_dot<c, a, b>()
