// Calls every function of the native kernels' C interface with heap buffers of exactly the required sizes, at odd
// sizes, for every instruction set and type, with one thread and with two. For builds with sanitizers.
//
// Exits with 0 if the results have the same bits for both numbers of threads, also for NaN and infinite values. Prints a
// line for each instruction set: its name and a digest of its results.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "../../../../kernels/cpu/native/api.h"

using namespace trueroll;

namespace {

uint32_t state = 1;

float random_value() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-30f;
}

// Activations, weights or caches: float32 or bfloat16 in memory of exactly their size.
class Values {
  public:
    Values(int bfloat16, long count, float wild = 0.0f) : bytes_(static_cast<size_t>(count) * (bfloat16 ? 2 : 4)) {
        for (long i = 0; i < count; ++i) {
            const float value = i % 13 == 5 && wild != 0.0f ? wild : random_value();
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            if (bfloat16) bits >>= 16;
            std::memcpy(bytes_.data() + i * (bfloat16 ? 2 : 4), &bits, bfloat16 ? 2 : 4);
        }
    }
    void* data() { return bytes_.data(); }
    const std::vector<char>& bytes() const { return bytes_; }

  private:
    std::vector<char> bytes_;
};

long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

std::vector<int64_t> counting(long count, int64_t first, int64_t step) {
    std::vector<int64_t> numbers(static_cast<size_t>(count));
    for (int64_t& number : numbers) {
        number = first;
        first = static_cast<int64_t>(static_cast<uint64_t>(first) + static_cast<uint64_t>(step));
    }
    return numbers;
}

// All results so far, as one number.
class Digest {
  public:
    void add(const void* data, size_t bytes) {
        const unsigned char* p = static_cast<const unsigned char*>(data);
        for (size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ p[i]) * 0x100000001B3u;
    }
    void add(const Values& values) { add(values.bytes().data(), values.bytes().size()); }
    template <class T>
    void add(const std::vector<T>& values) { add(values.data(), values.size() * sizeof(T)); }
    uint64_t value() const { return hash_; }

  private:
    uint64_t hash_ = 0xCBF29CE484222325u;
};

// An array of numbers or pointers, viewed as the type that the interface reads. Python fills such arrays too.
struct Filled {
    const void* at;
    template <class T>
    operator const T*() const { return static_cast<const T*>(at); }
};

template <class T>
Filled filled(const std::vector<T>& array) { return {array.data()}; }

void check(bool good, const char* what, const std::string& name) {
    if (good) return;
    std::fprintf(stderr, "%s: %s\n", name.c_str(), what);
    std::exit(1);
}

struct Run {
    long threads;
    int bfloat16;
    float wild;  // a special value among the activations, or 0
    Digest* digest;

    Values random(long count, bool activation = true) const { return Values(bfloat16, count, activation ? wild : 0); }

    Values packed(long rows, long columns) const {
        Values dense = random(rows * columns, false), back = random(rows * columns, false);
        Values weight(bfloat16, round_up(rows, 16) * round_up(columns, bfloat16 ? 32 : 1));
        trueroll_pack(bfloat16, dense.data(), weight.data(), rows, columns);
        trueroll_unpack(bfloat16, weight.data(), back.data(), rows, columns);
        if (dense.bytes() != back.bytes()) std::abort();
        return weight;
    }

    // Products with quantized matrices, which kernels/cpu/quantized.py describes.
    void quantized_products(long rows, long k, long n) const {
        const struct {
            long bits, group, header, shared;
        } formats[] = {{8, 128, 0, 64}, {8, k, 0, 64}, {8, k, 0, 64}, {8, 32, 0, 16}, {4, 32, 0, 16}, {4, 16, 64, 16}, {4, 128, 0, 48}, {8, k, 0, 64}, {8, k, 0, 64}};
        Values x = random(rows * k), out = random(rows * n);
        for (int format = 1; format <= 9; ++format) {
            const auto& [bits, group, header, shared] = formats[format - 1];
            const long padded = round_up(k, 32), groups = group == k ? 1 : round_up(padded, group) / group;
            const long bytes = round_up(n, 16) / 16 * (header + groups * shared + padded * 2 * bits);
            std::vector<uint8_t> weight(static_cast<size_t>(bytes));
            // All scales that consist of such bytes are small and positive.
            for (uint8_t& byte : weight) byte = static_cast<uint8_t>(random_value() * 8.0f + 16.0f);
            trueroll_linear(
                threads, bfloat16, x.data(), rows, k, weight.data(), format, n, nullptr, nullptr, 2, 48, out.data()
            );
            digest->add(out);
            trueroll_gate_up(
                threads, bfloat16, x.data(), rows, k, weight.data(), format, weight.data(), format, n, 0, out.data()
            );
            digest->add(out);
        }
    }

