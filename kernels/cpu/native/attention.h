// Paged attention. A part of kernels.h.

// The softmax over a part of the keys, for several query rows: the largest score (peak), the sum of e^(score - peak),
// and the sum of the values with these weights [rows, value_dim]. A peak of -inf means that no key was seen.
struct Partial {
    float *peaks, *totals, *out;

    static long size(long rows, long value_dim) { return rows * (value_dim + 2); }
    Partial(float* memory, long rows) : peaks(memory), totals(memory + rows), out(memory + 2 * rows) {}

    // The same partial softmax from row `row` on.
    Partial from(long row, long value_dim) const {
        Partial rest = *this;
        rest.peaks += row, rest.totals += row, rest.out += row * value_dim;
        return rest;
    }
};

inline void copy(const Partial& from, const Partial& to, long rows, long value_dim) {
    const size_t bytes = static_cast<size_t>(rows) * sizeof(float);
    memcpy(to.peaks, from.peaks, bytes), memcpy(to.totals, from.totals, bytes);
    memcpy(to.out, from.out, bytes * static_cast<size_t>(value_dim));
}

// Adds the next part to a softmax (Milakov and Gimelshein 2018). Rows that see no key of the part keep their bits. Rows
// that saw no key before the part take the bits of the part.
inline void fold(const Partial& state, const Partial& next, long rows, long value_dim) {
    for (long first = 0; first < rows; first += LANES) {
        const long n = smaller(LANES, rows - first);
        float before_scale[LANES], after_scale[LANES];
        // Reads past the last peak stay within the memory, and the values read there affect no result.
        const F before = load(state.peaks + first), after = load(next.peaks + first), top = max(before, after);
        store(before_scale, exp(sub(before, top)));
        store(after_scale, exp(sub(after, top)));
        for (long i = 0; i < n; ++i) {
            const long row = first + i;
            if (next.peaks[row] == -INFINITY) continue;
            if (state.peaks[row] == -INFINITY) {
                copy(next.from(row, value_dim), state.from(row, value_dim), 1, value_dim);
                continue;
            }
            state.peaks[row] = state.peaks[row] > next.peaks[row] ? state.peaks[row] : next.peaks[row];
            state.totals[row] = state.totals[row] * before_scale[i] + next.totals[row] * after_scale[i];
            const F left_scale = set1(before_scale[i]), right_scale = set1(after_scale[i]);
            float *left = state.out + row * value_dim, *right = next.out + row * value_dim;
            for (long j = 0; j < value_dim; j += LANES)
                store(left + j, add(mul(load(left + j), left_scale), mul(load(right + j), right_scale)));
        }
    }
}

inline void clear(const Partial& state, long rows, long value_dim) {
    for (long row = 0; row < rows; ++row) state.peaks[row] = -INFINITY, state.totals[row] = 0.0f;
    for (long i = 0; i < rows * value_dim; ++i) state.out[i] = 0.0f;
}

// Queries [first, first + count) of each of the sequences [sequence, sequence + members), for the heads that share one
// key-value head. The rows are (member, query, head of the group).
struct QueryTile {
    long sequence, members, kv_head, first, count;
};

// Keys [first, end).
struct Keys {
    long first, end;
};

// The keys that the queries of a tile see, out of `keys` keys: query i sees [from(i), to(i)).
//
// Without `ends`, query i sees the keys up to `first_to` + i. With `ends`, query i sees the keys up to the token ends[i],
// and the split's first key is the token `start`.
struct Sight {
    long first_from, first_to, keys;
    const int64_t* ends = nullptr;
    long start = 0;

    long from(long query) const { return within(first_from + query); }
    long to(long query) const { return within(ends == nullptr ? first_to + query : ends[query] - start); }
    // The same, for the keys after the first `count` keys.
    Sight after(long count) const { return {first_from - count, first_to - count, keys - count, ends, start + count}; }

  private:
    long within(long key) const { return larger(0, smaller(keys, key)); }
};

// Keys and values that a thread will read soon, in panels of 16 tokens.
template <class T>
struct Ahead {
    const T** panels;
    long count;
};

template <class T>
class Attention {
  public:
    explicit Attention(const AttentionArgs<T>& args)
        : args_(args), caches_(args.caches), dim_(args.caches.head_dim), value_dim_(args.caches.value_dim),
          group_(args.heads / args.caches.kv_heads) {}

    long value_dim() const { return value_dim_; }
    long rows(const QueryTile& tile) const { return tile.members * tile.count * group_; }

    // The keys [first_key, context) that any query of a tile's first member sees, and the splits [first_split, splits)
    // that contain these keys.
    long first_key(const QueryTile& tile) const { return larger(0, position(tile, 0) + 1 - args_.window); }
    long context(const QueryTile& tile) const { return end(tile, tile.count - 1); }
    long first_split(const QueryTile& tile) const { return first_key(tile) / KV_SPLIT; }
    long splits(const QueryTile& tile) const { return round_up(context(tile), KV_SPLIT) / KV_SPLIT; }

