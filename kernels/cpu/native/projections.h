// The steps of a layer that process each token separately: norms, projections, rotation, and the write into the cache.
// A part of kernels.h.

// Norms n values of x. x and out may be the same.
template <class T>
void normalize(const T* x, long n, const Norm<T>& norm, T* out) {
    // Several partial sums are more accurate, since each has fewer roundings.
    constexpr int SUMS = 4;
    F sums[SUMS] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
    long start = 0;
    const auto add_square = [&](int i, F value) { sums[i] = fma(value, value, sums[i]); };
    for (; start + SUMS * LANES <= n; start += SUMS * LANES)
        for (int i = 0; i < SUMS; ++i) add_square(i, load(x + start + i * LANES));
    for (; start < n; start += LANES) add_square(0, load(x + start, n - start));
    const double squares = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    const F scale = set1(static_cast<float>(1.0 / sqrt(squares / static_cast<double>(n) + norm.eps)));
    for (long i = 0; i < n; i += LANES) {
        const F normed = mul(load(x + i, n - i), scale), weight = load(norm.weight + i, n - i);
        const F y = norm.zero_centered ? mul(normed, add(set1(1.0f), weight)) : mul(rounded<T>(normed), weight);
        store(out + i, y, n - i);
    }
}

constexpr long NORM_ROWS = 16;

template <class T>
void rmsnorm(const Input<T>& x, T* out, long stride) {
    parallel(round_up(x.count, NORM_ROWS) / NORM_ROWS, [&](long task) {
        for (long row = task * NORM_ROWS; row < smaller(x.count, (task + 1) * NORM_ROWS); ++row)
            normalize(x.data + row * x.columns, x.columns, x.norm, out + row * stride);
    });
}

// The rows of a product's left side, normed and padded with zeros to whole steps. `kinds`, `peaks`: as in `quantize`.
template <class T>
struct Left : Rows<T> {
    using Rows<T>::data, Rows<T>::stride;

    explicit Left(const Input<T>& x, unsigned kinds = 0, const float* peaks = nullptr)
        : Rows<T>{x.data, round_up(x.columns, COLUMN_MULTIPLE<T>)} {
        pad(x);
        quantize(*this, kinds, x.count, x.columns, CODED_INPUT, peaks);
    }

  private:
    void pad(const Input<T>& x) {
        const bool is_normed = x.norm.weight != nullptr;
        if (!is_normed && stride == x.columns) return;
        T* rows = scratch<T>(INPUT, x.count * stride);
        if (is_normed) rmsnorm(x, rows, stride);
        for (long i = 0; i < x.count; ++i) {
            T* row = rows + i * stride;
            if (!is_normed) memcpy(row, x.data + i * x.columns, static_cast<size_t>(x.columns) * sizeof(T));
            memset(row + x.columns, 0, static_cast<size_t>(stride - x.columns) * sizeof(T));
        }
        data = rows;
    }
};

constexpr long ROWS = 96;

// Cuts the product of rows [count, K] and `groups` groups of columns into tasks, and calls body(first row, number of
// rows, group) for each.
template <class Body>
void for_tiles(long count, long groups, const Body& body) {
    const long chunks = round_up(count, ROWS) / ROWS;
    parallel(chunks * groups, [&](long task) {
        const long chunk = task / groups;
        const long start = count * chunk / chunks, end = count * (chunk + 1) / chunks;
        body(start, end - start, task % groups);
    });
}

// With few rows, threads wait for memory, so fewer and longer tasks are better. With many rows, tasks should divide
// evenly among the threads.
inline long panels_in_group(long count) { return count > ACCUMULATORS / 4 ? 2 : 4; }

// The distance from a panel to the panel that the same thread will most likely read next, for tasks of `width` panels.
inline long hop(long width) { return num_threads() * width; }

