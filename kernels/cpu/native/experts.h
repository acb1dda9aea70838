// Mixtures of experts: the choice of each row's experts, and the sum of the experts' outputs. A part of kernels.h.
//
// Rows are sorted by expert, so that each expert's panels are read once for all its rows. For each column, a single
// task adds a row's experts one by one. The order of the additions therefore depends neither on threads nor on other
// rows.

// Writes the ids of the k highest scores in ascending order. Among equal scores, lower ids win. The ids are distinct
// even if some scores are NaN.
inline void choose(const float* scores, long count, long k, int32_t* chosen) {
    const auto move_up = [&](int32_t id, long place, const auto& is_before) {
        for (; place > 0 && is_before(id, chosen[place - 1]); --place) chosen[place] = chosen[place - 1];
        chosen[place] = id;
    };
    const auto is_higher = [&](int32_t a, int32_t b) { return scores[a] > scores[b]; };
    const auto is_lower_id = [](int32_t a, int32_t b) { return a < b; };
    for (int32_t id = 0; id < count; ++id)
        if (id < k)
            move_up(id, id, is_higher);
        else if (is_higher(id, chosen[k - 1]))
            move_up(id, k - 1, is_higher);
    for (long place = 1; place < k; ++place) move_up(chosen[place], place, is_lower_id);
}

// Replaces n values by their softmax. The exponentials are added in order.
inline void softmax(float* x, long n) {
    float peak = -INFINITY, total = 0.0f;
    for (long i = 0; i < n; ++i) peak = x[i] > peak ? x[i] : peak;
    for (long i = 0; i < n; i += LANES) store(x + i, exp(sub(load(x + i, n - i), set1(peak))), n - i);
    for (long i = 0; i < n; ++i) total += x[i];
    for (long i = 0; i < n; ++i) x[i] /= total;
}

inline void sigmoid(float* x, long n) {
    const F one = set1(1.0f);
    for (long i = 0; i < n; i += LANES)
        store(x + i, div(one, add(one, exp(sub(set1(0.0f), load(x + i, n - i))))), n - i);
}

// Sets the ranks of the experts in all but a row's best groups to -inf.
inline void keep_groups(const Router& router, long count, float* ranks) {
    const long size = count / router.groups;
    float* sums = scratch<float>(GROUPS, router.groups);
    int32_t* kept = scratch<int32_t>(KEPT, router.kept_groups);
    for (long group = 0; group < router.groups; ++group) {
        float first = -INFINITY, second = -INFINITY;
        for (const float *x = ranks + group * size, *end = x + size; x != end; ++x)
            if (*x > first)
                second = first, first = *x;
            else if (*x > second)
                second = *x;
        sums[group] = router.group_best == 1 ? first : first + second;
    }
    choose(sums, router.groups, router.kept_groups, kept);
    for (long group = 0, next = 0; group < router.groups; ++group) {
        const bool is_kept = next < router.kept_groups && kept[next] == group;
        for (long i = 0; i < size && !is_kept; ++i) ranks[group * size + i] = -INFINITY;
        next += is_kept;
    }
}

// Chooses a row's experts by their scores [experts], or by their logits, which are overwritten.
template <class T>
void choose_experts(const RouteArgs<T>& args, const float* scores, float* logits, int32_t* chosen) {
    const Router& router = args.router;
    for (long id = 0; router.ranks_scores && id < args.experts; ++id)
        logits[id] = args.correction != nullptr ? scores[id] + args.correction[id] : scores[id];
    if (router.groups > 1) keep_groups(router, args.experts, logits);
    choose(logits, args.experts, args.top_k, chosen);
}