    // Scores are converted to weights two panels at a time. A pair of panels begins at a multiple of this number of
    // keys.
    static constexpr long TWO_PANELS = 2 * LANES;

    // Adds the panels that a split of a tile reads to `ahead`, which must have enough room. A no-op unless a block is
    // exactly one panel, and holds no codes.
    void look_ahead(const QueryTile& tile, long split, Ahead<T>& ahead) const {
        if (caches_.block_size != LANES || caches_.has_codes()) return;
        const long end = smaller((split + 1) * KV_SPLIT, context(tile)), behind = first_key(tile) / LANES * LANES;
        for (long token = larger(split * KV_SPLIT, behind); token < end; token += LANES) {
            ahead.panels[ahead.count++] = key_panel(tile, token);
            ahead.panels[ahead.count++] = value_panel(tile, token);
        }
    }

    // Reduces keys [split * KV_SPLIT, (split + 1) * KV_SPLIT) for all rows of a tile. Prefetches the next split of the
    // next tile, and the panels in `ahead`.
    void reduce(
        const QueryTile& tile, long split, const QueryTile& next_tile, long next_split, const Partial& out,
        const Ahead<T>& ahead = {nullptr, 0}
    ) const {
        const long n = rows(tile), D = dim_, V = value_dim_;
        const Sight sight = sight_of(tile, split);
        const long skipped = sight.from(0) / TWO_PANELS * TWO_PANELS;
        const Sight rest = sight.after(skipped);
        const long start = split * KV_SPLIT + skipped, keys = rest.keys;
        const long panels = round_up(keys, LANES) / LANES;
        const bool all_see_all = sight.to(0) == sight.keys && sight.from(tile.count - 1) == sight.from(0);
        if constexpr (std::is_same_v<T, bf16> && CODED_ROWS > 0)
            if (caches_.has_codes() && n <= CODED_ROWS && all_see_all) {
                const CodedSplit codes = coded_split(tile, start, keys, rest.from(0), next_tile, next_split);
                return caches_.format == CacheFormat::INT8 ? reduce_codes<CacheFormat::INT8>(tile, codes, rest, out)
                                                           : reduce_codes<CacheFormat::FP8>(tile, codes, rest, out);
            }
        const Split at(*this, tile, start, keys, rest.from(0), next_tile, next_split);
        if (!all_see_all && !at.all_finite(panels, LANES * V)) return reduce_one_by_one(tile, split, out);
        float* scores = scratch<float>(SCORES, n * KV_SPLIT);
        T* weights = scratch<T>(WEIGHTS, n * KV_SPLIT);
        const long passes = (n + PASS_ROWS<T> - 1) / PASS_ROWS<T>, spare = (passes - 1) * panels;
        const long half = smaller(ahead.count / 2, spare);
        Factors<T> scoring = {
            queries(tile), D, at.keys, panels, at.key_stride, 1, D / PAIR<T>, at.values, LANES * PAIR<T>
        };
        if (half > 0) fetch_ahead(scoring, {ahead.panels, half}, spare, 1);
        multiply(scoring, n, false, scores, KV_SPLIT);
        softmax(scores, n, rest, weights, out);
        const long width = V / LANES;
        const T *b[KV_SPLIT / LANES * MAX_PANELS], *next[KV_SPLIT / LANES * MAX_PANELS];
        const bool has_codes = caches_.has_codes();  // `Split` has prefetched the next keys and values
        for (long i = 0; i < panels; ++i) {
            const T* next_key = has_codes ? nullptr : key_panel(next_tile, next_split * KV_SPLIT + i * LANES);
            for (long j = 0; j < width; ++j) {
                b[i * width + j] = at.values[i] + j * LANES * PAIR<T>;
                next[i * width + j] = has_codes ? *at.values : next_key + j * LANES / PAIR<T> * at.key_stride;
            }
        }
        Factors<T> weighing = {
            weights, KV_SPLIT, b, width, V * PAIR<T>, panels, LANES / PAIR<T>, next, has_codes ? 0 : at.key_stride
        };
        if (half > 0) fetch_ahead(weighing, {ahead.panels + half, half}, spare, width);
        multiply(weighing, n, false, out.out, V);
    }

    // As `reduce`, for few rows that see all tokens of the split: codes are expanded in registers.
    template <CacheFormat FORMAT>
    void reduce_codes(const QueryTile& tile, const CodedSplit& split, const Sight& sight, const Partial& out) const {
        const long n = rows(tile);
        float* scores = scratch<float>(SCORES, n * KV_SPLIT);
        T* weights = scratch<T>(WEIGHTS, n * KV_SPLIT);
        multiply_keys<FORMAT>(caches_, queries(tile), n, split.panels, split.count, scores);
        softmax(scores, n, sight, weights, out);
        multiply_values<FORMAT>(caches_, weights, n, split.panels, split.count, split.scales, split.zeros, out.out);
    }