// Returns the products c [rows, 16 * n] of some rows with n panels of a weight. The pieces of the weight are summed one
// by one, and the sums are added as a balanced binary tree. `sums` holds the sums of the tree's subtrees that are not
// added yet, as in a binary counter.
template <class T>
const float* multiply_pieces(
    const Matrix<T>& weight, const Pieces& pieces, const Rows<T>& a, long rows, const Panel<T>* panels, long n, long hop
) {
    const long steps = weight.steps(), size = rows * n * LANES;
    long subtrees = 1;
    for (long count = pieces.count; count > 1; count /= 2) ++subtrees;
    float *const sums = scratch<float>(PRODUCT, subtrees * size), *next = sums;
    for (long piece = 0; piece < pieces.count; ++piece, next += size) {
        const long first = pieces.first_step(piece, weight.columns, steps, PAIR<T>);
        const long end = pieces.first_step(piece + 1, weight.columns, steps, PAIR<T>);
        if (first == end)
            memset(next, 0, static_cast<size_t>(size) * sizeof(float));
        else
            multiply_all(a, rows, panels, n, first, end, hop, next, n * LANES);
        for (long done = piece + 1; done % 2 == 0; done /= 2) {
            next -= size;
            for (long i = 0; i < size; i += LANES) store(next + i, add(load(next + i), load(next + size + i)));
        }
    }
    return sums;
}

// The residual plus the rounded x, multiplied by a scale.
template <class T>
inline F add_residual(F x, F residual, float scale) {
    x = rounded<T>(x);
    return add(scale == 1.0f ? x : rounded<T>(mul(x, set1(scale))), residual);
}

// Some rows of a product, and `width` panels of its columns (fewer at the end).
template <class T>
void linear_tile(const LinearArgs<T>& args, const Left<T>& left, long start, long rows, long first, long width) {
    const long N = args.weight.rows, n = smaller(width, args.weight.panels() - first), ldc = n * LANES;
    Panel<T> b[MAX_PANELS];
    for (long i = 0; i < n; ++i) b[i] = args.weight.panel(first + i);
    const float* c = multiply_pieces(args.weight, args.pieces, left.from(start), rows, b, n, hop(width));
    for (long row = 0; row < rows; ++row)
        for (long i = 0; i < ldc; i += LANES) {
            const long column = first * LANES + i, rest = N - column;
            F x = load(c + row * ldc + i);
            if (args.sums != nullptr) {
                store(args.sums + (start + row) * N + column, x, rest);
                continue;
            }
            if (args.bias != nullptr) x = add(x, load(args.bias + column, rest));
            const long at = (start + row) * N + column;
            if (args.residual != nullptr) x = add_residual<T>(x, load(args.residual + at, rest), args.residual_scale);
            store(args.out + at, x, rest);
        }
}

// Several products of the same rows.
template <class T>
void linears(const LinearArgs<T>* products, long count) {
    unsigned kinds = 0;
    for (long i = 0; i < count; ++i) kinds |= activations_of(products[i].weight.format);
    const Left<T> left(products->x, kinds, products->peaks);
    const long width = panels_in_group(products->x.count);
    const auto groups_of = [&](const LinearArgs<T>& args) { return round_up(args.weight.panels(), width) / width; };
    long groups = 0;
    for (long i = 0; i < count; ++i) groups += groups_of(products[i]);
    for_tiles(products->x.count, groups, [&](long start, long rows, long group) {
        const LinearArgs<T>* args = products;
        for (; group >= groups_of(*args); ++args) group -= groups_of(*args);
        linear_tile(*args, left, start, rows, group * width, width);
    });
}

template <class T>
void linear(const LinearArgs<T>& args) { linears(&args, 1); }

template <class T>
void head_linear(const HeadLinearArgs<T>& args) {
    const Matrix<T>& weight = args.weight;
    const Left<T> left(Input<T>{args.x, args.count * args.heads, weight.columns, {}});
    const long N = weight.rows / args.heads, panels = N / LANES, width = panels_in_group(args.count);
    const long groups = round_up(panels, width) / width, lda = args.heads * left.stride;
    for_tiles(args.count, args.heads * groups, [&](long start, long rows, long group) {
        const long head = group / groups, first = group % groups * width, n = smaller(width, panels - first);
        Panel<T> b[MAX_PANELS];
        for (long i = 0; i < n; ++i) b[i] = weight.panel(head * panels + first + i);
        float* c = scratch<float>(PRODUCT, rows * n * LANES);
        const Rows<T> a = {left.data + start * lda + head * left.stride, lda};
        multiply_all(a, rows, b, n, 0, weight.steps(), hop(width), c, n * LANES);
        for (long row = 0; row < rows; ++row) {
            T* out = args.out + ((start + row) * args.heads + head) * N + first * LANES;
            for (long i = 0; i < n * LANES; i += LANES) store(out + i, load(c + row * n * LANES + i));
        }
    });
}