    // Pieces of a push: rows that are packed, and bytes that are copied or only hashed.
    void pieces(long n, long k) const {
        Values dense = random(n * k, false), weight = packed(n, k), back = random(n * k, false), copy = random(n * k);
        const int infinity = bfloat16 ? 0x7F80 : 0x7F800000;
        const long bytes = static_cast<long>(dense.bytes().size());
        bool finite;
        const long hash = trueroll_take_rows(bfloat16, dense.data(), n, k, infinity, weight.data(), &finite);
        trueroll_unpack(bfloat16, weight.data(), back.data(), n, k);
        check(finite && back.bytes() == dense.bytes(), "other bits, or not finite", "take_rows");
        const long same = trueroll_take_bytes(dense.data(), bytes, infinity, copy.data(), &finite);
        check(finite && same == hash && copy.bytes() == dense.bytes(), "other bits, or not finite", "take_bytes");
        check(trueroll_take_bytes(dense.data(), bytes, 0, nullptr, &finite) == hash, "another hash", "take_bytes");
    }

    void merge(long n, long k, long rank) const {
        Values a(0, rank * k), b(0, n * rank), weight = random(n * k, false), out = random(n * k);
        const float *left = static_cast<float*>(b.data()), *right = static_cast<float*>(a.data());
        trueroll_merge(bfloat16, weight.data(), n, k, right, left, rank, 0.5f, out.data());
        digest->add(out);
        Values into = packed(n, k), back = random(n * k);
        bool finite;
        trueroll_merge_into(bfloat16, weight.data(), n, k, right, left, rank, 0.5f, into.data(), &finite);
        trueroll_unpack(bfloat16, into.data(), back.data(), n, k);
        check(finite && back.bytes() == out.bytes(), "merged and packed, other bits", "merge_into");
    }

    void products(long rows, long k, long n) const {
        Values x = random(rows * k), norm = random(k, false), bias = random(n, false), residual = random(rows * n);
        Values weight = packed(n, k), up = packed(n, k), out = random(rows * n), normed = random(rows * k);
        for (int zero_centered : {0, 1}) {
            trueroll_rmsnorm(threads, bfloat16, x.data(), rows, k, norm.data(), 1e-5f, zero_centered, normed.data());
            digest->add(normed);
        }
        merge(n, k, 3);
        quantized_products(rows, k, n);
        if (n * k >= 121) pieces(n, k);
        for (void* b : {static_cast<void*>(nullptr), bias.data()})
            for (void* r : {static_cast<void*>(nullptr), residual.data()}) {
                for (long pieces : {1, 2, 8}) {
                    trueroll_linear(
                        threads, bfloat16, x.data(), rows, k, weight.data(), 0, n, b, r, pieces, 48, out.data()
                    );
                    digest->add(out);
                }
            }
        std::vector<float> sums(static_cast<size_t>(rows * n));
        for (long pieces : {1, 4}) {
            trueroll_back_sums(threads, bfloat16, x.data(), rows, k, weight.data(), 0, n, pieces, 16, nullptr, sums.data());
            digest->add(sums);
        }
        for (int activation : {0, 1, 2, 3}) {
            trueroll_gate_up(
                threads, bfloat16, x.data(), rows, k, weight.data(), 0, up.data(), 0, n, activation, out.data()
            );
            digest->add(out);
            trueroll_gate_mul(threads, bfloat16, out.data(), residual.data(), rows * n, activation, out.data());
            digest->add(out);
        }
        std::vector<int64_t> ids = counting(rows, 0, 1);
        for (int64_t& id : ids) id %= n;
        trueroll_embedding(threads, bfloat16, ids.data(), rows, weight.data(), n, k, normed.data());
        digest->add(normed);
    }