    // Reduces each query in its own tile. In a shared tile, a NaN or infinite value of a later token would reach the
    // query even with a weight of 0.
    void reduce_one_by_one(const QueryTile& tile, long split, const Partial& out) const {
        for (long i = 0; i < tile.count; ++i) {
            const QueryTile query = {tile.sequence, 1, tile.kv_head, tile.first + i, 1};
            const Partial part = out.from(i * group_, value_dim_);
            if (first_split(query) <= split && split < splits(query))
                reduce(query, split, query, split, part);
            else
                clear(part, group_, value_dim_);
        }
    }

    void finish(const QueryTile& tile, const Partial& state) const {
        long row = 0;
        visit_heads(tile, [&](long head) {
            for (long i = 0; i < group_; ++i, ++row) {
                T* out = args_.out + (head + i) * value_dim_;
                F total = set1(state.totals[row]), kept = set1(1.0f);
                if (args_.sinks != nullptr)
                    fold_sink(set1(state.peaks[row]), widened(args_.sinks[tile.kv_head * group_ + i]), total, kept);
                // The sign of a zero may depend on the tile's other queries. Adding 0 makes a negative zero positive.
                for (long j = 0; j < value_dim_; j += LANES)
                    store(out + j, div(add(mul(load(state.out + row * value_dim_ + j), kept), set1(0.0f)), total));
            }
        });
    }

    // Adds a score with a value of zero to a row's total. `kept`: receives the factor for the row's values.
    static void fold_sink(F peak, float sink, F& total, F& kept) {
        const F top = max(peak, set1(sink));
        kept = exp(sub(peak, top));
        total = add(mul(total, kept), exp(sub(set1(sink), top)));
    }

    // `start`, `count`, `unseen`, `next_tile`, `next_split`: as for `Split`.
    CodedSplit coded_split(
        const QueryTile& tile, long start, long count, long unseen, const QueryTile& next_tile, long next_split
    ) const {
        CodedSplit split;
        split.count = round_up(count, LANES) / LANES;
        const bool aligned = caches_.block_size % LANES == 0, has_zeros = caches_.format == CacheFormat::INT8;
        const long codes = LANES * (dim_ + value_dim_), bytes = codes + 2 * LANES * 6;
        uint8_t* gathered = aligned ? nullptr : scratch<uint8_t>(TOKEN_CODES, split.count * bytes);
        for (long i = 0; i < split.count; ++i) {
            const long first = i * LANES;
            CodedPanel& panel = split.panels[i];
            panel = coded_panel(tile, start + first);
            if (!aligned) gather(tile, start + first, smaller(LANES, count - first), gathered + i * bytes, panel);
            const CodedPanel next = coded_panel(next_tile, next_split * KV_SPLIT + first);
            panel.next_keys = next.keys, panel.next_values = next.values;
            const SharedNumbers shared(panel.value_shared, panel.shared_stride, has_zeros);
            store(split.scales + first, shared.scales), store(split.zeros + first, shared.zeros);
        }
        for (long t = 0; t < smaller(unseen, count); ++t) split.scales[t] = split.zeros[t] = 0.0f;
        for (long t = count; t < split.count * LANES; ++t) split.scales[t] = split.zeros[t] = 0.0f;
        return split;
    }

    // The panel that begins at a token, as it lies in the cache. For a token past the last token, the panel that begins
    // at the last token.
    CodedPanel coded_panel(const QueryTile& tile, long token) const {
        const long size = caches_.block_size, t = smaller(token, context(tile) - 1), offset = t % size;
        const long block = table(tile)[t / size], head = tile.kv_head;
        const uint8_t* values = caches_.value_codes(block, head) + offset * value_dim_;
        return {
            caches_.key_codes(block, head) + offset, values, size, caches_.key_shared(block, head, 0) + offset,
            caches_.value_shared(block, head) + offset, size, nullptr, nullptr
        };
    }

    // Copies n tokens from several blocks to `memory`, and sets the places of `panel`. All other tokens of the panel
    // are zeros.
    void gather(const QueryTile& tile, long token, long n, uint8_t* memory, CodedPanel& panel) const {
        const long D = dim_, V = value_dim_, numbers = caches_.shared_numbers(), of_keys = caches_.key_parts() * numbers;
        uint8_t *keys = memory, *values = keys + LANES * D;
        uint16_t *key_shared = reinterpret_cast<uint16_t*>(values + LANES * V), *value_shared = key_shared + 4 * LANES;
        memset(memory, 0, static_cast<size_t>(LANES * (D + V) + 2 * LANES * 6));
        for (long t = 0; t < n; ++t) {
            const CodedPanel from = coded_panel(tile, token + t);
            for (long d = 0; d < D; ++d) keys[d * LANES + t] = from.keys[d * from.key_stride];
            memcpy(values + t * V, from.values, static_cast<size_t>(V));
            for (long i = 0; i < of_keys; ++i) key_shared[i * LANES + t] = from.key_shared[i * from.shared_stride];
            for (long i = 0; i < numbers; ++i) value_shared[i * LANES + t] = from.value_shared[i * from.shared_stride];
        }
        panel = {keys, values, LANES, key_shared, value_shared, LANES, nullptr, nullptr};
    }