// Norms rows [count, N] in place, multiplies them by `scale`, then adds the residual.
template <class T>
void norm_and_add(const Norm<T>& norm, const T* residual, float scale, long count, long N, T* rows) {
    parallel(round_up(count, NORM_ROWS) / NORM_ROWS, [&](long task) {
        for (long row = task * NORM_ROWS; row < smaller(count, (task + 1) * NORM_ROWS); ++row) {
            T* out = rows + row * N;
            normalize(out, N, norm, out);
            for (long i = 0; i < N; i += LANES)
                store(out + i, add_residual<T>(load(out + i, N - i), load(residual + row * N + i, N - i), scale), N - i);
        }
    });
}

// As `linear`. If `ranks` is not null, each rank multiplies its own columns, and the ranks exchange their sums.
template <class T>
void linear_of_ranks(const LinearArgs<T>& args, RankExchange* ranks) {
    if (ranks == nullptr) return linear(args);
    const long N = args.weight.rows;
    const float* peaks = activations_of(args.weight.format) != 0 ? exchange_peaks(*ranks, args.x) : nullptr;
    const auto add_own = [&](long start, long rows, float* out) {
        LinearArgs<T> own = args;
        own.peaks = peaks == nullptr ? nullptr : peaks + start;
        own.x.data += start * args.x.columns, own.x.count = rows, own.sums = out;
        linear(own);
    };
    exchange_sums(*ranks, args.x.count, N, add_own, [&](long row, long column, F x) {
        const long at = row * N + column, rest = N - column;
        if (args.bias != nullptr) x = add(x, load(args.bias + column, rest));
        if (args.residual != nullptr) x = add_residual<T>(x, load(args.residual + at, rest), args.residual_scale);
        store(args.out + at, x, rest);
    });
}

// The product with `o` or `down`. A norm that follows the product is applied before the residual is added.
template <class T>
void project_back(const LinearArgs<T>& args, const Norm<T>& norm, RankExchange* ranks) {
    if (norm.weight == nullptr) return linear_of_ranks(args, ranks);
    LinearArgs<T> product = args;
    product.residual = nullptr;
    linear_of_ranks(product, ranks);
    norm_and_add(norm, args.residual, args.residual_scale, args.x.count, args.weight.rows, args.out);
}

// As in kernels/reference.py.
constexpr float GELU_SLOPE = 1.5957691216057308f, GELU_CUBIC = 0.071354816272600251f;

// As in kernels/contract.py.
constexpr float CLAMP = 7.0f, CLAMPED_SLOPE = 1.702f;

// activation(gate) * up, for a result that is rounded to T.
template <class T>
inline F activate(Activation activation, F gate, F up) {
    if (activation == Activation::RELU) return mul(max(set1(0.0f), gate), up);  // in this order, NaN stays
    F slope = gate;
    if (activation == Activation::GELU_TANH)
        slope = mul(gate, fma(set1(GELU_CUBIC), mul(gate, gate), set1(GELU_SLOPE)));
    if (activation == Activation::CLAMPED_SILU) {
        // With the arguments in this order, clamping keeps NaN.
        gate = min(set1(CLAMP), gate), slope = mul(gate, set1(CLAMPED_SLOPE));
        up = add(max(set1(-CLAMP), min(set1(CLAMP), up)), set1(1.0f));
    }
    const F numerator = activation == Activation::SIGMOID ? set1(1.0f) : gate;
    return mul(div(numerator, add(set1(1.0f), scaled_exp<T>(slope, -1.0f))), up);
}

template <class T>
void gate_mul(const T* gate, const T* up, Activation activation, long count, T* out) {
    constexpr long VALUES = 4096;
    parallel(round_up(count, VALUES) / VALUES, [&](long task) {
        const long end = smaller(count, (task + 1) * VALUES);
        for (long i = task * VALUES; i < end; i += LANES)
            store(out + i, activate<T>(activation, load(gate + i, end - i), load(up + i, end - i)), end - i);
    });
}