    void head(long rows, long k, long vocab) const {
        Values x = random(rows * k), weight = packed(vocab, k);
        std::vector<float> logits(static_cast<size_t>(rows * vocab)), logprobs(static_cast<size_t>(rows));
        std::vector<float> temperatures(logprobs.size(), 0.7f), top_p(logprobs.size(), 0.9f);
        std::vector<float> min_p(logprobs.size(), 0.01f);
        std::vector<uint8_t> raw(logprobs.size()), finite(logprobs.size());
        std::vector<int64_t> seeds = counting(rows, -5, 1l << 57), positions = counting(rows, 3, 1l << 31);
        std::vector<int64_t> targets = counting(rows, 0, 1), tokens(logprobs.size()), top_k(logprobs.size(), -1);
        for (size_t i = 0; i < targets.size(); ++i) {
            raw[i] = i % 2, targets[i] = i % 3 == 0 ? -1 : i % 3 == 1 ? -2 : targets[i] % vocab;
            if (i % 2) top_k[i] = 1 + static_cast<int64_t>(i) * 5;
        }
        const std::vector<int64_t> order(counting(rows, rows - 1, -1));
        const long best = std::min(7l, vocab);
        std::vector<float> entropies(logprobs.size()), top_logprobs(static_cast<size_t>(rows * best));
        std::vector<int64_t> top_ids(top_logprobs.size());
        const long sections = (vocab + 511) / 512;
        std::vector<SectionResult> results(static_cast<size_t>(rows * sections));
        std::vector<float> values(top_logprobs.size());
        std::vector<int64_t> ids(top_logprobs.size());
        const auto run_head = [&](float* asked, const HeadEdits* edits, float* of_targets) {
            trueroll_head_sections(
                threads, bfloat16, x.data(), k, weight.data(), vocab, 0.5f, 30.0f, 0, rows, order.data(),
                temperatures.data(), raw.data(), seeds.data(), positions.data(), targets.data(), results.data(), asked != nullptr, best,
                values.data(), ids.data(), edits
            );
            trueroll_fold_sections(
                threads, rows, sections, results.data(), best, values.data(), ids.data(), tokens.data(), logprobs.data(),
                finite.data(), best, asked, top_ids.data(), top_logprobs.data(), edits, of_targets
            );
            digest->add(tokens), digest->add(logprobs), digest->add(finite);
        };
        run_head(nullptr, nullptr, nullptr), run_head(entropies.data(), nullptr, nullptr);
        digest->add(entropies), digest->add(top_ids), digest->add(top_logprobs);
        edited(rows, vocab, run_head);
        trueroll_logits(threads, bfloat16, x.data(), rows, k, weight.data(), vocab, 0.5f, 30.0f, logits.data());
        digest->add(logits);
        trueroll_log_probs(threads, logits.data(), rows, vocab, tokens.data(), 1, logprobs.data());
        trueroll_sample(threads, logits.data(), rows, vocab, seeds.data(), positions.data(), tokens.data());
        std::vector<uint32_t> masks(static_cast<size_t>(rows * ((vocab + 31) / 32)));
        for (size_t i = 0; i < masks.size(); ++i) masks[i] = i % 3 ? 0xFFFF0F71u : 0xFFFFFFFFu;
        trueroll_mask_logits(threads, logits.data(), vocab, order.data(), rows, masks.data());
        std::vector<float> recorded = logits, sums(static_cast<size_t>(2 * rows)), kept(logprobs.size());
        std::vector<uint8_t> bits(static_cast<size_t>(rows * ((vocab + 7) / 8)));
        trueroll_filter(
            threads, recorded.data(), rows, vocab, top_k.data(), top_p.data(), min_p.data(), sums.data(), bits.data()
        );
        for (size_t i = 0; i < kept.size(); ++i) kept[i] = logits[i * static_cast<size_t>(vocab)];
        trueroll_log_probs_of(rows, kept.data(), sums.data(), logprobs.data());
        trueroll_filter(
            threads, logits.data(), rows, vocab, top_k.data(), top_p.data(), min_p.data(), nullptr, nullptr
        );
        digest->add(logprobs), digest->add(tokens), digest->add(logits), digest->add(recorded), digest->add(bits);
        for (const long best : {0l, 1l, std::min(7l, vocab), std::min(40l, vocab)}) statistics(logits, tokens, vocab, best);
    }

    // Runs the head with edits, masks and targets: with none in some rows, and with the first and the last token in
    // others.
    template <class RunHead>
    void edited(long rows, long vocab, const RunHead& run_head) const {
        const size_t count = static_cast<size_t>(rows);
        std::vector<int64_t> starts(1), target_starts(1), targets, mask_places;
        std::vector<LogitEdit> entries;
        std::vector<float> penalties;
        for (long row = 0; row < rows; ++row) {
            for (long token = 0; token < vocab; token += row % 3 == 0 ? vocab : row % 3 == 1 ? 1 : 97)
                if (row % 3) entries.push_back({static_cast<int32_t>(token), static_cast<int32_t>(token % 3), 0.5f, 0, token % 2 == 0});
            for (long i = 0; i < row % 4; ++i) targets.push_back(i % 2 ? vocab - 1 : i);
            mask_places.push_back(row % 2 ? row / 2 : -1);
            starts.push_back(static_cast<int64_t>(entries.size()));
            target_starts.push_back(static_cast<int64_t>(targets.size()));
            penalties.insert(penalties.end(), {1.2f, 0.3f, -0.1f});
        }
        const long words = (vocab + 31) / 32;
        std::vector<uint32_t> masks(mask_places.size() / 2 * static_cast<size_t>(words), 0xFFFF0F71u);
        std::vector<float> logits(targets.size()), logprobs(targets.size()), entropies(count);
        const HeadEdits edits = {
            starts.data(), entries.data(), penalties.data(), mask_places.data(), masks.data(), words,
            target_starts.data(), targets.data(), logits.data()
        };
        run_head(nullptr, &edits, logprobs.data());
        digest->add(logprobs);
        run_head(entropies.data(), &edits, logprobs.data());
        digest->add(logprobs), digest->add(entropies);
    }

    // For logits in which filters dropped some tokens.
    void statistics(
        const std::vector<float>& logits, const std::vector<int64_t>& tokens, long vocab, long best
    ) const {
        const long rows = static_cast<long>(tokens.size());
        std::vector<float> logprobs(tokens.size()), entropies(tokens.size());
        std::vector<float> top_logprobs(static_cast<size_t>(rows * best));
        std::vector<int64_t> top_ids(top_logprobs.size());
        trueroll_token_statistics(
            threads, logits.data(), rows, vocab, tokens.data(), best, logprobs.data(), entropies.data(), top_ids.data(),
            top_logprobs.data()
        );
        digest->add(logprobs), digest->add(entropies), digest->add(top_ids), digest->add(top_logprobs);
    }