    // Pointers to the 16-token panels of a split, for `count` tokens from `start` on. A pointer points into the cache,
    // or into a copy if the cache does not store the panel contiguously, or stores codes. The values of the first `unseen`
    // tokens, which no query of the tile sees, are zeros. If the cache stores codes, the codes of the next split of the
    // next tile are prefetched.
    struct Split {
        const T *keys[KV_SPLIT / LANES], *values[KV_SPLIT / LANES];
        long key_stride;

        Split(
            const Attention& attention, const QueryTile& tile, long start, long count, long unseen,
            const QueryTile& next_tile, long next_split
        ) {
            const Caches<T>& caches = attention.caches_;
            if (caches.has_codes()) {
                const auto expand = caches.format == CacheFormat::INT8 ? &Split::expand<CacheFormat::INT8>
                                                                       : &Split::expand<CacheFormat::FP8>;
                (this->*expand)(attention, attention.coded_split(tile, start, count, unseen, next_tile, next_split));
                return;
            }
            const int64_t* table = attention.table(tile);
            const long D = caches.head_dim, V = caches.value_dim;
            const bool aligned = caches.block_size % LANES == 0;
            key_stride = (aligned ? caches.block_size : LANES) * PAIR<T>;
            T* copies = scratch<T>(TAIL, KV_SPLIT * (D + V));
            for (long i = 0; i * LANES < count; ++i, copies += LANES * (D + V)) {
                const long token = start + i * LANES, tokens = smaller(LANES, start + count - token);
                keys[i] = attention.key_panel(tile, token);
                values[i] = attention.value_panel(tile, token);
                if (!aligned) keys[i] = copy_keys(caches, table, tile.kv_head, token, tokens, copies);
                // A value that no query sees may be NaN or infinite, which would reach the result even with a weight of
                // 0.
                const long first = larger(0, smaller(tokens, unseen - i * LANES));
                if (!aligned || tokens < LANES || first > 0)
                    values[i] = copy_values(caches, table, tile.kv_head, token, first, tokens, copies + LANES * D);
            }
        }

        template <CacheFormat FORMAT>
        void expand(const Attention& attention, const CodedSplit& split) {
            const Caches<T>& caches = attention.caches_;
            const long D = caches.head_dim, V = caches.value_dim;
            key_stride = LANES * PAIR<T>;
            T* copies = scratch<T>(TAIL, KV_SPLIT * (D + V));
            for (long i = 0; i < split.count; ++i, copies += LANES * (D + V)) {
                keys[i] = copies, values[i] = copies + LANES * D;
                expand_keys<FORMAT>(caches, split.panels[i], copies);
                const float *scales = split.scales + i * LANES, *zeros = split.zeros + i * LANES;
                expand_values<FORMAT>(caches, split.panels[i], scales, zeros, copies + LANES * D);
            }
        }

        // Returns whether all values of the first `panels` panels are finite.
        bool all_finite(long panels, long count) const {
            F zero = set1(0.0f);
            for (long i = 0; i < panels; ++i)
                for (long j = 0; j < count; j += LANES) zero = fma(load(values[i] + j), set1(0.0f), zero);
            return sum(zero) == 0.0f;
        }

        static T* copy_keys(const Caches<T>& caches, const int64_t* table, long head, long token, long n, T* out) {
            const long block_size = caches.block_size;
            for (long t = 0; t < n; ++t) {
                const long offset = (token + t) % block_size * PAIR<T>;
                const T* block = caches.key_block(table[(token + t) / block_size], head) + offset;
                for (long d = 0; d < caches.head_dim; d += PAIR<T>)
                    memcpy(out + d * LANES + t * PAIR<T>, block + d * block_size, sizeof(T) * PAIR<T>);
            }
            return out;
        }

        // Copies the values of tokens [token + first, token + n); the rest of the panel is zeros.
        static T* copy_values(
            const Caches<T>& caches, const int64_t* table, long head, long token, long first, long n, T* out
        ) {
            const long V = caches.value_dim, block_size = caches.block_size;
            memset(static_cast<void*>(out), 0, static_cast<size_t>(LANES * V) * sizeof(T));
            for (long t = first / PAIR<T> * PAIR<T>; t < n; t += PAIR<T>) {
                const long offset = (token + t) % block_size;
                const T* block = caches.value_block(table[(token + t) / block_size], head) + offset * V;
                if (first <= t && t + PAIR<T> <= n) {
                    memcpy(out + t * V, block, static_cast<size_t>(V * PAIR<T>) * sizeof(T));
                    continue;
                }
                const long one = t < first ? 1 : 0;  // index within the pair
                for (long d = 0; d < V; ++d) out[t * V + d * PAIR<T> + one] = block[d * PAIR<T> + one];
            }
            return out;
        }
    };

  private:
    const int64_t* table(const QueryTile& tile) const { return args_.tables + tile.sequence * args_.max_blocks; }

