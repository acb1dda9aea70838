// The convolution before a recurrence, and the recurrence of a gated delta net, for each sequence token by token. A part
// of kernels.h.

// The number of channels of a task. A task keeps the weights and a tail of its channels in scratch memory.
constexpr long CHANNELS = 256;

// A sequence's rows and the tail before these rows. `at(row)`: a row, counted from the sequence's first row; negative
// for the tail.
template <class T>
struct History {
    const T *rows, *tail;
    long stride, tail_stride, kept;

    const T* at(long row) const { return row >= 0 ? rows + row * stride : tail + (kept + row) * tail_stride; }
};

// One sequence, for the n channels of a task. `taps`: [kernel + 1][CHANNELS], the last of which are the biases.
template <class T>
void convolve_sequence(const ConvolveArgs<T>& args, long sequence, long first, long n, const float* taps) {
    const long C = args.channels, kept = args.kernel - 1, start = args.batch.starts[sequence];
    const long count = args.batch.starts[sequence + 1] - start, read = args.batch.reads[sequence];
    const size_t bytes = static_cast<size_t>(n) * sizeof(T);
    T* before = scratch<T>(ROW, kept * CHANNELS);  // a copy, since the new tail may overwrite the old tail
    for (long i = 0; i < kept; ++i)
        if (read < 0)
            memset(before + i * CHANNELS, 0, bytes);
        else
            memcpy(before + i * CHANNELS, args.tails + (read * kept + i) * C + first, bytes);
    const History<T> x = {args.x + start * C + first, before, C, CHANNELS, kept};
    for (long row = 0; row < count; ++row)
        for (long i = 0; i < n; i += LANES) {
            F out = load(taps + (kept + 1) * CHANNELS + i);
            for (long j = 0; j <= kept; ++j)
                out = fma(load(taps + j * CHANNELS + i), load(x.at(row - kept + j) + i, n - i), out);
            store(args.out + (start + row) * C + first + i, activate<T>(Activation::SILU, out, set1(1.0f)), n - i);
        }
    T* after = args.tails + args.batch.writes[sequence] * kept * C + first;
    const long end = args.batch.kept_end(sequence) - start;
    for (long i = 0; i < kept; ++i) memcpy(after + i * C, x.at(end - kept + i), bytes);
}

template <class T>
void convolve(const ConvolveArgs<T>& args) {
    const long C = args.channels, kernel = args.kernel;
    parallel(round_up(C, CHANNELS) / CHANNELS, [&](long task) {
        const long first = task * CHANNELS, n = smaller(CHANNELS, C - first);
        float* taps = scratch<float>(TAPS, (kernel + 1) * CHANNELS);
        for (long i = 0; i < n; ++i) {
            for (long j = 0; j < kernel; ++j) taps[j * CHANNELS + i] = widened(args.weight[(first + i) * kernel + j]);
            taps[kernel * CHANNELS + i] = args.bias == nullptr ? 0.0f : widened(args.bias[first + i]);
        }
        for (long i = 0; i < args.batch.sequences; ++i) convolve_sequence(args, i, first, n, taps);
    });
}

// ln(1 + e^x) = max(x, 0) + ln(1 + w), w = e^-|x|, and ln(1 + w) = -ln(1 - w / (1 + w)).
inline F softplus(F x) {
    const F zero = set1(0.0f), w = exp(min(x, sub(zero, x)));
    return add(max(x, zero), exponential(div(w, add(set1(1.0f), w))));
}

// For each row, the decay and the update rate of each head's state: [rows][2][stride].
struct Gates {
    float* values;
    long stride;

    float decay(long row, long head) const { return values[row * 2 * stride + head]; }
    float rate(long row, long head) const { return values[(row * 2 + 1) * stride + head]; }
};

template <class T>
void fill_gates(const DeltaRuleArgs<T>& args, const Gates& gates, long rows) {
    const F zero = set1(0.0f), one = set1(1.0f);
    parallel(rows, [&](long row) {
        for (long i = 0; i < args.value_heads; i += LANES) {
            const long rest = args.value_heads - i, at = row * args.value_heads + i;
            const F x = add(load(args.a + at, rest), load(args.bias + i, rest));
            const F speed = mul(exp(load(args.decay + i, rest)), softplus(x));
            store(gates.values + row * 2 * gates.stride + i, exp(sub(zero, speed)));
            const F rate = div(one, add(one, exp(sub(zero, load(args.b + at, rest)))));
            store(gates.values + (row * 2 + 1) * gates.stride + i, rate);
        }
    });
}

// n values of x, divided by the root of the sum of their squares, times `scale`; float32, padded with zeros to whole F.
template <class T>
void unit(const T* x, long n, double scale, float* out) {
    F squares = set1(0.0f);
    for (long i = 0; i < n; i += LANES) {
        const F value = load(x + i, n - i);
        squares = fma(value, value, squares);
    }
    const F factor = set1(static_cast<float>(scale / sqrt(static_cast<double>(sum(squares)) + L2_EPS)));
    for (long i = 0; i < n; i += LANES) store(out + i, mul(load(x + i, n - i), factor));
}