    // Every sequence writes its last tokens through `qkv`, the others through `write_kv`. The first two sequences share
    // all blocks but the last. Tasks of few rows follow tasks of many rows. The keys and values of tasks of few rows
    // are prefetched only if a block is one panel. At the end two layers run, with the same weights and caches. A
    // window, which the second layer never has, comes with a soft cap, norms of 1 + weight at both places, and GELU.
    // `extras`: sinks, a bias after attention, and biases and norms of q and k, of all heads at once if there is a
    // window. `format`: of the caches, as `CacheFormat` in common.h.
    void layer(
        long block_size, long heads, long kv_heads, long size, bool extras, long window = 0, int format = 0
    ) const {
        const std::vector<int64_t> lens = {150, 150, 1, 5, 130, 200}, counts = {1, 1, 1, 2, 20, 49};
        const long sequences = static_cast<long>(lens.size()), max_blocks = round_up(200, block_size) / block_size;
        std::vector<int64_t> starts(lens.size() + 1), tables(lens.size() * static_cast<size_t>(max_blocks)), old, fresh;
        std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
        long blocks = 0;
        for (size_t i = 0; i < lens.size(); ++i)
            for (long token = 0; token < lens[i]; ++token) {
                const long block = token / block_size;
                int64_t* table = tables.data() + static_cast<long>(i) * max_blocks;
                const bool shared = i == 1 && (block + 1) * block_size < lens[i];
                if (token % block_size == 0) table[block] = shared ? tables[static_cast<size_t>(block)] : blocks++;
                (token < lens[i] - counts[i] ? old : fresh).push_back(table[block] * block_size + token % block_size);
            }
        const long rows = static_cast<long>(fresh.size()), written = static_cast<long>(old.size());
        const long k = 33, width = kv_heads * size;
        const long item = bfloat16 ? 2 : 4, row = format == 0 ? size * item : size + 6 - 2 * format;
        const long cached = blocks * block_size * kv_heads * row / item;
        Values keys(bfloat16, cached), values(bfloat16, cached);
        Values old_keys = random(written * width), old_values = random(written * width);
        trueroll_write_kv(
            threads, bfloat16, old_keys.data(), old_values.data(), old.data(), written, keys.data(), values.data(), format,
            block_size, kv_heads, size, size
        );
        Values x = random(rows * k), norm = random(k, false);
        Values q = random(rows * heads * size), out = random(rows * heads * size);
        Values wq = packed(heads * size, k), wk = packed(width, k), wv = packed(width, k);
        Values bq = random(heads * size, false), bk = random(width, false), bv = random(width, false);
        const bool over_heads = extras && window > 0;
        Values q_norm = random(over_heads ? heads * size : size, false);
        Values k_norm = random(over_heads ? width : size, false);
        std::vector<float> cosines(static_cast<size_t>(rows * size / 2)), sines(cosines.size());
        const std::vector<float> inv_freq(static_cast<size_t>(size / 2), 0.01f);
        trueroll_rotation(threads, fresh.data(), rows, inv_freq.data(), size / 2, 1.2f, cosines.data(), sines.data());
        const auto extra = [&](Values& vector) { return extras ? vector.data() : nullptr; };
        const std::vector<const void*> for_qkv = {
            wq.data(), wk.data(), wv.data(), extra(bq), extra(bk), extra(bv), extra(q_norm), extra(k_norm)
        };
        const auto mixer = [&](long window) {
            std::vector<double> numbers(14);
            const long whole[] = {heads, kv_heads, size};
            std::copy(whole, whole + 3, numbers.begin());
            numbers[3] = 1e-5, numbers[5] = over_heads, numbers[6] = 0.125, numbers[7] = static_cast<double>(window);
            numbers[8] = window > 0 ? 3.0 : 0.0, numbers[10] = static_cast<double>(size / 2), numbers[13] = format;
            return numbers;
        };
        const std::vector<double> numbers = mixer(window);
        Values sinks = random(heads, false), o_bias = random(k, false);
        trueroll_qkv(
            threads, bfloat16, x.data(), rows, k, filled(numbers), filled(for_qkv), 0, 0, 0, keys.data(),
            values.data(), cosines.data(), sines.data(), nullptr, fresh.data(), block_size, q.data()
        );
        trueroll_attention(
            threads, bfloat16, q.data(), keys.data(), values.data(), format, heads, kv_heads, size, size, block_size,
            sequences, starts.data(), lens.data(), tables.data(), max_blocks, nullptr, 0.125f, window, window > 0 ? 3.0f : 0.0f,
            extra(sinks), out.data()
        );
        digest->add(q), digest->add(keys), digest->add(values), digest->add(out);
        // From the third query on, the queries of the long sequences see later tokens.
        std::vector<int64_t> ends;
        for (size_t i = 0; i < lens.size(); ++i)
            for (long query = 0; query < counts[i]; ++query)
                ends.push_back(query < 2 && counts[i] > 2 ? lens[i] - counts[i] + query + 1 : lens[i]);
        trueroll_attention(
            threads, bfloat16, q.data(), keys.data(), values.data(), format, heads, kv_heads, size, size, block_size,
            sequences, starts.data(), lens.data(), tables.data(), max_blocks, filled(ends), 0.125f, window,
            window > 0 ? 3.0f : 0.0f, extra(sinks), out.data()
        );
        digest->add(out);
        if (!over_heads) {
            std::vector<double> gated = numbers;
            const std::vector<float> scales(static_cast<size_t>(rows), 1.25f);
            gated[10] = 5, gated[12] = 1;
            Values both = packed(2 * heads * size, k), wide = random(rows * 2 * heads * size);
            const Values two_biases = random(2 * heads * size, false);
            std::vector<const void*> for_both = for_qkv;
            for_both[0] = both.data(), for_both[3] = extras ? two_biases.bytes().data() : nullptr;
            trueroll_qkv(
                threads, bfloat16, x.data(), rows, k, filled(gated), filled(for_both), 0, 0, 0, keys.data(),
                values.data(), cosines.data(), sines.data(), scales.data(), fresh.data(), block_size, wide.data()
            );
            digest->add(wide), digest->add(keys);
        }

        const long n = 19;
        Values o = packed(k, heads * size), gate = packed(n, k), up = packed(n, k), down = packed(k, n);
        Values post_norm = random(k, false), middle = random(rows * k), active = random(rows * n), y = random(rows * k);
        std::vector<const void*> layers, caches;
        const std::vector<const void*> turns = {cosines.data(), sines.data(), nullptr};
        std::vector<double> specs;
        for (const long seen : {window, 0l}) {
            const bool other = seen > 0;
            const std::vector<double> more = mixer(seen);
            specs.push_back(0.0);
            specs.insert(specs.end(), more.begin(), more.end());
            specs.insert(specs.end(), {static_cast<double>(n), other ? 1.0 : 0.0, 1e-5, other ? 1.0 : 0.0});
            specs.insert(specs.end(), 16, 0.0);
            specs.insert(specs.end(), {2.0, 16.0, 16.0, 1.0});
            specs.insert(specs.end(), 10, 0.0);
            layers.insert(layers.end(), {norm.data(), other ? post_norm.data() : nullptr});
            layers.insert(layers.end(), for_qkv.begin(), for_qkv.end());
            layers.insert(layers.end(), {o.data(), extra(o_bias), extra(sinks)});
            layers.insert(layers.end(), {post_norm.data(), other ? norm.data() : nullptr});
            layers.insert(layers.end(), {gate.data(), up.data(), down.data()});
            layers.insert(layers.end(), 8, nullptr);
            caches.insert(caches.end(), {keys.data(), values.data()});
        }
        // Each layer has its own table, so that a layer that reads another one's table is found.
        const std::vector<int64_t> copied = tables;
        PagePointers pages[2] = {{fresh.data(), tables.data(), max_blocks}};
        pages[1] = {fresh.data(), copied.data(), max_blocks};
        layers.shrink_to_fit(), caches.shrink_to_fit(), specs.shrink_to_fit();
        trueroll_layers(
            threads, bfloat16, x.data(), rows, k, filled(specs), filled(layers), filled(caches), pages, 2,
            filled(turns), block_size, sequences, starts.data(), lens.data(), filled(ends), nullptr, nullptr, nullptr,
            q.data(), nullptr, nullptr, nullptr, out.data(), middle.data(), active.data(), y.data(), nullptr
        );
        digest->add(keys), digest->add(values), digest->add(y);
    }