    // The place of a token in the cache. For a token past the end of the sequence, the place of the last token.
    const T* key_panel(const QueryTile& tile, long token) const {
        const long t = smaller(token, context(tile) - 1), block = table(tile)[t / caches_.block_size];
        return caches_.key_block(block, tile.kv_head) + t % caches_.block_size * PAIR<T>;
    }
    const T* value_panel(const QueryTile& tile, long token) const {
        const long block = table(tile)[token / caches_.block_size];
        return caches_.value_block(block, tile.kv_head) + token % caches_.block_size * value_dim_;
    }

    // Makes the later passes of a product prefetch the panels in `ahead`. The panels are spread evenly over the passes'
    // `spare` entries of the table; each panel takes `width` entries.
    void fetch_ahead(Factors<T>& factors, const Ahead<T>& ahead, long spare, long width) const {
        const long own = factors.rounds * factors.width;
        const T** tables = scratch<const T*>(NEXT, own + spare * width);
        memcpy(tables, factors.next, static_cast<size_t>(own) * sizeof(*tables));
        for (long i = 0; i < spare; ++i)
            for (long j = 0; j < width; ++j)
                tables[own + i * width + j] = ahead.panels[i * ahead.count / spare] + j * LANES * LANES;
        factors.next = tables, factors.next_table = own;
    }

    // The absolute position of a query of the tile's first sequence.
    long position(const QueryTile& tile, long query) const {
        const int64_t* starts = args_.query_starts + tile.sequence;
        return args_.context_lens[tile.sequence] - (starts[1] - starts[0]) + tile.first + query;
    }

    // The end of the keys that a query of the tile's first sequence sees.
    long end(const QueryTile& tile, long query) const {
        return args_.ends == nullptr ? position(tile, query) + 1 : own_ends(tile)[query];
    }
    const int64_t* own_ends(const QueryTile& tile) const {
        return args_.ends + args_.query_starts[tile.sequence] + tile.first;
    }

    // The keys of a split that a tile's queries see. Queries of several sequences see all keys of the split.
    Sight sight_of(const QueryTile& tile, long split) const {
        const long start = split * KV_SPLIT;
        if (tile.members > 1) return {-tile.members * tile.count, KV_SPLIT, KV_SPLIT};
        const long end = position(tile, 0) + 1 - start, keys = smaller(KV_SPLIT, context(tile) - start);
        if (args_.ends != nullptr) return {end - args_.window, end, keys, own_ends(tile), start};
        return {end - args_.window, end, keys};
    }

    // Copies the rows of a tile [rows, head_dim] one after the other.
    const T* queries(const QueryTile& tile) const {
        T* q = scratch<T>(QUERIES, rows(tile) * dim_);
        T* next = q;
        visit_heads(tile, [&](long head) {
            memcpy(next, args_.q + head * dim_, static_cast<size_t>(group_ * dim_) * sizeof(T));
            next += group_ * dim_;
        });
        return q;
    }

    // Calls `visit` for each query in order, with the index of the tile's first head among the heads of all queries.
    template <class Visit>
    void visit_heads(const QueryTile& tile, const Visit& visit) const {
        for (long member = 0; member < tile.members; ++member) {
            const long token = args_.query_starts[tile.sequence + member] + tile.first;
            for (long i = 0; i < tile.count; ++i) visit((token + i) * args_.heads + tile.kv_head * group_);
        }
    }

    // Turns the scores of n rows into softmax weights, and sets the rows' peaks and totals.
    void softmax(float* scores, long n, const Sight& sight, T* weights, const Partial& out) const {
        const float scale = args_.soft_cap > 0.0f ? 1.0f : args_.scale;
        const long panels = round_up(sight.keys, LANES) / LANES;
        if (args_.soft_cap > 0.0f) cap(scores, n, panels);
        // With separate loops, a core can compute several rows at the same time.
        for (long row = 0; row < n; ++row) out.peaks[row] = highest(scores + row * KV_SPLIT, seen(sight, row));
        for (long row = 0; row < n; ++row) {
            const float top = out.peaks[row];
            const float total =
                weigh(scores + row * KV_SPLIT, seen(sight, row), top, scale, panels, weights + row * KV_SPLIT);
            out.totals[row] = total;
            out.peaks[row] = total == total ? top * scale : total;  // a maximum may ignore a NaN
        }
    }

    // Scales and caps the scores.
    void cap(float* scores, long n, long panels) const {
        const F scale = set1(args_.scale);
        for (long row = 0; row < n; ++row)
            for (long i = row * KV_SPLIT; i < row * KV_SPLIT + panels * LANES; i += LANES)
                store(scores + i, capped(mul(load(scores + i), scale), args_.soft_cap));
    }

    Keys seen(const Sight& sight, long row) const { return {sight.from(row / group_), sight.to(row / group_)}; }

    // Returns the largest of a row's scores for the keys that the row sees. Fills the rest of the first and last pair
    // of panels with -inf.
    float highest(float* scores, const Keys& seen) const {
        const long start = seen.first / TWO_PANELS * TWO_PANELS;
        for (long i = start; i < seen.first; ++i) scores[i] = -INFINITY;
        for (long i = seen.end; i < round_up(seen.end, TWO_PANELS); ++i) scores[i] = -INFINITY;
        F most = set1(-INFINITY);
        for (long i = start; i < seen.end; i += LANES) most = max(most, load(scores + i));
        return peak(most);
    }

