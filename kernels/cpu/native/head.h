// The head: logits, log-probs, sampling. A part of kernels.h.

constexpr long CHUNK = 512;
static_assert(CHUNK / LANES <= MAX_PANELS, "a chunk is one product");

// Converts products to logits.
inline void shape_logits(const LogitNumbers& shape, float* x, long n) {
    for (long i = 0; i < n; i += LANES) {
        const F scaled = mul(load(x + i), set1(shape.scale));
        store(x + i, shape.soft_cap > 0.0f ? capped(scaled, shape.soft_cap) : scaled);
    }
}

// Logits of `rows` rows from `start` on, for the vocabulary ids [first, first + n): c [rows, CHUNK].
template <class T>
void multiply_chunk(
    const Left<T>& left, const Matrix<T>& weight, const LogitNumbers& shape, long start, long rows, long first, float* c
) {
    const long n = smaller(CHUNK / LANES, weight.panels() - first / LANES);
    Panel<T> b[MAX_PANELS];
    for (long i = 0; i < n; ++i) b[i] = weight.panel(first / LANES + i);
    for (long i = 0; i < n; i += 2) {
        float* out = c + i * LANES;
        multiply_all(left.from(start), rows, b + i, smaller(2, n - i), 0, weight.steps(), 2, out, CHUNK);
    }
    if (shape.scale == 1.0f && shape.soft_cap == 0.0f) return;
    for (long row = 0; row < rows; ++row) shape_logits(shape, c + row * CHUNK, n * LANES);
}

template <class T>
void logits(const Input<T>& x, const Matrix<T>& weight, const LogitNumbers& shape, float* out) {
    const Left<T> left(x);
    const long V = weight.rows;
    for_tiles(x.count, round_up(V, CHUNK) / CHUNK, [&](long start, long rows, long group) {
        const long first = group * CHUNK, n = smaller(CHUNK, V - first);
        float* c = scratch<float>(PRODUCT, rows * CHUNK);
        multiply_chunk(left, weight, shape, start, rows, first, c);
        for (long row = 0; row < rows; ++row)
            memcpy(out + (start + row) * V + first, c + row * CHUNK, static_cast<size_t>(n) * sizeof(float));
    });
}

// The maximum of n values, and the sum of e^(x - maximum), cut at multiples of CHUNK as in `head`. `weighted`: the sum
// of (x - peak) e^(x - peak), if requested.
struct LogSumExp {
    float peak = -INFINITY, total = 0.0f, weighted = 0.0f;

    void add_chunk(const LogSumExp& next) {
        if (next.peak == -INFINITY) return;
        const float top = peak > next.peak ? peak : next.peak;
        float scales[LANES] = {peak - top, next.peak - top};
        store(scales, exp(load(static_cast<const float*>(scales))));
        weighted = moved(peak - top) * scales[0] + next.moved(next.peak - top) * scales[1];
        total = total * scales[0] + next.total * scales[1];
        peak = top;
    }

    // Converts `weighted` to a peak that is lower by `distance`. The result is arbitrary if the exponential of
    // `distance` is 0.
    float moved(float distance) const { return weighted + (distance < LEAST ? LEAST : distance) * total; }

    float entropy() const {
        return static_cast<float>(::log(static_cast<double>(total)) - static_cast<double>(weighted) / total);
    }

    static constexpr float LEAST = -200.0f;  // as in `exp`: lower values have an exponential of 0
};

template <bool WEIGHTED>
inline void add_exponentials(F x, F shift, F& sums, F& weighted) {
    const F distance = sub(x, shift);
    if (!WEIGHTED) {
        sums = add(sums, exp(distance));
        return;
    }
    const F bounded = max(set1(LogSumExp::LEAST), distance), e = exp(bounded);
    sums = add(sums, e);
    weighted = fma(e, bounded, weighted);
}

// Returns whether all values are -inf, for values of which none is above -inf. If the result is false, some values are
// NaN, which a maximum may ignore.
inline bool is_nothing(const float* x, long n) {
    F sums = set1(0.0f);
    for (long i = 0; i + LANES <= n; i += LANES) sums = add(sums, load(x + i));
    float all = sum(sums);
    for (long i = n / LANES * LANES; i < n; ++i) all += x[i];
    return all == all;
}