    // A sequence that begins, one that continues from another's slot, one in its own slot, one without rows, and a long
    // one.
    void delta_net(long key_heads, long value_heads, long key_dim, long value_dim, long kernel) const {
        const std::vector<int64_t> starts = {0, 3, 4, 6, 6, 140}, reads = {-1, 5, 1, 5, -1}, writes = {0, 2, 1, 3, 4};
        const std::vector<int64_t> drafted = {2, 0, 1, 0, 70};
        const long rows = 140, slots = 6, channels = 2 * key_heads * key_dim + value_heads * value_dim;
        Values x = random(rows * channels), weight = random(channels * kernel, false), qkv = random(rows * channels);
        Values tails = random(slots * (kernel - 1) * channels, false), out = random(rows * value_heads * value_dim);
        trueroll_convolve(
            threads, bfloat16, x.data(), rows, channels, weight.data(), nullptr, kernel, tails.data(), 5, starts.data(),
            reads.data(), writes.data(), drafted.data(), qkv.data()
        );
        Values b = random(rows * value_heads), a = random(rows * value_heads);
        Values decay = random(value_heads, false), bias = random(value_heads, false);
        std::vector<float> states(static_cast<size_t>(slots * value_heads * key_dim * value_dim), 0.5f);
        trueroll_delta_rule(
            threads, bfloat16, qkv.data(), b.data(), a.data(), decay.data(), bias.data(), key_heads, value_heads,
            key_dim, value_dim, states.data(), 5, starts.data(), reads.data(), writes.data(), drafted.data(), out.data()
        );
        digest->add(qkv), digest->add(tails), digest->add(states), digest->add(out);
    }