    // Turns scores into weights relative to `top`, rounded to T, with zeros for the other keys of `panels` panels.
    // Returns the sum of the weights. May write one panel more, since rows lie KV_SPLIT apart.
    float weigh(const float* scores, const Keys& seen, float top, float scale, long panels, T* weights) const {
        const F shift = set1(top == -INFINITY ? 0.0f : top);
        // Subtracting the top before scaling makes the largest weight e^0, for scores of any size.
        const auto weight = [&](long i) { return scaled_exp<T>(sub(load(scores + i), shift), scale); };
        F sums = set1(0.0f);
        long i = 0;
        for (; i < seen.first / TWO_PANELS * TWO_PANELS; i += LANES) store(weights + i, set1(0.0f));
        for (; i < seen.end; i += TWO_PANELS) store_and_add(weights + i, weight(i), weight(i + LANES), sums);
        for (; i < panels * LANES; i += LANES) store(weights + i, set1(0.0f));
        return sum(sums);
    }

    const AttentionArgs<T>& args_;
    const Caches<T>& caches_;
    const long dim_, value_dim_, group_;
};

constexpr long QUERY_ROWS = 48;

// A task: splits [first, end) of the keys for one tile, folded from left to right. `memory`: the memory for the result,
// a Partial. Null for a task with all keys, which stores the attention's output instead. `place`: the number of splits
// in the large tasks before this task.
struct AttentionTask {
    QueryTile tile;
    long first, end;
    float* memory;
    long place;
};

// Cuts a batch into tasks. A sequence with more queries than fit in one tile is cut into tiles. For every other
// sequence, each split is a task, so that a long sequence keeps all threads busy. Neighbouring sequences may share a
// task for a split, which then reads the split once. The sequences must have equally many queries, and all their
// queries must see the whole split. The blocks of the sequences must also be the same from the first shared split to
// the end of the current split. The splits that sequences share from split 0 on become a single task with a single part
// to fold. A joined task must have many rows (`is_large`). The number of joined tasks must be at least four for each
// thread, or divide evenly among the threads.
template <class T>
class AttentionPlan {
  public:
    explicit AttentionPlan(const AttentionArgs<T>& args)
        : args_(args), op_(args), most_(larger(1, QUERY_ROWS * args.caches.kv_heads / args.heads)),
          shared_(scratch<Splits>(SHARED, args.sequences)), first_parts_(scratch<long>(FIRST_PARTS, args.sequences)) {
        long tasks = 0;
        // `members` reads both arrays.
        for (long i = 0; i < args_.sequences; ++i) {
            shared_[i] = shared_with_previous(i), first_parts_[i] = 1;
            splits_ = larger(splits_, round_up(args_.context_lens[i], KV_SPLIT) / KV_SPLIT);
        }
        for (long i = 0, count; i < args_.sequences; i += count) {
            count = members(i, 0);
            if (count == 1 || !is_large({i, count, 0, 0, queries(i)})) continue;
            long end = shared_[i + 1].end;
            for (long j = i + 2; j < i + count; ++j) end = smaller(end, shared_[j].end);
            tasks += args_.caches.kv_heads;
            for (long j = i; j < i + count; ++j) first_parts_[j] = end;
        }
        if (tasks % num_threads() != 0 && tasks < 4 * num_threads())
            for (long i = 0; i < args_.sequences; ++i) first_parts_[i] = 1;
    }

    // Calls visit(tile, first split, end) for each task.
    template <class Visit>
    void visit_tasks(const Visit& visit) const {
        for (long i = 0; i < args_.sequences; ++i)
            for (long first = 0; !fits_tile(i) && first < queries(i); first += most_) {
                const QueryTile tile = {i, 1, 0, first, smaller(most_, queries(i) - first)};
                visit_heads(tile, op_.first_split(tile), op_.splits(tile), visit);
            }
        for (long split = 0; split < splits_; ++split)
            for (long i = 0, count; i < args_.sequences; i += count) {
                count = members(i, split);
                if (begins_task(i, split))
                    visit_heads({i, count, 0, 0, queries(i)}, split, larger(split + 1, first_parts_[i]), visit);
            }
    }

    // Returns whether all queries of a sequence lie in one tile.
    bool fits_tile(long i) const { return queries(i) <= most_; }
    bool is_large(const QueryTile& tile) const { return !fits_tile(tile.sequence) || op_.rows(tile) > PASS_ROWS<T>; }
    bool has_split(long i, long split) const {
        return queries(i) > 0 && fits_tile(i) && first_split(i) <= split && split * KV_SPLIT < args_.context_lens[i];
    }
    // The first split that any query of a sequence sees.
    long first_split(long i) const { return op_.first_split({i, 1, 0, 0, queries(i)}); }
    // The split after the first task of a sequence.
    long second_part(long i) const { return larger(first_split(i) + 1, first_parts_[i]); }
    long queries(long i) const { return args_.query_starts[i + 1] - args_.query_starts[i]; }
    const Attention<T>& op() const { return op_; }