template <bool WEIGHTED = false>
inline LogSumExp reduce_chunk(const float* x, long n) {
    F most = set1(-INFINITY);
    for (long i = 0; i + LANES <= n; i += LANES) most = max(most, load(x + i));
    float top = peak(most);
    for (long i = n / LANES * LANES; i < n; ++i) top = x[i] > top ? x[i] : top;
    if (top == -INFINITY && is_nothing(x, n)) return {};
    const F shift = set1(top == -INFINITY ? 0.0f : top);
    F sums = set1(0.0f), weighted = set1(0.0f);
    long i = 0;
    for (; i + LANES <= n; i += LANES) add_exponentials<WEIGHTED>(load(x + i), shift, sums, weighted);
    if (i < n) {
        float last[LANES];
        for (long lane = 0; lane < LANES; ++lane) last[lane] = i + lane < n ? x[i + lane] : -INFINITY;
        add_exponentials<WEIGHTED>(load(static_cast<const float*>(last)), shift, sums, weighted);
    }
    const float total = sum(sums);
    return {total == total ? top : total, total, sum(weighted)};  // a maximum may ignore a NaN
}

void log_sum_exp(const float* x, long n, float* peak, float* total) {
    LogSumExp all;
    for (long first = 0; first < n; first += CHUNK) all.add_chunk(reduce_chunk(x + first, smaller(CHUNK, n - first)));
    *peak = all.peak, *total = all.total;
}