template <class T>
void route_row(const RouteArgs<T>& args, long row) {
    const Router& router = args.router;
    const long E = args.experts, k = args.top_k;
    int32_t* chosen = args.chosen + row * k;
    float *logits = scratch<float>(RANKS, E), *scores = scratch<float>(SCORES, E), *gates = args.gates + row * k;
    bool is_broken = false;
    for (long id = 0; id < E; ++id) {
        scores[id] = logits[id] = widened(args.logits[row * E + id]);
        is_broken |= logits[id] != logits[id];
    }
    if (router.score == Score::SOFTMAX) softmax(scores, E);
    if (router.score == Score::SIGMOID) sigmoid(scores, E);
    if (!args.is_replayed) choose_experts(args, scores, logits, chosen);
    for (long i = 0; i < k; ++i) gates[i] = scores[chosen[i]];
    if (router.score == Score::SOFTMAX_OF_CHOSEN) softmax(gates, k);
    float total = 0.0f;
    for (long i = 0; i < k; ++i) total += gates[i];
    total += router.eps;
    if (total < router.floor) total = router.floor;
    for (long i = 0; i < k; ++i) {
        const float gate = router.is_normed ? gates[i] / total : gates[i];
        gates[i] = is_broken ? NAN : gate * router.scale;
    }
}

template <class T>
void route(const RouteArgs<T>& args) {
    parallel(round_up(args.count, NORM_ROWS) / NORM_ROWS, [&](long task) {
        for (long row = task * NORM_ROWS; row < smaller(args.count, (task + 1) * NORM_ROWS); ++row) route_row(args, row);
    });
}

// Some rows of one expert: rows [first, first + count) of all rows sorted by expert.
struct Piece {
    long expert, first, count;
};

// The (row, expert) pairs of some rows, sorted by expert, then by row. The pairs lie in scratch memory of the thread
// that created the object.
class SortedRows {
  public:
    // The experts have the ids [first, first + experts). Pairs of experts with other ids are left out.
    SortedRows(const int32_t* chosen, long rows, long top_k, long first, long experts)
        : order_(scratch<long>(ORDER, rows * top_k)) {
        long* ends = scratch<long>(ENDS, experts + 1);
        memset(ends, 0, static_cast<size_t>(experts + 1) * sizeof(long));
        const auto is_held = [&](long pair) { return chosen[pair] >= first && chosen[pair] < first + experts; };
        for (long pair = 0; pair < rows * top_k; ++pair)
            if (is_held(pair)) ++ends[chosen[pair] - first + 1];
        for (long expert = 0; expert < experts; ++expert) ends[expert + 1] += ends[expert];
        pairs_ = ends[experts];
        for (long pair = 0; pair < rows * top_k; ++pair)
            if (is_held(pair)) order_[ends[chosen[pair] - first]++] = pair;
        cut(ends, experts);
    }

    long pairs() const { return pairs_; }
    // The pair at a place, as row * top_k + the index of its expert among the row's experts.
    long pair(long place) const { return order_[place]; }
    long num_pieces() const { return num_pieces_; }
    const Piece& piece(long i) const { return pieces_[i]; }

  private:
    void cut(const long* ends, long experts) {
        pieces_ = scratch<Piece>(PIECES, experts + pairs_ / ROWS);
        for (long expert = 0, first = 0; expert < experts; first = ends[expert++]) {
            const long count = ends[expert] - first, pieces = round_up(count, ROWS) / ROWS;
            for (long i = 0; i < pieces; ++i) {
                const long start = count * i / pieces, end = count * (i + 1) / pieces;
                pieces_[num_pieces_++] = {expert, first + start, end - start};
            }
        }
    }

    long pairs_;
    long* const order_;
    Piece* pieces_;
    long num_pieces_ = 0;
};

// The experts of rows [start, start + count).
template <class T>
class RoutedRows {
  public:
    RoutedRows(const ExpertsArgs<T>& args, long start, long count)
        : args_(args), start_(start), count_(count), inner_size_(args.gate_up.rows / args.experts / args.sides()),
          inner_stride_(round_up(inner_size_, COLUMN_MULTIPLE<T>)),
          stride_(round_up(args.gate_up.columns, COLUMN_MULTIPLE<T>)),
          rows_(args.chosen + start * args.top_k, count, args.top_k, args.first, args.experts),
          gathered_(scratch<T>(GATHERED, rows_.pairs() * stride_)),
          inner_(scratch<T>(INNER, rows_.pairs() * inner_stride_)),
          sums_(scratch<float>(SUMS, args.groups * count * args.down.rows / args.experts)) {}

    void run() const {
        gather();
        multiply_gate_up(rows_of(gathered_, stride_, args_.gate_up, CODED_GATHERED));
        multiply_down(rows_of(inner_, inner_stride_, args_.down, CODED_INNER));
    }