  private:
    template <class Visit>
    void visit_heads(QueryTile tile, long first, long end, const Visit& visit) const {
        for (tile.kv_head = 0; tile.kv_head < args_.caches.kv_heads; ++tile.kv_head) visit(tile, first, end);
    }

    bool begins_task(long i, long split) const {
        return has_split(i, split) && (split == 0 || split >= first_parts_[i]);
    }

    // Returns the number of sequences from i on that share a task beginning with this split; 1 if i shares no such
    // task.
    long members(long i, long split) const {
        if (!begins_task(i, split)) return 1;
        const auto joins = [&](long j) {
            return j < args_.sequences && shared_[j].first <= split && split < shared_[j].end && begins_task(j, split);
        };
        long count = 1;
        while (count * queries(i) < most_ && joins(i + count)) ++count;
        return count;
    }

    // Splits [first, end) of the keys.
    struct Splits {
        long first, end;
    };

    // The splits that a sequence shares with the previous sequence. In a shared split, both sequences have the same
    // blocks, and all queries of both sequences see the whole split.
    Splits shared_with_previous(long i) const {
        if (i == 0 || queries(i - 1) != queries(i)) return {0, 0};
        const int64_t *here = args_.tables + i * args_.max_blocks, *before = here - args_.max_blocks;
        const long context = smaller(args_.context_lens[i - 1], args_.context_lens[i]);
        const long behind = larger(0, larger(args_.context_lens[i - 1], args_.context_lens[i]) - args_.window);
        const long block_size = args_.caches.block_size, first_shared = round_up(behind, KV_SPLIT) / KV_SPLIT;
        for (long split = first_shared;; ++split) {
            const long end = (split + 1) * KV_SPLIT, first = split * KV_SPLIT / block_size;
            if (end > context - queries(i) + 1) return {first_shared, split};
            const size_t bytes = static_cast<size_t>((end - 1) / block_size + 1 - first) * sizeof(*here);
            if (memcmp(here + first, before + first, bytes) != 0) return {first_shared, split};
        }
    }

    const AttentionArgs<T>& args_;
    const Attention<T> op_;
    const long most_;
    long splits_ = 0;
    // For each sequence: the splits shared with the previous sequence, and the end of the splits that are joined into
    // the task of split 0.
    Splits* const shared_;
    long* const first_parts_;
};

// Runs the tasks of a batch: first `large` ones, then `small` ones, which are single splits of few rows. A large task
// computes much and reads little; a small task computes little and reads much. Up to MOST_FOLLOWERS small tasks
// therefore follow each split of a large task on the same thread. The thread prefetches keys and values of these
// followers while it computes the split. At least an eighth of the small tasks, rounded down, do not follow a large
// task. These tasks run last, so that the threads finish close together.
template <class T>
class AttentionRun {
  public:
    static constexpr long MOST_FOLLOWERS = 8;

    // `splits`: the number of splits of all large tasks.
    AttentionRun(const Attention<T>& op, const AttentionTask* tasks, long large, long splits, long small)
        : op_(op), tasks_(tasks), large_(large), splits_(splits),
          followers_(smaller(small - small / 8, splits * MOST_FOLLOWERS)), units_(large + small - followers_) {}

    void run() const {
        parallel(units_, [&](long unit) {
            const AttentionTask &task = leader(unit), &next = leader(unit + num_threads());
            const long n = op_.rows(task.tile), size = Partial::size(n, op_.value_dim());
            float* memory = scratch<float>(PARTIALS, 2 * size);
            const Partial state(task.memory == nullptr ? memory : task.memory, n), part(memory + size, n);
            for (long split = task.first; split < task.end; ++split) {
                const bool last = split + 1 == task.end;
                const AttentionTask& later = last ? next : task;
                reduce(task, split, later, last ? next.first : split + 1, split == task.first ? state : part);
                if (split > task.first) fold(state, part, n, op_.value_dim());
            }
            if (task.memory == nullptr) op_.finish(task.tile, state);
        });
    }

  private:
    // The first task of a unit. For a unit past the last unit, the first task of the last unit.
    const AttentionTask& leader(long unit) const {
        const long u = smaller(unit, units_ - 1);
        return tasks_[u < large_ ? u : u + followers_];
    }

    // Computes one split of a leader and its followers. Split `next_split` of `next` comes after the followers.
    void reduce(
        const AttentionTask& task, long split, const AttentionTask& next, long next_split, const Partial& out
    ) const {
        Ahead<T> ahead = {scratch<const T*>(AHEAD, MOST_FOLLOWERS * 2 * KV_SPLIT / LANES), 0};
        const AttentionTask* small = nullptr;
        visit_followers(task, split, [&](const AttentionTask& follower) {
            op_.look_ahead(follower.tile, follower.first, ahead);
        });
        // The followers' keys are already in `ahead`, so this split prefetches the next leader's keys instead.
        op_.reduce(task.tile, split, next.tile, next_split, out, ahead);
        const auto compute = [&](const QueryTile& later, long later_split) {
            op_.reduce(small->tile, small->first, later, later_split, Partial(small->memory, op_.rows(small->tile)));
        };
        visit_followers(task, split, [&](const AttentionTask& follower) {
            if (small != nullptr) compute(follower.tile, follower.first);
            small = &follower;
        });
        if (small != nullptr) compute(next.tile, next_split);
    }