template <class T>
void gate_up(const GateUpArgs<T>& args) {
    const Left<T> left(args.x, activations_of(args.gate.format) | activations_of(args.up.format));
    // If N is a multiple of 32, then 32 columns of each matrix fill whole cache lines of the output. Two threads
    // therefore never write to the same line.
    const long N = args.gate.rows, panels = args.gate.panels(), width = 2;
    for_tiles(args.x.count, round_up(panels, width) / width, [&](long start, long rows, long group) {
        const long first = group * width, n = smaller(width, panels - first), ldc = 2 * n * LANES;
        Panel<T> b[MAX_PANELS];
        for (long i = 0; i < n; ++i) b[i] = args.gate.panel(first + i), b[n + i] = args.up.panel(first + i);
        float* c = scratch<float>(PRODUCT, rows * ldc);
        multiply_all(left.from(start), rows, b, 2 * n, 0, args.gate.steps(), hop(width), c, ldc);
        for (long row = 0; row < rows; ++row)
            for (long i = 0; i < n * LANES; i += LANES) {
                const float* both = c + row * ldc + i;
                F gate = load(both), up = load(both + n * LANES);
                const long column = first * LANES + i;
                if (args.biases[0] != nullptr) gate = add(gate, load(args.biases[0] + column, N - column));
                if (args.biases[1] != nullptr) up = add(up, load(args.biases[1] + column, N - column));
                gate = rounded<T>(gate), up = rounded<T>(up);
                store(args.out + (start + row) * N + column, activate<T>(args.activation, gate, up), N - column);
            }
    });
}

// Rotates the pairs (low, high) of up to LANES values. The results may replace the values.
template <class T>
inline void rotate_pairs(const T* low, const T* high, const float* cosines, const float* sines, long n, T* x, T* y) {
    const F a = load(low, n), b = load(high, n), cosine = load(cosines, n), sine = load(sines, n);
    store(x, sub(mul(a, cosine), mul(b, sine)), n);
    store(y, add(mul(b, cosine), mul(a, sine)), n);
}

// Rotates the pairs (i, i + half) of a head. x and out may be the same.
template <class T>
inline void rotate(const T* x, long half, const float* cosines, const float* sines, T* out) {
    for (long i = 0; i < half; i += LANES)
        rotate_pairs(x + i, x + half + i, cosines + i, sines + i, half - i, out + i, out + half + i);
}

// As `rotate`, for the pairs (2 i, 2 i + 1).
template <class T>
inline void rotate_neighbours(const T* x, long pairs, const float* cosines, const float* sines, T* out) {
    for (long i = 0; i < pairs; i += LANES) {
        const long n = smaller(LANES, pairs - i);
        T low[LANES] = {}, high[LANES] = {};
        for (long lane = 0; lane < n; ++lane) low[lane] = x[2 * (i + lane)], high[lane] = x[2 * (i + lane) + 1];
        rotate_pairs(low, high, cosines + i, sines + i, n, low, high);
        for (long lane = 0; lane < n; ++lane) out[2 * (i + lane)] = low[lane], out[2 * (i + lane) + 1] = high[lane];
    }
}

template <class T>
void write_key(const Caches<T>& caches, long slot, long head, const T* key) {
    if (caches.has_codes()) return write_coded_key(caches, slot, head, key);
    T* block = caches.key_block(slot / caches.block_size, head) + slot % caches.block_size * PAIR<T>;
    for (long i = 0; i < caches.head_dim; i += PAIR<T>)
        memcpy(block + i * caches.block_size, key + i, sizeof(T) * PAIR<T>);
}

template <class T>
void write_value(const Caches<T>& caches, long slot, long head, const T* value) {
    if (caches.has_codes()) return write_coded_value(caches, slot, head, value);
    const long offset = slot % caches.block_size;
    T* block = caches.value_block(slot / caches.block_size, head);
    block += offset / PAIR<T> * PAIR<T> * caches.value_dim + offset % PAIR<T>;
    for (long i = 0; i < caches.value_dim; ++i) block[i * PAIR<T>] = value[i];
}

template <class T>
void write_kv(const Caches<T>& caches, const T* keys, const T* values, const int64_t* slots, long count) {
    for (long i = 0; i < count * caches.kv_heads; ++i) {
        const long slot = slots[i / caches.kv_heads], head = i % caches.kv_heads;
        write_key(caches, slot, head, keys + i * caches.head_dim);
        write_value(caches, slot, head, values + i * caches.value_dim);
    }
}