    // The sequences are those of `delta_net`.
    void state_space(long groups, long heads, long state_dim, long head_dim, long kernel) const {
        const std::vector<int64_t> starts = {0, 3, 4, 6, 6, 140}, reads = {-1, 5, 1, 5, -1}, writes = {0, 2, 1, 3, 4};
        const std::vector<int64_t> drafted = {2, 0, 1, 0, 70};
        const long rows = 140, slots = 6, channels = heads * head_dim + 2 * groups * state_dim;
        Values x = random(rows * channels), weight = random(channels * kernel, false), bias = random(channels, false);
        Values tails = random(slots * (kernel - 1) * channels, false), xbc = random(rows * channels);
        trueroll_convolve(
            threads, bfloat16, x.data(), rows, channels, weight.data(), bias.data(), kernel, tails.data(), 5,
            starts.data(), reads.data(), writes.data(), drafted.data(), xbc.data()
        );
        Values steps = random(rows * heads), out = random(rows * heads * head_dim);
        Values decay = random(heads, false), of_steps = random(heads, false), skip = random(heads, false);
        std::vector<float> states(static_cast<size_t>(slots * heads * state_dim * head_dim), 0.5f);
        trueroll_state_space(
            threads, bfloat16, xbc.data(), steps.data(), decay.data(), of_steps.data(), skip.data(), 0.01f, 2.0f,
            groups, heads, state_dim, head_dim, states.data(), 5, starts.data(), reads.data(), writes.data(),
            drafted.data(), out.data()
        );
        digest->add(xbc), digest->add(tails), digest->add(states), digest->add(out);
    }

    // Rows go to their best experts, some of which have many rows, and then to the same experts again.
    void mixture(long rows, long k, long count, long n, long top_k, bool extras) const {
        Values logits = random(rows * count), x = random(rows * k), shared = random(rows * k), out = random(rows * k);
        Values gate_up = packed(count * 2 * n, k), down = packed(count * k, n);
        Values gate_up_bias = random(count * 2 * n, false), down_bias = random(count * k, false);
        std::vector<int32_t> chosen(static_cast<size_t>(rows * top_k));
        std::vector<float> gates(chosen.size());
        const auto extra = [&](Values& values) { return extras ? values.data() : nullptr; };
        const std::vector<float> correction(static_cast<size_t>(count), 0.25f);
        const RouterNumbers plain = {extras ? 0.0 : 1.0, 0.0, 0.0, 1.0, 1.0, 2.0, 0.0, 0.0, 0.0, 1.0};
        // Sigmoid scores in groups of two experts at least, of which enough groups for all experts of a row are kept.
        const double groups = static_cast<double>(count % 2 == 0 && count > 2 ? count / 2 : 1);
        const RouterNumbers grouped = {2.0, 1.0, 1.0, groups, groups, 2.0, 1.0, 1e-20, 1e-3, 2.5};
        for (const RouterNumbers& router : {plain, grouped})
            for (int is_replayed : {0, 1}) {
                trueroll_route(
                    threads, bfloat16, logits.data(), rows, count, top_k, &router,
                    router.ranks_scores != 0.0 ? correction.data() : nullptr, is_replayed, chosen.data(), gates.data()
                );
                digest->add(chosen), digest->add(gates);
            }
        trueroll_experts(
            threads, bfloat16, x.data(), rows, k, gate_up.data(), extra(gate_up_bias), down.data(), extra(down_bias),
            0, 0, count, n, top_k, 1, extras ? 3 : 0, chosen.data(), gates.data(), extra(shared), extras ? 2 : 1, out.data()
        );
        digest->add(out);
        std::vector<float> sums(static_cast<size_t>(rows * k));
        for (long first : {0L, 1L, count}) {  // all experts, all but one, and none
            trueroll_expert_sums(
                threads, bfloat16, x.data(), rows, k, gate_up.data(), extra(gate_up_bias), down.data(),
                extra(down_bias), 0, 0, first, count, n, top_k, !extras, 0, chosen.data(), gates.data(), extras ? 4 : 1, sums.data()
            );
            digest->add(sums);
        }
    }