  private:
    // Copies the rows into sorted order, padded with zeros to whole steps. Also pads the inner rows.
    void gather() const {
        const long K = args_.gate_up.columns;
        parallel(round_up(rows_.pairs(), NORM_ROWS) / NORM_ROWS, [&](long task) {
            for (long i = task * NORM_ROWS; i < smaller(rows_.pairs(), (task + 1) * NORM_ROWS); ++i) {
                const T* row = args_.x + (start_ + rows_.pair(i) / args_.top_k) * K;
                memcpy(gathered_ + i * stride_, row, static_cast<size_t>(K) * sizeof(T));
                memset(gathered_ + i * stride_ + K, 0, static_cast<size_t>(stride_ - K) * sizeof(T));
                T* inner = inner_ + i * inner_stride_ + inner_size_;
                memset(inner, 0, static_cast<size_t>(inner_stride_ - inner_size_) * sizeof(T));
            }
        });
    }

    // Returns all sorted rows at x, quantized if the weight needs that.
    Rows<T> rows_of(const T* x, long stride, const Matrix<T>& weight, Purpose purpose) const {
        Rows<T> rows = {x, stride};
        quantize(rows, activations_of(weight.format), rows_.pairs(), weight.columns, purpose);
        return rows;
    }

    // Like `gate_up`, piece by piece.
    void multiply_gate_up(const Rows<T>& rows) const {
        constexpr long WIDTH = 2;
        const long panels = inner_size_ / LANES, groups = round_up(panels, WIDTH) / WIDTH;
        const long tasks = rows_.num_pieces() * groups;
        const auto first_panel = [&](long task) {
            return args_.sides() * panels * rows_.piece(task / groups).expert + task % groups * WIDTH;
        };
        parallel(tasks, [&](long task) {
            const Piece& piece = rows_.piece(task / groups);
            const long first = task % groups * WIDTH, n = smaller(WIDTH, panels - first), ldc = args_.sides() * n * LANES;
            Panel<T> b[2 * WIDTH];
            for (long i = 0; i < args_.sides() * n; ++i)
                b[i] = args_.gate_up.panel(first_panel(task) + (i < n ? i : i - n + panels));
            const long hop = first_panel(smaller(task + num_threads(), tasks - 1)) - first_panel(task);
            float* c = scratch<float>(PRODUCT, piece.count * ldc);
            const Rows<T> a = rows.from(piece.first);
            multiply_all(a, piece.count, b, args_.sides() * n, 0, args_.gate_up.steps(), hop, c, ldc);
            for (long row = 0; row < piece.count; ++row)
                for (long i = 0; i < n * LANES; i += LANES)
                    activate_inner(piece, row, first * LANES + i, c + row * ldc + i, (args_.sides() - 1) * n * LANES);
        });
    }

    // Activates 16 inner columns. The product with gate is at `c`, and the product with up is at `c` + `distance`.
    // Without gates, both products are the same.
    void activate_inner(const Piece& piece, long row, long column, const float* c, long distance) const {
        F gate = load(c), up = load(c + distance);
        if (args_.gate_up_bias != nullptr) {
            const T* bias = args_.gate_up_bias + args_.sides() * inner_size_ * piece.expert + column;
            gate = add(gate, load(bias)), up = add(up, load(bias + (args_.sides() - 1) * inner_size_));
        }
        const F active = activate<T>(args_.activation, rounded<T>(gate), rounded<T>(up));
        store(inner_ + (piece.first + row) * inner_stride_ + column, active);
    }

    // Each task takes some columns of all experts, one expert after the other.
    void multiply_down(const Rows<T>& rows) const {
        const long panels = args_.down.rows / args_.experts / LANES, width = down_width(panels);
        const long groups = round_up(panels, width) / width, steps = args_.down.steps();
        parallel(groups, [&](long group) {
            const long first = group * width, n = smaller(width, panels - first);
            const auto first_panel = [&](long piece) { return panels * rows_.piece(piece).expert + first; };
            clear_groups(first * LANES, n * LANES);
            for (long i = 0; i < rows_.num_pieces(); ++i) {
                const Piece& piece = rows_.piece(i);
                Panel<T> b[MAX_PANELS];
                for (long j = 0; j < n; ++j) b[j] = args_.down.panel(first_panel(i) + j);
                const bool is_last = i + 1 == rows_.num_pieces();
                const long next = is_last ? first_panel(0) + num_threads() * width : first_panel(i + 1);
                float* c = scratch<float>(PRODUCT, piece.count * n * LANES);
                const Rows<T> a = rows.from(piece.first);
                multiply_all(a, piece.count, b, n, 0, steps, next - first_panel(i), c, n * LANES);
                add_products(piece, first * LANES, n * LANES, c);
            }
            for (long row = 0; row < count_; ++row) finish(row, first * LANES, (first + n) * LANES);
        });
    }

