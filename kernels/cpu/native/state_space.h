// The recurrence of a state space (Mamba 2), token by token. A part of kernels.h.

// For each row and head, the decay of the state, and the time step as the rate.
template <class T>
void fill_steps(const StateSpaceArgs<T>& args, const Gates& gates, long rows) {
    const F zero = set1(0.0f), least = set1(args.least), most = set1(args.most);
    parallel(rows, [&](long row) {
        for (long i = 0; i < args.heads; i += LANES) {
            const long rest = args.heads - i;
            const F x = add(load(args.steps + row * args.heads + i, rest), load(args.bias + i, rest));
            const F step = max(least, min(most, softplus(x)));  // in this order, NaN stays
            const F speed = mul(exp(load(args.decay + i, rest)), step);
            store(gates.values + row * 2 * gates.stride + i, exp(sub(zero, speed)));
            store(gates.values + (row * 2 + 1) * gates.stride + i, step);
        }
    });
}

// Some tokens of one head, with the vectors C and B of its group in float32: [tokens][2][stride].
template <class T>
HeadTokens head_vectors(const StateSpaceArgs<T>& args, long head, long row, long count) {
    const long N = args.state_dim, stride = round_up(N, LANES), group = head / (args.heads / args.groups);
    float* vectors = scratch<float>(UNITS, TOKENS * 2 * stride);
    for (long i = 0; i < count; ++i) {
        const T* b = args.xbc + (row + i) * args.channels() + args.heads * args.head_dim + group * N;
        const T* c = b + args.groups * N;
        for (long k = 0; k < N; k += LANES) {
            store(vectors + i * 2 * stride + k, load(c + k, N - k));
            store(vectors + (i * 2 + 1) * stride + k, load(b + k, N - k));
        }
    }
    return {vectors, stride, count, row, head};
}

// Updates N vectors of the state's columns by token i. Reads them from `from` and stores them to `to`; rows are
// `from_stride` and `to_stride` values apart. `fetch(k, v)`: called for each vector v of row k.
template <long N, class T, class Fetch>
void scan_token(
    const StateSpaceArgs<T>& args, const Gates& gates, const HeadTokens& tokens, long i, long column,
    const float* from, long from_stride, float* to, long to_stride, const Fetch& fetch
) {
    const long row = tokens.first_row + i, at = tokens.head * args.head_dim + column;
    const float *c = tokens.query(i), *b = tokens.key(i);
    const F decay = set1(gates.decay(row, tokens.head)), step = set1(gates.rate(row, tokens.head));
    const F skip = set1(widened(args.skip[tokens.head]));
    const T* values = args.xbc + row * args.channels() + at;
    long rest[N];
    F change[N], out[N];
    for (long v = 0; v < N; ++v) {
        rest[v] = larger(0, args.head_dim - column - v * LANES);
        change[v] = mul(step, load(values + v * LANES, rest[v]));
        out[v] = set1(0.0f);
    }
    for (long k = 0; k < args.state_dim; ++k) {
        const F bk = set1(b[k]), ck = set1(c[k]);
        for (long v = 0; v < N; ++v) {
            fetch(k, v);
            const F s = fma(bk, change[v], mul(decay, load(from + k * from_stride + v * LANES)));
            out[v] = fma(ck, s, out[v]);
            store(to + k * to_stride + v * LANES, s);
        }
    }
    T* result = args.out + row * args.heads * args.head_dim + at;
    for (long v = 0; v < N; ++v)
        store(result + v * LANES, fma(skip, load(values + v * LANES, rest[v]), out[v]), rest[v]);
}

// Several tokens, or columns that do not fill a vector. The columns stay in scratch memory.
template <class T>
void scan_columns(
    const StateSpaceArgs<T>& args, const Gates& gates, const HeadTokens& tokens, long column, const float* before,
    float* after
) {
    constexpr long WIDTH = COLUMNS * LANES;
    const long K = args.state_dim, V = args.head_dim;
    float* state = scratch<float>(STATE, K * WIDTH);
    const auto rest = [&](long c) { return larger(0, V - column - c * LANES); };
    for (long k = 0; k < K; ++k)
        for (long c = 0; c < COLUMNS; ++c) {
            const float* from = before + k * V + column + c * LANES;
            store(state + k * WIDTH + c * LANES, before == nullptr ? set1(0.0f) : load(from, rest(c)));
        }
    const auto fetch = [](long, long) {};
    for (long i = 0; i < tokens.count; ++i)
        scan_token<COLUMNS>(args, gates, tokens, i, column, state, WIDTH, state, WIDTH, fetch);
    for (long k = 0; k < K; ++k)
        for (long c = 0; c < COLUMNS; ++c)
            store(after + k * V + column + c * LANES, load(state + k * WIDTH + c * LANES), rest(c));
}

// One token, for all columns from `column` on that fill whole vectors. Takes N vectors at a time as long as N fit, then
// half as many. Returns the first column that remains.
template <long N, class T>
long scan_parts(
    const StateSpaceArgs<T>& args, const Gates& gates, const HeadTokens& token, long column, const float* before,
    float* after, const NextState& ahead
) {
    static constexpr float zeros[N * LANES] = {};
    const long V = args.head_dim, stride = before == nullptr ? 0 : V;
    for (; column + N * LANES <= V; column += N * LANES) {
        const float* from = before == nullptr ? zeros : before + column;
        const auto fetch = [&](long k, long v) { ahead.fetch(k * V + column + v * LANES); };
        scan_token<N>(args, gates, token, 0, column, from, stride, after + column, V, fetch);
    }
    if constexpr (N > 1) return scan_parts<N / 2>(args, gates, token, column, before, after, ahead);
    return column;
}

// Rows [row, end) of one head, from the state `before` (null for zeros) to the state `after`.
template <class T>
void scan_rows(
    const StateSpaceArgs<T>& args, const Gates& gates, long head, long row, long end, const float* before, float* after,
    const NextState& ahead
) {
    for (; row < end; row += TOKENS, before = after) {
        const HeadTokens tokens = head_vectors(args, head, row, smaller(TOKENS, end - row));
        long column = tokens.count > 1 ? 0 : scan_parts<ROW_PART>(args, gates, tokens, 0, before, after, ahead);
        for (; column < args.head_dim; column += COLUMNS * LANES)
            scan_columns(args, gates, tokens, column, before, after);
    }
}

template <class T>
void state_space(const StateSpaceArgs<T>& args) {
    const long rows = args.batch.starts[args.batch.sequences], stride = round_up(args.heads, LANES);
    const Gates gates = {scratch<float>(GATES, rows * 2 * stride), stride};
    fill_steps(args, gates, rows);
    const HeadStates states = {args.states, args.heads, args.state_dim * args.head_dim, args.batch};
    recur_heads(states, [&](long head, long row, long end, const float* before, float* after, const NextState& ahead) {
        scan_rows(args, gates, head, row, end, before, after, ahead);
    });
}