// Columns of a state are independent. A task prepares `TOKENS` tokens together. The task's columns stay in the
// first-level cache while it processes these tokens. For a single token, a task reads and writes whole rows, in parts
// of `ROW_PART`.
constexpr long COLUMNS = ACCUMULATORS >= 24 ? 4 : 2, TOKENS = 64, ROW_PART = ACCUMULATORS >= 24 ? 8 : 4;

// Some tokens of one head, with queries and keys from `unit`: [tokens][2][stride].
struct HeadTokens {
    const float* units;
    long stride, count, first_row, head;

    const float* query(long i) const { return units + i * 2 * stride; }
    const float* key(long i) const { return units + (i * 2 + 1) * stride; }
};

// Updates the state's columns [column, column + n) from `before` (null for zeros) to `after`, and writes the queries'
// results to `out`.
template <class T>
void recur_columns(
    const DeltaRuleArgs<T>& args, const Gates& gates, const HeadTokens& tokens, long column, const float* before,
    float* after
) {
    const long K = args.key_dim, V = args.value_dim;
    long rest[COLUMNS];
    for (long c = 0; c < COLUMNS; ++c) rest[c] = larger(0, V - column - c * LANES);
    float* state = scratch<float>(STATE, K * COLUMNS * LANES);
    F read[COLUMNS];
    for (long c = 0; c < COLUMNS; ++c) read[c] = set1(0.0f);
    const F decay = set1(gates.decay(tokens.first_row, tokens.head));
    for (long k = 0; k < K; ++k)
        for (long c = 0; c < COLUMNS; ++c) {
            const float* from = before + k * V + column + c * LANES;
            const F s = mul(decay, before == nullptr ? set1(0.0f) : load(from, rest[c]));
            store(state + (k * COLUMNS + c) * LANES, s);
            read[c] = fma(set1(tokens.key(0)[k]), s, read[c]);
        }
    for (long i = 0; i < tokens.count; ++i) {
        // The next token's decay and key are applied while the state is still in registers.
        const bool is_last = i + 1 == tokens.count;
        const float *query = tokens.query(i), *key = tokens.key(i), *next = tokens.key(is_last ? i : i + 1);
        const long row = tokens.first_row + i;
        const F next_decay = set1(is_last ? 1.0f : gates.decay(row + 1, tokens.head));
        const F rate = set1(gates.rate(row, tokens.head));
        const T* values = args.qkv + row * args.channels() + 2 * args.key_heads * K + tokens.head * V + column;
        F change[COLUMNS], out[COLUMNS];
        for (long c = 0; c < COLUMNS; ++c) {
            change[c] = mul(rate, sub(load(values + c * LANES, rest[c]), read[c]));
            out[c] = read[c] = set1(0.0f);
        }
        for (long k = 0; k < K; ++k) {
            const F kk = set1(key[k]), qk = set1(query[k]), nk = set1(next[k]);
            for (long c = 0; c < COLUMNS; ++c) {
                float* at = state + (k * COLUMNS + c) * LANES;
                const F s = fma(kk, change[c], load(at));
                out[c] = fma(qk, s, out[c]);
                const F decayed = mul(next_decay, s);
                store(at, decayed);
                read[c] = fma(nk, decayed, read[c]);
            }
        }
        T* to = args.out + (row * args.value_heads + tokens.head) * V + column;
        for (long c = 0; c < COLUMNS; ++c) store(to + c * LANES, out[c], rest[c]);
    }
    for (long k = 0; k < K; ++k)
        for (long c = 0; c < COLUMNS; ++c)
            store(after + k * V + column + c * LANES, load(state + (k * COLUMNS + c) * LANES), rest[c]);
}

// Prefetches, for each line of this state, a line of the state that will be read next. `state`: null if the next state
// is unknown.
struct NextState {
    const float* state;

    void fetch(long at) const {
        if (state != nullptr) __builtin_prefetch(state + at);
    }
};