    // Wide tasks read longer runs of memory, but tasks must be narrow enough that every thread gets several.
    static long down_width(long panels) {
        long width = 4;
        while (width > 1 && panels < 4 * width * num_threads()) width /= 2;
        return width;
    }

    // The sums of a group's experts, for one row.
    float* sums_of(long group, long row) const {
        return sums_ + (group * count_ + row) * (args_.down.rows / args_.experts);
    }

    // Whether a row may have none of a group's experts.
    bool has_gaps() const { return args_.groups > 1 || args_.sums != nullptr; }

    void clear_groups(long first, long columns) const {
        for (long group = 0; has_gaps() && group < args_.groups; ++group)
            for (long row = 0; row < count_; ++row)
                memset(sums_of(group, row) + first, 0, static_cast<size_t>(columns) * sizeof(float));
    }

    // Adds the products c [piece.count, columns], with `first` as their first column, to the sums of their rows.
    void add_products(const Piece& piece, long first, long columns, const float* c) const {
        const long N = args_.down.rows / args_.experts, group = piece.expert * args_.groups / args_.experts;
        for (long i = 0; i < piece.count; ++i) {
            const long pair = rows_.pair(piece.first + i);
            const F gate = set1(args_.gates[start_ * args_.top_k + pair]);
            float* sums = sums_of(group, pair / args_.top_k) + first;
            const bool is_first = !has_gaps() && pair % args_.top_k == 0;
            for (long j = 0; j < columns; j += LANES) {
                F x = load(c + i * columns + j);
                if (args_.down_bias != nullptr) x = add(x, load(args_.down_bias + piece.expert * N + first + j));
                x = mul(x, gate);
                store(sums + j, is_first ? x : add(load(sums + j), x));
            }
        }
    }

    void finish(long row, long first, long end) const {
        const long N = args_.down.rows / args_.experts;
        for (long i = first; i < end; i += LANES) {
            const long at = (start_ + row) * N + i;
            F x = sum_of_groups(row, i);
            if (args_.sums != nullptr) {
                store(args_.sums + at, x);
                continue;
            }
            if (args_.shared != nullptr) x = add(x, load(args_.shared + at));
            if (args_.residual != nullptr) x = add(rounded<T>(x), load(args_.residual + at));
            store(args_.out + at, x);
        }
    }

    // Adds the sums of a row's groups in 16 columns as a balanced binary tree.
    F sum_of_groups(long row, long column) const {
        F sums[MOST_GROUPS];
        for (long group = 0; group < args_.groups; ++group) sums[group] = load(sums_of(group, row) + column);
        for (long count = args_.groups / 2; count > 0; count /= 2)
            for (long i = 0; i < count; ++i) sums[i] = add(sums[2 * i], sums[2 * i + 1]);
        return sums[0];
    }

    const ExpertsArgs<T>& args_;
    const long start_, count_, inner_size_, inner_stride_, stride_;
    const SortedRows rows_;
    T *const gathered_, *const inner_;
    float* const sums_;
};

// Many rows are split into parts with this average number of rows per expert. With so many rows, the cost of reading an
// expert's weights is negligible.
constexpr long EXPERT_ROWS = 64;

template <class T>
void experts(const ExpertsArgs<T>& args) {
    const long most = larger(1, EXPERT_ROWS * args.experts / args.top_k), parts = round_up(args.count, most) / most;
    for (long i = 0; i < parts; ++i) {
        const long start = args.count * i / parts, end = args.count * (i + 1) / parts;
        RoutedRows<T>(args, start, end - start).run();
    }
}

