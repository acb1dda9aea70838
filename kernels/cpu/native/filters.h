// Filters: which tokens of a row remain after `top_k`, `top_p` and `min_p`. A part of api.cpp.

// An integer for a float that is not NaN. Higher integers stand for lower floats.
inline uint32_t key_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
}
inline float of_key(uint32_t key) {
    const uint32_t bits = key >> 31 ? key : ~key & 0x7FFFFFFFu;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Sorts n floats in descending order. No float is NaN.
void sort_descending(float* x, long n) {
    if (n < 256) return std::sort(x, x + n, [](float a, float b) { return a > b; });
    constexpr long DIGITS = 3, BITS = 11, VALUES = 1l << BITS;
    const auto digit = [](uint32_t key, long place) { return key >> place * BITS & (VALUES - 1); };
    uint32_t counts[DIGITS][VALUES] = {}, *from = scratch<uint32_t>(SORTING, 2 * n), *to = from + n;
    for (long i = 0; i < n; ++i) {
        from[i] = key_of(x[i]);
        for (long place = 0; place < DIGITS; ++place) ++counts[place][digit(from[i], place)];
    }
    for (long place = 0; place < DIGITS; ++place) {
        uint32_t next = 0;
        for (uint32_t& count : counts[place]) count = std::exchange(next, next + count);
        for (long i = 0; i < n; ++i) to[counts[place][digit(from[i], place)]++] = from[i];
        std::swap(from, to);
    }
    for (long i = 0; i < n; ++i) x[i] = of_key(from[i]);
}

// Appends the values in (low, high] to `out` and returns their number. `out` has space for one more value.
long copy_band(const float* x, long n, float low, float high, float* out) {
    constexpr long WIDTH = 4, STEP = 4 * WIDTH;
    long count = 0;
    const auto offer = [&](float value) {
        out[count] = value;
        count += (value > low) & (value <= high);  // without a branch
    };
    const auto greater = [](float a, float b) { return a > b ? a : b; };
    for (long i = 0; i + STEP <= n; i += STEP) {
        float most[WIDTH];
        for (long j = 0; j < WIDTH; ++j) {
            const float* at = x + i + j;
            most[j] = greater(greater(at[0], at[WIDTH]), greater(at[2 * WIDTH], at[3 * WIDTH]));
        }
        if (!(greater(greater(most[0], most[1]), greater(most[2], most[3])) > low)) continue;
        for (long j = i; j < i + STEP; ++j) offer(x[j]);
    }
    for (long i = n / STEP * STEP; i < n; ++i) offer(x[i]);
    return count;
}

// A row's logits in descending order. No logit is NaN.
//
// Bands below the highest logit are copied and sorted when they are needed. Filters usually need the few logits near the
// highest one.
class Descending {
  public:
    // `peak`: the highest logit. `depth`: the width of the first band. `sorted`: memory for n + 1 floats.
    Descending(const float* logits, long n, float peak, float depth, float* sorted)
        : logits_(logits), n_(n), peak_(peak), depth_(depth), low_(peak), sorted_(sorted), count_(0) {}

    float at(long rank) {
        while (rank >= count_) add_band();
        return sorted_[rank];
    }

    // The first `count` logits.
    const float* first(long count) {
        at(count - 1);
        return sorted_;
    }

  private:
    void add_band() {
        if (low_ == -INFINITY) return std::fill(sorted_ + std::exchange(count_, n_), sorted_ + n_, -INFINITY);
        const float high = std::exchange(low_, depth_ < 128.0f ? peak_ - depth_ : -INFINITY);
        const long found = copy_band(logits_, n_, low_, high, sorted_ + count_);
        sort_descending(sorted_ + count_, found);
        count_ += found, depth_ *= 2.0f;
    }

    const float* logits_;
    long n_;
    float peak_, depth_, low_;
    float* sorted_;
    long count_;
};

// The highest of n values, or NaN if one of them is NaN.
float highest(const float* x, long n) {
    float most = -INFINITY;
    bool has_nan = false;
    for (long i = 0; i < n; ++i) {
        most = x[i] > most ? x[i] : most;
        has_nan |= x[i] != x[i];
    }
    return has_nan ? NAN : most;
}

struct Filters {
    long top_k;
    float top_p, min_p;

    // An estimate of the distance between the highest and the lowest logit that stay.
    float depth() const {
        return top_k < 0 && top_p >= 1.0f && min_p > 0.0f ? std::max(-std::log(min_p), 0.0f) + 0.1f : 2.0f;
    }
};

// The number of logits that stay. `total`: the sum of e^(logit - peak) over all logits; not read with `top_k`.
long count_kept(Descending& ordered, long n, const Filters& filters, float peak, float total) {
    const long most = filters.top_k < 0 ? n : larger(1, smaller(filters.top_k, n));
    if (filters.top_k >= 0) chosen->log_sum_exp(ordered.first(most), most, &peak, &total);
    float before = 0.0f, best = 0.0f;
    long count = 0;
    for (; count < most; ++count) {
        const float probability = std::exp(ordered.at(count) - peak) / total;
        if (count == 0) best = probability;
        const bool stays = (filters.top_p >= 1.0f || before < filters.top_p) && probability >= filters.min_p * best;
        if (count > 0 && !stays) break;
        before += probability;
    }
    return count;
}

// What is recorded of a filtered row. `sums`: the results of `log_sum_exp` before the filters. `bits`: a bit for each
// logit, which is 0 for -inf, the lowest bit first; all bits are 0 if no logit is -inf.
struct Kept {
    float* sums;
    uint8_t* bits;

    long num_bytes(long n) const { return round_up(n, 8) / 8; }

    // Records n logits, of which the first one has the index `first`, a multiple of 8.
    void put(const float* logits, long first, long n) const {
        uint8_t* at = bits + first / 8;
        for (long i = 0; i < n; i += 8) {
            unsigned found = 0;
            for (long j = i; j < smaller(i + 8, n); ++j) found |= static_cast<unsigned>(logits[j] != -INFINITY) << (j - i);
            at[i / 8] = static_cast<uint8_t>(found);
        }
    }

    // Clears the bits if all are set.
    void finish(long n) const {
        for (long i = 0; i < n / 8; ++i)
            if (bits[i] != 0xFF) return;
        if (n % 8 == 0 || bits[n / 8] == (1u << n % 8) - 1) memset(bits, 0, static_cast<size_t>(num_bytes(n)));
    }
};

// Sets all logits to -inf, except those above `last`, and the first `ties` logits that equal it. `kept`: or null.
void keep(float* logits, long n, float last, long ties, const Kept* kept) {
    constexpr long BLOCK_OF_LOGITS = 32;
    const auto keep_some = [&](float* x, long first, long count) {
        int above = 0, equal = 0;
        for (long i = 0; i < count; ++i) above += x[i] > last, equal += x[i] == last;
        if (above + equal == 0) {
            for (long i = 0; i < count; ++i) x[i] = -INFINITY;
            if (kept != nullptr) memset(kept->bits + first / 8, 0, static_cast<size_t>(kept->num_bytes(count)));
            return;
        }
        for (long i = 0; i < count; ++i) x[i] = x[i] >= last ? x[i] : -INFINITY;
        for (long i = 0; equal > 0 && i < count; ++i)
            if (x[i] == last && --ties < 0) x[i] = -INFINITY;
        if (kept != nullptr) kept->put(x, first, count);
    };
    const long whole = n / BLOCK_OF_LOGITS * BLOCK_OF_LOGITS;
    for (long i = 0; i < whole; i += BLOCK_OF_LOGITS) keep_some(logits + i, i, BLOCK_OF_LOGITS);
    if (whole < n) keep_some(logits + whole, whole, n - whole);
}

// Sets the logits that a row's filters drop to -inf. A row with NaN stays unchanged. `kept`: or null.
void filter_row(float* logits, long n, const Filters& filters, const Kept* kept) {
    float peak, total = 0.0f;
    if (filters.top_k < 0 || kept != nullptr) chosen->log_sum_exp(logits, n, &peak, &total);
    if (kept != nullptr) kept->sums[0] = peak, kept->sums[1] = total;
    if (filters.top_k >= 0) peak = highest(logits, n), total = 0.0f;
    if (!std::isfinite(peak) || std::isnan(total)) {
        if (kept != nullptr) kept->put(logits, 0, n), kept->finish(n);
        return;
    }
    Descending ordered(logits, n, peak, filters.depth(), scratch<float>(SORTED, n + 1));
    const long count = count_kept(ordered, n, filters, peak, total);
    const float last = ordered.at(count - 1);
    long ties = 1;
    while (ties < count && ordered.at(count - 1 - ties) == last) ++ties;
    keep(logits, n, last, ties, kept);
    if (kept != nullptr) kept->finish(n);
}