    template <class Visit>
    void visit_followers(const AttentionTask& task, long split, const Visit& visit) const {
        if (&task - tasks_ >= large_) return;
        for (long i = task.place + split - task.first; i < followers_; i += splits_) visit(tasks_[large_ + i]);
    }

    const Attention<T>& op_;
    const AttentionTask* const tasks_;
    const long large_, splits_, followers_, units_;
};

// The attention of a batch, planned once, which may run several times. The plan keeps a reference to `args`. Between
// runs, `args` may change to other arguments that the plan `serves`. The plan lies in scratch memory of the thread that
// created it, and is valid until that thread plans again or runs the head.
template <class T>
class PlannedAttention {
  public:
    explicit PlannedAttention(const AttentionArgs<T>& args) : args_(args), plan_(args) {
        count();
        tasks_ = scratch<AttentionTask>(TASKS, large_ + small_);
        parts_ = scratch<Partial>(PARTS, args.sequences * args.caches.kv_heads * splits_);
        fill();
    }

    // Returns whether the plan also fits other arguments for the same batch.
    bool serves(const AttentionArgs<T>& other) const {
        const Caches<T>&here = args_.caches, &there = other.caches;
        return args_.tables == other.tables && args_.window == other.window && args_.heads == other.heads &&
               here.kv_heads == there.kv_heads && here.head_dim == there.head_dim &&
               here.value_dim == there.value_dim && here.block_size == there.block_size &&
               here.format == there.format;
    }

    void run() const {
        AttentionRun<T>(plan_.op(), tasks_, large_, large_splits_, small_).run();
        parallel(args_.sequences, [&](long sequence) {
            if (plan_.fits_tile(sequence) && plan_.queries(sequence) > 0) fold_parts(sequence);
        });
    }

  private:
    void count() {
        const Attention<T>& op = plan_.op();
        plan_.visit_tasks([&](const QueryTile& tile, long first, long end) {
            const bool is_large = plan_.is_large(tile);
            large_ += is_large, small_ += !is_large, large_splits_ += is_large ? end - first : 0;
            if (!plan_.fits_tile(tile.sequence)) return;
            memory_ += Partial::size(op.rows(tile), op.value_dim());
            for (long i = tile.sequence; i < tile.sequence + tile.members; ++i)
                splits_ = larger(splits_, end - plan_.first_split(i));
        });
    }

    // Fills in the tasks and the places of their results.
    void fill() {
        const Attention<T>& op = plan_.op();
        float* partials = scratch<float>(RESULTS, memory_);
        AttentionTask *next_large = tasks_, *next_small = tasks_ + large_;
        long place = 0;
        plan_.visit_tasks([&](const QueryTile& tile, long first, long end) {
            const bool is_large = plan_.is_large(tile), is_whole = !plan_.fits_tile(tile.sequence);
            *(is_large ? next_large : next_small)++ = {tile, first, end, is_whole ? nullptr : partials, place};
            place += is_large ? end - first : 0;
            if (is_whole) return;
            const long rows = op.rows(tile);
            for (long i = 0; i < tile.members; ++i)
                *part(tile.sequence + i, tile.kv_head, first) =
                    Partial(partials, rows).from(i * rows / tile.members, op.value_dim());
            partials += Partial::size(rows, op.value_dim());
        });
    }

    // For every sequence, key-value head and split that begins a part: the first row of the sequence in that part.
    Partial* part(long sequence, long kv_head, long split) const {
        return parts_ + (sequence * args_.caches.kv_heads + kv_head) * splits_ + split - plan_.first_split(sequence);
    }

    void fold_parts(long sequence) const {
        const Attention<T>& op = plan_.op();
        QueryTile tile = {sequence, 1, 0, 0, plan_.queries(sequence)};
        const long rows = op.rows(tile), V = op.value_dim();
        for (; tile.kv_head < args_.caches.kv_heads; ++tile.kv_head) {
            const Partial state(scratch<float>(PARTIALS, Partial::size(rows, V)), rows);
            copy(*part(sequence, tile.kv_head, plan_.first_split(sequence)), state, rows, V);
            for (long split = plan_.second_part(sequence); plan_.has_split(sequence, split); ++split)
                fold(state, *part(sequence, tile.kv_head, split), rows, V);
            op.finish(tile, state);
        }
    }

    const AttentionArgs<T>& args_;
    const AttentionPlan<T> plan_;
    long large_ = 0, large_splits_ = 0, small_ = 0, splits_ = 0, memory_ = 0;
    AttentionTask* tasks_;
    Partial* parts_;
};

template <class T>
void attention(const AttentionArgs<T>& args) { PlannedAttention<T>(args).run(); }