    // A delta net, attention with an output gate and another delta net, for the first tokens of three sequences and a
    // later token of one. The attention's heads are as large as the delta nets' values. Each layer has an MLP, or
    // experts and a shared expert.
    void hybrid(long key_heads, long value_heads, long key_dim, long size, bool has_experts) const {
        const std::vector<int64_t> starts = {0, 3, 4, 6, 20}, reads = {-1, 2, -1, -1}, writes = {0, 1, 3, 4};
        const std::vector<int64_t> lens = {3, 1, 2, 14}, tables = {0, 1, 2, 3};
        std::vector<int64_t> slots;
        for (int64_t i = 0; i < 4; ++i)
            for (int64_t token = 0; token < lens[static_cast<size_t>(i)]; ++token) slots.push_back(i * 16 + token);
        const long rows = 20, k = has_experts ? 48 : 33, n = 19, pairs = 5, kernel = 4;
        const long count = 5, top_k = 2, inner = 16;
        const long channels = 2 * key_heads * key_dim + value_heads * size, width = value_heads * size;
        Values x = random(rows * k), norm = random(k, false), head_norm = random(size, false);
        Values qkv = packed(channels, k), z = packed(width, k), b = packed(value_heads, k), a = packed(value_heads, k);
        Values taps = random(channels * kernel, false), decay = random(value_heads, false);
        Values wq = packed(2 * width, k), wk = packed(size, k), wv = packed(size, k), o = packed(k, width);
        Values gate = packed(n, k), up = packed(n, k), down = packed(k, n);
        Values router = packed(count, k), score = packed(1, k);
        const std::vector<float> correction(static_cast<size_t>(count), 0.25f);
        Values gate_ups = packed(count * 2 * inner, k), downs = packed(count * k, inner);
        std::vector<int32_t> routes(static_cast<size_t>(3 * rows * top_k));
        Values keys(bfloat16, 4 * 16 * size), values(bfloat16, 4 * 16 * size);
        Values tails = random(5 * (kernel - 1) * channels, false), more_tails = tails;
        std::vector<float> states(static_cast<size_t>(5 * value_heads * key_dim * size), 0.5f), more_states = states;
        const std::vector<float> cosines(static_cast<size_t>(rows * pairs), 0.8f), sines(cosines.size(), 0.6f);
        const auto whole = [](long number) { return static_cast<double>(number); };
        std::vector<double> specs;
        std::vector<const void*> layers;
        for (const bool is_delta_net : {true, false, true}) {
            std::vector<double> mixer = {1.0, whole(key_heads), whole(value_heads), whole(key_dim), whole(size)};
            mixer.insert(mixer.end(), {whole(kernel), 1e-6});
            if (!is_delta_net)
                mixer = {0.0, whole(value_heads), 1.0, whole(size), 1e-5, 1.0, 0.0, 0.125, 0.0, 0.0, 0.0, pairs, 0.0, 1.0};
            mixer.resize(15);
            specs.insert(specs.end(), mixer.begin(), mixer.end());
            specs.insert(specs.end(), {whole(has_experts ? inner : n), 0.0, 1e-5, 1.0});
            if (has_experts)
                specs.insert(specs.end(), {whole(count), whole(top_k), 1.0, whole(n), 0.0, whole(count)});
            else
                specs.insert(specs.end(), 6, 0.0);
            // The layers with delta nets have a wide router with a correction, and no score of the shared expert.
            if (has_experts && is_delta_net)
                specs.insert(specs.end(), {2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1e-20, 0.0, 2.5});
            else
                specs.insert(specs.end(), {0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 0.0, 0.0, 0.0, 1.0});
            specs.insert(specs.end(), {2.0, 16.0, 16.0, 1.0});
            specs.insert(specs.end(), 10, 0.0);
            layers.insert(layers.end(), {norm.data(), nullptr});
            if (is_delta_net)
                layers.insert(layers.end(), {qkv.data(), z.data(), b.data(), a.data()}),
                    layers.insert(layers.end(), {taps.data(), decay.data(), decay.data(), head_norm.data()});
            else
                layers.insert(layers.end(), {wq.data(), wk.data(), wv.data(), nullptr, nullptr, nullptr}),
                    layers.insert(layers.end(), {head_norm.data(), head_norm.data()});
            layers.insert(layers.end(), {o.data(), nullptr, nullptr, norm.data(), nullptr});
            if (has_experts)
                layers.insert(layers.end(), {router.data(), nullptr, gate_ups.data(), nullptr, downs.data(), nullptr});
            layers.insert(layers.end(), {gate.data(), up.data(), down.data()});
            if (has_experts && is_delta_net)
                layers.insert(layers.end(), {nullptr, correction.data()});
            else if (has_experts)
                layers.insert(layers.end(), {score.data(), nullptr});
            else
                layers.insert(layers.end(), 8, nullptr);
        }
        const std::vector<const void*> memories = {
            states.data(), tails.data(), keys.data(), values.data(), more_states.data(), more_tails.data()
        };
        const std::vector<const void*> turns = {cosines.data(), sines.data(), nullptr};
        Values projected = random(rows * std::max(channels, width)), convolved = random(rows * channels);
        Values gates = random(rows * width), rates = random(2 * rows * value_heads), mixed = random(rows * width);
        Values middle = random(rows * k), active = random(rows * n), y = random(rows * k);
        const PagePointers page = {slots.data(), tables.data(), 1}, pages[3] = {page, page, page};
        // The exchange of a rank that is the only one. A slot has room for three rows.
        int64_t counter = 0;
        std::vector<char> memory(static_cast<size_t>(2 * 3 * k) * sizeof(float));
        RankExchange alone = {&counter, memory.data(), 3 * k * 4, 0, 1, 0, [] { return 1; }, 0, 0};
        trueroll_layers(
            threads, bfloat16, x.data(), rows, k, filled(specs), filled(layers), filled(memories), pages, 3,
            filled(turns), 16, 4, starts.data(), lens.data(), nullptr, reads.data(), writes.data(),
            has_experts ? routes.data() : nullptr, projected.data(), convolved.data(), gates.data(), rates.data(), mixed.data(), middle.data(), active.data(),
            y.data(), has_experts ? &alone : nullptr
        );
        digest->add(keys), digest->add(values), digest->add(y), digest->add(routes);
        digest->add(states), digest->add(tails), digest->add(more_states), digest->add(more_tails);
    }