// As `experts`, for experts that are divided among `ranks`.
template <class T>
void experts_of_ranks(const ExpertsArgs<T>& args, RankExchange* ranks) {
    if (ranks == nullptr) return experts(args);
    const long N = args.down.rows / args.experts, k = args.top_k;
    const auto add_own = [&](long start, long rows, float* out) {
        ExpertsArgs<T> own = args;
        own.x += start * args.gate_up.columns, own.chosen += start * k, own.gates += start * k;
        own.count = rows, own.sums = out;
        experts(own);
    };
    exchange_sums(*ranks, args.count, N, add_own, [&](long row, long column, F x) {
        const long at = row * N + column;
        if (args.shared != nullptr) x = add(x, load(args.shared + at));
        if (args.residual != nullptr) x = add(rounded<T>(x), load(args.residual + at));
        store(args.out + at, x);
    });
}

// The shared expert's rows. `scores`: each row is multiplied by the sigmoid of its score; or null.
template <class T>
void shared_expert(const MixtureArgs<T>& args, const Input<T>& x, const T* scores, RankExchange* ranks, T* out) {
    const long N = x.columns;
    gate_up<T>({x, args.shared_gate, args.shared_up, args.experts.activation, args.active});
    const Input<T> active = {args.active, x.count, args.shared_gate.rows, {}};
    linear_of_ranks<T>({active, args.shared_down, nullptr, nullptr, out, args.shared_pieces}, ranks);
    if (scores == nullptr) return;
    parallel(round_up(x.count, NORM_ROWS) / NORM_ROWS, [&](long task) {
        for (long row = task * NORM_ROWS; row < smaller(x.count, (task + 1) * NORM_ROWS); ++row)
            for (long i = row * N; i < (row + 1) * N; i += LANES) {
                const F score = set1(widened(scores[row]));
                store(out + i, activate<T>(Activation::SIGMOID, score, load(out + i)));
            }
    });
}

// All steps of a mixture, from the first norm to the sum with the residual. `after`: the norm of the mixture's output,
// if any.
template <class T>
void mixture(const MixtureArgs<T>& args, const Norm<T>& after, RankExchange* ranks) {
    Input<T> x = {args.x.data, args.x.count, args.x.columns, {}};
    if (args.x.norm.weight != nullptr) {
        T* normed = scratch<T>(NORMED, x.count * x.columns);
        rmsnorm(args.x, normed, x.columns);
        x.data = normed;
    }
    ExpertsArgs<T> experts_args = args.experts;
    const long E = args.router.rows, pairs = x.count * experts_args.top_k;
    int32_t* chosen = args.routes != nullptr ? args.routes : scratch<int32_t>(ROUTES, pairs);
    float* gates = scratch<float>(EXPERT_GATES, pairs);
    const auto choose_from = [&](const auto* logits) {
        using L = std::remove_const_t<std::remove_pointer_t<decltype(logits)>>;
        route<L>({logits, x.count, E, experts_args.top_k, args.routing, args.correction, false, chosen, gates});
    };
    T* scores = args.shared_score.data != nullptr ? scratch<T>(SHARED_SCORES, x.count) : nullptr;
    const LinearArgs<T> of_scores = {x, args.shared_score, nullptr, nullptr, scores};
    if (args.routing.is_wide) {
        float* wide = scratch<float>(LOGITS, x.count * E);
        logits<T>(x, args.router, LogitNumbers{1.0f, 0.0f}, wide);
        if (scores != nullptr) linears(&of_scores, 1);
        choose_from(wide);
    } else {
        T* narrow = scratch<T>(LOGITS, x.count * E);
        const LinearArgs<T> products[2] = {{x, args.router, args.router_bias, nullptr, narrow}, of_scores};
        linears(products, scores != nullptr ? 2 : 1);
        choose_from(narrow);
    }
    experts_args.x = x.data, experts_args.chosen = chosen, experts_args.gates = gates;
    if (args.has_shared) {
        T* shared = scratch<T>(SHARED_ROWS, x.count * x.columns);
        shared_expert(args, x, scores, ranks, shared);
        experts_args.shared = shared;
    }
    if (after.weight != nullptr) experts_args.residual = nullptr;
    experts_of_ranks(experts_args, ranks);
    if (after.weight != nullptr) norm_and_add(after, args.experts.residual, 1.0f, x.count, x.columns, args.experts.out);
}