// The highest value that any thread has found for a row so far.
inline float read_bound(const float* bound) {
    float value;
    __atomic_load(bound, &value, __ATOMIC_RELAXED);
    return value;
}
inline void raise_bound(float* bound, float value) {
    float before = read_bound(bound);
    while (value > before &&
           !__atomic_compare_exchange(bound, &before, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// The k highest values of a row with their ids. Among equal values, the value with the lower id counts as higher. The
// result does not depend on the order in which threads offer values. The result for a row with NaN is arbitrary. Until
// `sort`, the values are a heap with the lowest value first, so that an offer takes a time proportional to log k.
struct Highest {
    long k;
    float* values;
    int64_t* ids;
    long count = 0;
    float bound = NAN;  // values up to this bound are rejected; NaN as long as even -inf is accepted
    bool is_held = false;

    // Offers the ids [first, first + n). `most` is their highest value.
    void offer_chunk(const float* x, long n, long first, float most) {
        if (k == 0 || most <= read_bound(&bound)) return;
        while (__atomic_test_and_set(&is_held, __ATOMIC_ACQUIRE)) {
        }
        for (long i = 0; i < n; i += LANES) {
            if (i + LANES <= n && bound == bound && !any_greater(load(x + i), set1(bound))) continue;
            for (long at = i; at < smaller(i + LANES, n); ++at) offer(x[at], first + at);
        }
        __atomic_clear(&is_held, __ATOMIC_RELEASE);
    }

    void offer(float value, int64_t id) {
        if (count < k) {
            raise(value, id, count++);
        } else if (k > 0 && is_higher(value, id, 0)) {
            sink(value, id, 0, k);
        } else {
            return;
        }
        if (count < k || values[0] == -INFINITY) return;
        const float below = nextafterf(values[0], -INFINITY);
        __atomic_store(&bound, &below, __ATOMIC_RELAXED);
    }

    // Puts the values in descending order. No value may be offered afterwards.
    void sort() {
        for (long end = count - 1; end > 0; --end) {
            const float last = values[end];
            const int64_t last_id = ids[end];
            move(0, end);
            sink(last, last_id, 0, end);
        }
    }

  private:
    bool is_higher(float value, int64_t id, long place) const {
        return value > values[place] || (value == values[place] && id < ids[place]);
    }

    void move(long from, long to) { values[to] = values[from], ids[to] = ids[from]; }

    // Inserts a value at `place`, the end of the heap, or above it.
    void raise(float value, int64_t id, long place) {
        while (place > 0 && !is_higher(value, id, (place - 1) / 2)) {
            move((place - 1) / 2, place);
            place = (place - 1) / 2;
        }
        values[place] = value, ids[place] = id;
    }

    // Inserts a value at `place` or below it, in a heap of n values.
    void sink(float value, int64_t id, long place, long n) {
        for (long child = 2 * place + 1; child < n; child = 2 * place + 1) {
            if (child + 1 < n && is_higher(values[child], ids[child], child + 1)) ++child;
            if (!is_higher(value, id, child)) break;
            move(child, place);
            place = child;
        }
        values[place] = value, ids[place] = id;
    }
};

// Converts the highest values to log-probs. A row without a distribution gets fixed ids, independent of the threads.
inline void finish_statistics(const LogSumExp& all, Highest& highest, float* entropy) {
    highest.sort();
    *entropy = all.entropy();
    for (long i = 0; i < highest.k; ++i) {
        highest.values[i] = log_prob(highest.values[i], all.peak, all.total);
        if (all.total != all.total) highest.ids[i] = i;
    }
}

void statistics(const float* x, long n, int64_t token, long k, const Statistics& out) {
    LogSumExp all;
    Highest highest = {k, out.top_log_probs, out.top_ids};
    for (long first = 0; first < n; first += CHUNK) {
        const long count = smaller(CHUNK, n - first);
        const LogSumExp next = reduce_chunk<true>(x + first, count);
        all.add_chunk(next);
        highest.offer_chunk(x + first, count, first, next.peak);
    }
    *out.log_prob = log_prob(x[token], all.peak, all.total);
    finish_statistics(all, highest, out.entropy);
}

// Random words for 64 vocabulary ids from `first` (a multiple of 64) on: Philox4x32-10 (Salmon et al. 2011). The key is
// the two halves of the seed. The counter is (id / 4, low half of the position, high half of the position, 0); id % 4
// selects the word. c[word] holds this word for 16 counters. The counters are ordered so that `transpose_quarters` puts
// all 64 words in the order of the ids.
inline void philox(uint64_t seed, uint64_t position, uint32_t first, U (&c)[4]) {
    static constexpr uint32_t order[LANES] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    c[0] = add(set1(first / 4), load(order));
    c[1] = set1(static_cast<uint32_t>(position));
    c[2] = set1(static_cast<uint32_t>(position >> 32));
    c[3] = set1(0u);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int i = 0; i < 10; ++i, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        U high0, low0, high1, low1;
        multiply_wide(c[0], 0xD2511F53u, high0, low0);
        multiply_wide(c[2], 0xCD9E8D57u, high1, low1);
        c[0] = bit_xor(bit_xor(high1, c[1]), set1(k0));
        c[2] = bit_xor(bit_xor(high0, c[3]), set1(k1));
        c[1] = low1;
        c[3] = low0;
    }
}

// A float32 u in (0, 1) for each of the 64 ids, in order.
inline void uniform(uint64_t seed, uint64_t position, uint32_t first, F (&u)[4]) {
    U words[4];
    philox(seed, position, first, words);
    for (int word = 0; word < 4; ++word) {
        const F half = add(convert_unsigned(words[word]), set1(0.5f));
        u[word] = min(mul(half, set1(0x1p-32f)), set1(1.0f - 0x1p-24f));
    }
    transpose_quarters(u);
}

// The id with the highest value, the lower id among equal values. A value of -inf is never the best.
struct Best {
    float value;
    int64_t id;

    void offer(float other, int64_t other_id) {
        if (other > value || (other == value && other > -INFINITY && other_id < id)) value = other, id = other_id;
    }
};

// The best of `best` and of 16 values for the ids [first, first + 16).
inline Best best_of(F values, long first, Best best) {
    float lanes[LANES];
    store(lanes, values);
    for (long lane = 0; lane < LANES; ++lane) best.offer(lanes[lane], first + lane);
    return best;
}

constexpr long GROUP = 64;

// A chunk's values, padded with -inf to whole groups.
struct Padded {
    float copy[CHUNK];
    const float* values;

    Padded(const float* x, long n) : values(x) {
        if (n % GROUP == 0) return;
        memcpy(copy, x, static_cast<size_t>(n) * sizeof(float));
        for (long i = n; i < round_up(n, GROUP); ++i) copy[i] = -INFINITY;
        values = copy;
    }
};

// The best of the ids [first, first + n). `first` is a multiple of CHUNK.
inline Best greedy_in_chunk(const float* x, long n, long first) {
    const Padded padded(x, n);
    Best best = {-INFINITY, first};
    for (long i = 0; i < n; i += LANES) {
        const F values = load(padded.values + i);
        if (any_greater(values, set1(best.value))) best = best_of(values, first + i, best);
    }
    return best;
}

// Like `greedy_in_chunk`, with standard Gumbel noise -ln(-ln(1 - u)) added (Gumbel-max).
//
// `bound`: a value that some id of the row is known to reach. Ids that cannot reach the bound are skipped, which may
// change the best of a chunk but never the best of the row. Since -ln(1 - u) >= u, a value x + noise can reach b only
// if u <= exp(x - b). Since u >= 2^-33, no value with x < b - 22.9 can reach b. The margin covers rounding. The
// exponential for bfloat16 is accurate enough here.
inline Best sample_in_chunk(const float* x, long n, uint64_t seed, uint64_t position, long first, float* bound) {
    constexpr float MOST_NOISE = 23.0f;
    const Padded padded(x, n);
    Best best = {-INFINITY, first};
    for (long start = 0; start < n; start += GROUP) {
        const float* at = padded.values + start;
        const float reached = read_bound(bound);
        const float least = reached < INFINITY ? reached - (1e-3f + fabsf(reached) * 0x1p-21f) : -INFINITY;
        const F most = max(max(load(at), load(at + 16)), max(load(at + 32), load(at + 48)));
        if (!any_greater(most, set1(least - MOST_NOISE))) continue;
        F u[GROUP / LANES];
        uniform(seed, position, static_cast<uint32_t>(first + start), u);
        for (long i = 0; i < GROUP; i += LANES) {
            const F values = load(at + i), noise = u[i / LANES];
            const F most_noise = scaled_exp<bf16>(sub(values, set1(least)), 1.0f);
            if (!any_greater(most_noise, noise)) continue;
            best = best_of(sub(values, log(exponential(noise))), first + start + i, best);
        }
        raise_bound(bound, best.value);
    }
    return best;
}

void sample(const float* x, long n, int64_t seed, int64_t position, int64_t* token) {
    Best best = {-INFINITY, 0};
    float bound = -INFINITY;
    for (long first = 0; first < n; first += CHUNK) {
        const Best next = sample_in_chunk(
            x + first, smaller(CHUNK, n - first), static_cast<uint64_t>(seed), static_cast<uint64_t>(position), first,
            &bound
        );
        best.offer(next.value, next.id);
    }
    *token = best.id;
}

inline const float* divided(const float* x, long n, float temperature) {
    float* out = scratch<float>(ROW, CHUNK);
    const F divisor = set1(temperature);
    for (long i = 0; i < n; i += LANES) store(out + i, div(load(x + i), divisor));
    return out;
}

// The edits of rows. The edits of a row ascend by token, so the edits of a chunk lie side by side.
struct EditsOfChunks {
    const LogitEdit* entries;
    const int32_t* bounds = nullptr;  // [chunks + 1, rows], or null if there are no edits
    long rows;

    // Entries with tokens outside [first, first + chunks * CHUNK) are left out.
    EditsOfChunks(const HeadEdits& given, long rows, long chunks, long first)
        : entries(given.entries), rows(rows) {
        if (given.starts[rows] == 0) return;
        int32_t* found = scratch<int32_t>(EDIT_BOUNDS, (chunks + 1) * rows);
        parallel(rows, [&](long row) {
            long i = given.starts[row];
            const long end = given.starts[row + 1];
            for (long chunk = 0; chunk <= chunks; ++chunk) {
                while (i < end && entries[i].token < first + chunk * CHUNK) ++i;
                found[chunk * rows + row] = static_cast<int32_t>(i);
            }
        });
        bounds = found;
    }

    // Calls body(edit) for the edits of a chunk and row. Also loads the edits of the next row into the cache, because
    // they lie far away.
    template <class Body>
    void each(long row, long chunk, const Body& body) const {
        if (bounds == nullptr) return;
        const int32_t* starts = bounds + chunk * rows + row;
        if (row + 1 < rows) {
            const LogitEdit *next = entries + starts[1], *end = entries + starts[rows + 1];
            for (; next < end; next += LINE) __builtin_prefetch(next);
        }
        for (long i = starts[0]; i < starts[rows]; ++i) body(entries[i]);
    }

    static constexpr long LINE = 64 / sizeof(LogitEdit);
};

// A target: where its logit is stored, and the offset of its id in its chunk.
struct Target {
    int32_t place, offset;
};

// The targets of rows, sorted by chunk and then by row, so that the tiles of the head read them in the order of memory.
struct TargetsOfChunks {
    const Target* sorted = nullptr;
    const int32_t* bounds = nullptr;  // [chunks, rows + 1], or null if there are no targets
    long rows;

    // Targets outside [first, first + chunks * CHUNK) are left out.
    TargetsOfChunks(const HeadEdits& given, long rows, long chunks, long first) : rows(rows) {
        const int64_t *starts = given.target_starts, *ids = given.targets;
        if (starts[rows] == 0) return;
        int32_t* places = scratch<int32_t>(TARGET_BOUNDS, chunks * (rows + 1));
        Target* targets = scratch<Target>(TARGETS, starts[rows]);
        const auto for_targets = [&](long row, const auto& body) {
            for (long i = starts[row]; i < starts[row + 1]; ++i) {
                const unsigned long offset = static_cast<unsigned long>(ids[i] - first);
                if (offset < static_cast<unsigned long>(chunks * CHUNK))
                    body(i, places[static_cast<long>(offset / CHUNK) * (rows + 1) + row], offset % CHUNK);
            }
        };
        memset(places, 0, static_cast<size_t>(chunks * (rows + 1)) * sizeof(int32_t));
        parallel(rows, [&](long row) { for_targets(row, [](long, int32_t& count, unsigned long) { ++count; }); });
        int32_t next = 0;
        for (long i = 0; i < chunks * (rows + 1); ++i) {
            const int32_t count = places[i];
            places[i] = next, next += count;
        }
        parallel(rows, [&](long row) {
            for_targets(row, [&](long i, int32_t& place, unsigned long offset) {
                targets[place++] = {static_cast<int32_t>(i), static_cast<int32_t>(offset)};
            });
        });
        // Each place has moved to the end of its targets, where the targets of the next row begin.
        for (long chunk = 0; chunk < chunks; ++chunk) {
            int32_t* of_chunk = places + chunk * (rows + 1);
            for (long row = rows; row > 0; --row) of_chunk[row] = of_chunk[row - 1];
            of_chunk[0] = chunk == 0 ? 0 : of_chunk[-1];
        }
        sorted = targets, bounds = places;
    }

    // Calls body(target) for the targets of a chunk and row.
    template <class Body>
    void each(long row, long chunk, const Body& body) const {
        if (bounds == nullptr) return;
        const int32_t* of_chunk = bounds + chunk * (rows + 1);
        for (long i = of_chunk[row]; i < of_chunk[row + 1]; ++i) body(sorted[i]);
    }
};

// Returns an edited logit. kernels/edits.py defines the steps, each of which rounds its result. `penalties`: for
// repetition, presence and frequency.
inline float edited(float logit, const LogitEdit& edit, const float* penalties) {
    const float biased = logit + edit.bias;
    const float divided = biased / penalties[0], multiplied = biased * penalties[0];  // both, as signs are unpredictable
    const float repeated = biased > 0.0f ? divided : multiplied;
    const float penalized = (edit.occurs ? repeated : biased) - penalties[2] * static_cast<float>(edit.count);
    return penalized - penalties[1] * (edit.count > 0 ? 1.0f : 0.0f);
}

// The edits and the targets of a head's rows.
struct RowChanges {
    const HeadEdits& given;
    EditsOfChunks edits;
    TargetsOfChunks targets;
    const uint32_t** masks;  // of each row, or null

    RowChanges(const HeadEdits& given, long rows, long chunks, long first)
        : given(given), edits(given, rows, chunks, first), targets(given, rows, chunks, first),
          masks(scratch<const uint32_t*>(MASKS, rows)) {
        for (long row = 0; row < rows; ++row) {
            const int64_t place = given.mask_places[row];
            masks[row] = place < 0 ? nullptr : given.masks + place * given.mask_words;
        }
    }

    // Edits the n logits of a chunk, which begins at the id `first`.
    void edit(long row, long chunk, float* logits, long n, long first) const {
        const float* penalties = given.penalties + row * 3;
        edits.each(row, chunk, [&](const LogitEdit& edit) {
            float& logit = logits[edit.token - first];
            logit = edited(logit, edit, penalties);
        });
        if (masks[row] != nullptr) mask_row(logits, n, masks[row] + first / MASK_BITS);
    }

    // Stores the logits of the targets in a chunk.
    void list(long row, long chunk, const float* basis) const {
        targets.each(row, chunk, [&](const Target& target) { given.target_logits[target.place] = basis[target.offset]; });
    }
};

// `bound`: see `sample_in_chunk`. `highest`: of the row, or null. `changes`: or null; `raw` has the edited logits.
template <class T>
SectionResult read_chunk(
    const HeadArgs<T>& args, long row, const float* raw, long n, long first, float* bound, Highest* highest,
    const RowChanges* changes
) {
    const float* scaled = args.temperatures[row] == 1.0f ? raw : divided(raw, n, args.temperatures[row]);
    const float* basis = args.raw[row] ? raw : scaled;
    const LogSumExp sums = highest ? reduce_chunk<true>(basis, n) : reduce_chunk(basis, n);
    if (highest) highest->offer_chunk(basis, n, first, sums.peak);
    if (changes) changes->list(row, (first - args.first) / CHUNK, basis);
    const int64_t target = args.targets[row];
    Best best = {-INFINITY, first};
    if (target == SAMPLE) {
        const uint64_t seed = static_cast<uint64_t>(args.seeds[row]);
        best = sample_in_chunk(scaled, n, seed, static_cast<uint64_t>(args.positions[row]), first, bound);
    } else if (target == GREEDY) {
        best = greedy_in_chunk(scaled, n, first);
    } else if (target >= first && target < first + n) {
        best = {INFINITY, target};
    }
    const long at = best.id - first;
    return {sums.peak, sums.total, sums.weighted, best.value, basis[at], scaled[at], best.id};
}

template <class T>
void head_sections(const HeadArgs<T>& args, const HeadSections& out) {
    const size_t K = static_cast<size_t>(args.weight.columns);
    T* hidden = scratch<T>(HIDDEN, args.count * args.weight.columns);
    for (long i = 0; i < args.count; ++i)
        memcpy(hidden + static_cast<size_t>(i) * K, args.hidden + static_cast<size_t>(args.rows[i]) * K, K * sizeof(T));
    const Left<T> left({hidden, args.count, args.weight.columns, {}});
    const long V = args.weight.rows, chunks = round_up(V, CHUNK) / CHUNK;
    float* bounds = scratch<float>(BOUNDS, args.count);
    Highest* highest = args.has_statistics ? scratch<Highest>(HIGHEST, args.count) : nullptr;
    for (long row = 0; row < args.count; ++row) {
        bounds[row] = -INFINITY;
        if (highest) highest[row] = {args.k, out.top_values + row * args.k, out.top_ids + row * args.k};
    }
    const auto compute = [&](const RowChanges* changes) {
        for_tiles(args.count, chunks, [&](long start, long rows, long group) {
            const long first = group * CHUNK, n = smaller(CHUNK, V - first);
            float* c = scratch<float>(PRODUCT, rows * CHUNK);
            multiply_chunk(left, args.weight, args.shape, start, rows, first, c);
            for (long row = 0; row < rows; ++row) {
                if (changes) changes->edit(start + row, group, c + row * CHUNK, n, args.first + first);
                out.results[(start + row) * chunks + group] =
                    read_chunk(
                        args, start + row, c + row * CHUNK, n, args.first + first, bounds + start + row,
                        highest ? highest + start + row : nullptr, changes
                    );
            }
        });
    };
    if (args.edits == nullptr) {
        compute(nullptr);
    } else {
        const RowChanges changes(*args.edits, args.count, chunks, args.first);
        compute(&changes);
    }
    for (long row = 0; highest != nullptr && row < args.count; ++row)
        for (long i = highest[row].count; i < args.k; ++i) highest[row].values[i] = -INFINITY, highest[row].ids[i] = NO_ID;
}

inline void fold_row(const HeadSections& from, long row, long sections, long offered, const HeadResults& out) {
    const SectionResult* result = from.results + row * sections;
    LogSumExp all;
    const SectionResult* best = result;  // the one with the lower ids among equal values
    for (long i = 0; i < sections; ++i) {
        all.add_chunk({result[i].peak, result[i].total, result[i].weighted});
        if (result[i].best > best->best) best = result + i;
    }
    out.tokens[row] = best->id;
    out.logprobs[row] = log_prob(best->basis, all.peak, all.total);
    out.finite[row] = isfinite(best->scaled) && all.total == all.total;
    if (out.edits != nullptr) {
        const double log_total = ::log(static_cast<double>(all.total));  // the steps of `log_prob`
        for (long i = out.edits->target_starts[row]; i < out.edits->target_starts[row + 1]; ++i)
            out.target_logprobs[i] =
                static_cast<float>((static_cast<double>(out.edits->target_logits[i]) - all.peak) - log_total);
    }
    if (out.entropies == nullptr) return;
    Highest highest = {out.k, out.top_logprobs + row * out.k, out.top_ids + row * out.k};
    for (long i = row * offered; i < (row + 1) * offered; ++i)
        if (from.top_ids[i] != NO_ID) highest.offer(from.top_values[i], from.top_ids[i]);
    finish_statistics(all, highest, out.entropies + row);
}

void fold_sections(const HeadSections& from, long count, long sections, long offered, const HeadResults& out) {
    parallel(round_up(count, NORM_ROWS) / NORM_ROWS, [&](long task) {
        for (long row = task * NORM_ROWS; row < smaller(count, (task + 1) * NORM_ROWS); ++row)
            fold_row(from, row, sections, offered, out);
    });
}