    // Run the cases with heads of two sizes.
    void some(long size, long other) const {
        delta_net(2, 4, 16, 48, 4), delta_net(3, 3, 7, 5, 1), delta_net(1, 2, 5, 150, 2);
        state_space(2, 4, 16, 48, 4), state_space(3, 3, 7, 5, 1), state_space(1, 2, 5, 150, 2);
        hybrid(2, 4, 7, 32, false), hybrid(1, 1, 16, 16, false), hybrid(1, 2, 16, 16, true);
        mixture(13, 48, 5, 16, 3, true), mixture(260, 16, 2, 48, 1, false);
        products(13, 130, 33), head(5, 33, 1001), layer(24, 3, 1, size, true), layer(16, 2, 2, other, false);
        layer(24, 3, 1, size, true, 150), layer(16, 2, 2, other, false, 13);
        for (const int format : {1, 2}) {
            layer(24, 3, 1, size, true, 0, format), layer(16, 2, 2, other, false, 13, format);
        }
    }

    void everything() const {
        for (long rows : {1, 2, 7, 13, 33, 97}) products(rows, 130, 33);
        products(3, 1, 1), products(5, 7, 17), products(2, 600, 70), products(3, 64, 48);
        for (long vocab : {1, 17, 513, 1001}) head(7, 33, vocab);
        head(101, 32, 40);
        layer(2, 4, 2, 16, false), layer(64, 6, 2, 32, true);
        layer(2, 4, 2, 16, true, 30), layer(64, 6, 2, 32, true, 129);
        some(80, 64);
    }
};

#if defined(__SANITIZE_THREAD__)
constexpr float WILD[] = {0.0f, NAN};  // which threads touch which memory does not depend on values
#else
constexpr float WILD[] = {0.0f, NAN, INFINITY, 3e38f};
#endif

uint64_t digest_of(long threads, int bfloat16, float wild) {
    Digest digest;
    state = 1;
    const Run run = {threads, bfloat16, wild, &digest};
    wild == 0.0f ? run.everything() : run.some(16, 32);
    return digest.value();
}

// Two threads of the process that call at the same time, with different numbers of threads.
void call_at_once(const std::string& name) {
    std::vector<int64_t> seeds = counting(40, 0, 1), found[2];
    const std::vector<float> logits(40 * 1001, 1.0f);
    std::vector<std::thread> callers;
    for (long caller = 0; caller < 2; ++caller)
        callers.emplace_back([&, caller] {
            found[caller].resize(40);
            for (int i = 0; i < 10; ++i)
                trueroll_sample(caller + 1, logits.data(), 40, 1001, seeds.data(), seeds.data(), found[caller].data());
        });
    for (std::thread& caller : callers) caller.join();
    check(found[0] == found[1], "two callers at the same time found different tokens", name);
}

// A forked process has none of the pool's threads and must start its own.
void call_after_fork(const std::string& name) {
    const std::vector<float> logits(40 * 1001, 1.0f);
    std::vector<int64_t> seeds = counting(40, 0, 1), before(40), after(40);
    trueroll_sample(2, logits.data(), 40, 1001, seeds.data(), seeds.data(), before.data());
    const pid_t child = fork();
    if (child == 0) {
        trueroll_sample(2, logits.data(), 40, 1001, seeds.data(), seeds.data(), after.data());
        _exit(before == after ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    check(status == 0, "the forked process failed", name);
}

// Errors that a sanitizer must find: two threads that write to the same place, and a norm that is one value too short.
void misuse() {
    std::vector<float> weight(4096 * 17, 1.0f), out(4096 * 17);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 2; ++caller)
        callers.emplace_back([&] { trueroll_pack(0, weight.data(), out.data(), 4096, 17); });
    for (std::thread& caller : callers) caller.join();
    const std::vector<float> norm(16, 1.0f);
    trueroll_rmsnorm(1, 0, out.data(), 1, 17, norm.data(), 1e-5f, 0, out.data() + 17);
}

}  // namespace

// Arguments: `misuse`, or the instruction sets to leave out.
int main(int count, char** arguments) {
    if (count == 2 && std::strcmp(arguments[1], "misuse") == 0) return misuse(), 0;
    for (long i = 0; trueroll_isa_at(i) != nullptr; ++i) {
        const std::string name = trueroll_isa_at(i);
        bool wanted = true;
        for (int argument = 1; argument < count; ++argument) wanted = wanted && name != arguments[argument];
        if (!wanted) continue;
        check(trueroll_set_isa(name.c_str()), "not there", name);
        Digest results;
        for (int bfloat16 : {0, 1})
            for (float wild : WILD) {
                const uint64_t found = digest_of(1, bfloat16, wild);
                check(found == digest_of(2, bfloat16, wild), "other bits with two threads", name);
                results.add(&found, sizeof(found));
            }
        call_at_once(name);
#if !defined(__SANITIZE_THREAD__)
        call_after_fork(name);
#endif
        std::printf("%s %016lx\n", name.c_str(), results.value());
    }
}