// Like `recur_columns`, for one token and N whole vectors of columns.
template <long N, class T>
void recur_token(
    const DeltaRuleArgs<T>& args, const Gates& gates, const HeadTokens& token, long column, const float* before,
    float* after, const NextState& ahead
) {
    static constexpr float zeros[N * LANES] = {};
    const long K = args.key_dim, V = args.value_dim, row = token.first_row, head = token.head;
    const float *from = before == nullptr ? zeros : before + column, *query = token.query(0), *key = token.key(0);
    const long stride = before == nullptr ? 0 : V;
    const F decay = set1(gates.decay(row, head)), rate = set1(gates.rate(row, head));
    F read[N], change[N], out[N];
    for (long c = 0; c < N; ++c) read[c] = out[c] = set1(0.0f);
    for (long k = 0; k < K; ++k)
        for (long c = 0; c < N; ++c) {
            if (k % 2 == 0) ahead.fetch(k / 2 * V + column + c * LANES);
            read[c] = fma(set1(key[k]), mul(decay, load(from + k * stride + c * LANES)), read[c]);
        }
    const T* values = args.qkv + row * args.channels() + 2 * args.key_heads * K + head * V + column;
    for (long c = 0; c < N; ++c) change[c] = mul(rate, sub(load(values + c * LANES), read[c]));
    for (long k = 0; k < K; ++k)
        for (long c = 0; c < N; ++c) {
            if (k % 2 == 0) ahead.fetch((K + k) / 2 * V + column + c * LANES);
            const F s = fma(set1(key[k]), change[c], mul(decay, load(from + k * stride + c * LANES)));
            out[c] = fma(set1(query[k]), s, out[c]);
            store(after + k * V + column + c * LANES, s);
        }
    T* to = args.out + (row * args.value_heads + head) * V + column;
    for (long c = 0; c < N; ++c) store(to + c * LANES, out[c]);
}

template <class T>
HeadTokens head_tokens(const DeltaRuleArgs<T>& args, long head, long row, long count) {
    const long K = args.key_dim, stride = round_up(K, LANES);
    const long key_head = head / (args.value_heads / args.key_heads);
    float* units = scratch<float>(UNITS, TOKENS * 2 * stride);
    for (long i = 0; i < count; ++i) {
        const T* query = args.qkv + (row + i) * args.channels() + key_head * K;
        unit(query, K, 1.0 / sqrt(static_cast<double>(K)), units + i * 2 * stride);
        unit(query + args.key_heads * K, K, 1.0, units + (i * 2 + 1) * stride);
    }
    return {units, stride, count, row, head};
}

// Rows [row, end) of one head, from the state `before` (null for zeros) to the state `after`.
template <class T>
void recur_rows(
    const DeltaRuleArgs<T>& args, const Gates& gates, long head, long row, long end, const float* before, float* after,
    const NextState& ahead
) {
    for (; row < end; row += TOKENS, before = after) {
        const HeadTokens tokens = head_tokens(args, head, row, smaller(TOKENS, end - row));
        long column = 0;
        if (tokens.count == 1)
            for (; column + ROW_PART * LANES <= args.value_dim; column += ROW_PART * LANES)
                recur_token<ROW_PART>(args, gates, tokens, column, before, after, ahead);
        for (; column < args.value_dim; column += COLUMNS * LANES)
            recur_columns(args, gates, tokens, column, before, after);
    }
}

// The states of all heads, [slots, heads, size], and where a batch reads and writes them.
struct HeadStates {
    float* values;
    long heads, size;
    const StateBatch& batch;

    float* at(long slot, long head) const { return values + (slot * heads + head) * size; }

    // The initial state of a task; null if the task does not exist or starts from zeros.
    NextState before(long task) const {
        const long sequence = task / heads;
        if (sequence >= batch.sequences || batch.reads[sequence] < 0) return {nullptr};
        return {at(batch.reads[sequence], task % heads)};
    }
};

// Runs a recurrence over each head of each sequence. `recur(head, row, end, before, after, ahead)` computes rows [row,
// end) of a head, from the state `before` (null for zeros) to the state `after`. Drafted rows continue from the stored
// state, but keep their own state in scratch memory.
template <class Recur>
void recur_heads(const HeadStates& states, const Recur& recur) {
    const StateBatch& batch = states.batch;
    const size_t bytes = static_cast<size_t>(states.size) * sizeof(float);
    parallel(batch.sequences * states.heads, [&](long task) {
        const long sequence = task / states.heads, head = task % states.heads;
        const long row = batch.starts[sequence], end = batch.starts[sequence + 1];
        const long kept_end = batch.kept_end(sequence), read = batch.reads[sequence];
        const NextState ahead = states.before(task + num_threads());
        const float* before = read < 0 ? nullptr : states.at(read, head);
        float* after = states.at(batch.writes[sequence], head);
        if (row == kept_end && before == nullptr) memset(after, 0, bytes);
        if (row == kept_end && before != nullptr) memmove(after, before, bytes);
        recur(head, row, kept_end, before, after, ahead);
        if (kept_end < end) recur(head, kept_end, end, after, scratch<float>(DRAFTED, states.size), ahead);
    });
}

template <class T>
void delta_rule(const DeltaRuleArgs<T>& args) {
    const long rows = args.batch.starts[args.batch.sequences], stride = round_up(args.value_heads, LANES);
    const Gates gates = {scratch<float>(GATES, rows * 2 * stride), stride};
    fill_gates(args, gates, rows);
    const HeadStates states = {args.states, args.value_heads, args.key_dim * args.value_dim, args.batch};
    recur_heads(states, [&](long head, long row, long end, const float* before, float* after, const NextState& ahead) {
        recur_rows(args, gates, head, row, end, before, after, ahead);
    });
}