// Rotates one head of q (part 0) or k (part 1) of one row from `values` to `out`, which may be the same memory. Writes
// k into the cache.
template <class T>
void place_head(const QkvArgs<T>& args, long part, long head, long row, const T* values, T* out) {
    const long pairs = args.pairs, rest = args.caches.head_dim - 2 * pairs;
    const float *cosines = args.cosines + row * pairs, *sines = args.sines + row * pairs;
    args.interleaved ? rotate_neighbours(values, pairs, cosines, sines, out)
                     : rotate(values, pairs, cosines, sines, out);
    if (rest > 0 && out != values)
        memcpy(out + 2 * pairs, values + 2 * pairs, static_cast<size_t>(rest) * sizeof(T));
    if (part == 0 && args.q_scale != nullptr)
        for (long i = 0; i < args.caches.head_dim; i += LANES) store(out + i, mul(load(out + i), set1(args.q_scale[row])));
    if (part == 1) write_key(args.caches, args.slots[row], head, out);
}

// Finishes one head of q (part 0), k (part 1) or v (part 2) for one row, from the product's float32 `c`. With gates,
// every second head of q is a gate. If one norm covers all heads, heads are stored without the norm at first: heads of
// k in `keys`, heads of q in their final place.
template <class T>
void finish_head(const QkvArgs<T>& args, long part, long head, long row, const float* c, T* keys) {
    const long D = args.caches.head_dim;
    T* values = scratch<T>(ROW, 2 * D);
    const T* bias = args.biases[part];
    for (long i = 0; i < D; i += LANES) {
        const F x = load(c + i);
        store(values + i, bias == nullptr ? x : add(x, load(bias + head * D + i)));
    }
    if (part == 2) return write_value(args.caches, args.slots[row], head, values);
    const bool is_paired = part == 0 && args.gates != nullptr, is_gate = is_paired && head % 2 == 1;
    T* out = values + D;
    if (part == 0) {
        const long place = row * args.heads() + (is_paired ? head / 2 : head);
        out = (is_gate ? args.gates : args.q) + place * args.stride;
    }
    if (part == 1 && args.over_heads) out = keys + row * args.weights[1].rows + head * D;
    if (args.over_heads || is_gate) {
        memcpy(out, values, static_cast<size_t>(D) * sizeof(T));
        return;
    }
    if (args.norms[part].weight != nullptr) normalize(values, D, args.norms[part], values);
    place_head(args, part, head, row, values, out);
}

// Norms the rows of q (part 0) or k (part 1) over all heads at once, and stores the rows in their final place.
template <class T>
void finish_rows(const QkvArgs<T>& args, long part, T* rows) {
    const long D = args.caches.head_dim, width = args.weights[part].rows;
    parallel(args.x.count, [&](long row) {
        T* values = rows + row * width;
        normalize(values, width, args.norms[part], values);
        for (long head = 0; head < width / D; ++head)
            place_head(args, part, head, row, values + head * D, values + head * D);
    });
}

template <class T>
void qkv(const QkvArgs<T>& args) {
    unsigned kinds = 0;
    for (const Matrix<T>& weight : args.weights) kinds |= activations_of(weight.format);
    const Left<T> left(args.x, kinds);
    const long D = args.caches.head_dim, panels = D / LANES;
    const long heads = args.weights[0].rows / D, kv_heads = args.caches.kv_heads;
    T* keys = args.over_heads ? scratch<T>(KEYS, args.x.count * args.weights[1].rows) : nullptr;
    for_tiles(args.x.count, heads + 2 * kv_heads, [&](long start, long rows, long group) {
        const long part = group < heads ? 0 : group < heads + kv_heads ? 1 : 2;
        const long head = part == 0 ? group : (group - heads) % kv_heads;
        Panel<T> b[MAX_PANELS];
        for (long i = 0; i < panels; ++i) b[i] = args.weights[part].panel(head * panels + i);
        float* c = scratch<float>(PRODUCT, rows * D);
        multiply_all(left.from(start), rows, b, panels, 0, args.weights[part].steps(), hop(panels), c, D);
        for (long row = 0; row < rows; ++row) finish_head(args, part, head, start + row, c + row * D, keys);
    });
    if (args.over_heads) finish_rows(args, 0, args.q), finish_rows(args, 1, keys);
}
