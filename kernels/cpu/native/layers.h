// A run of layers. A part of kernels.h.

// Norms each head's output and multiplies the result by the SiLU of the gate z.
template <class T>
void norm_and_gate(const DeltaNetArgs<T>& args) {
    const long heads = args.delta_rule.value_heads, V = args.delta_rule.value_dim, count = args.inputs->x.count;
    const T* z = args.inputs[1].out;
    parallel(round_up(count, NORM_ROWS) / NORM_ROWS, [&](long task) {
        for (long i = task * NORM_ROWS * heads; i < smaller(count, (task + 1) * NORM_ROWS) * heads; ++i) {
            T* out = args.delta_rule.out + i * V;
            normalize(out, V, args.norm, out);
            for (long j = 0; j < V; j += LANES) {
                const F gate = load(z + i * V + j, V - j);
                store(out + j, activate<T>(Activation::SILU, gate, load(out + j, V - j)), V - j);
            }
        }
    });
}

template <class T>
void delta_net(const DeltaNetArgs<T>& args) {
    linears(args.inputs, 4);
    convolve(args.convolve);
    delta_rule(args.delta_rule);
    norm_and_gate(args);
}

// `attention`: a plan for `args`. This function replaces `args` by the layer's arguments.
template <class T>
void attend(const LayerArgs<T>& layer, const PlannedAttention<T>& attention, AttentionArgs<T>& args) {
    qkv(layer.qkv);
    args = layer.attention;
    attention.run();
    const long values = layer.qkv.x.count * args.heads * args.caches.head_dim;
    if (layer.qkv.gates != nullptr) gate_mul<T>(layer.qkv.gates, args.out, Activation::SIGMOID, values, args.out);
}

// The steps after a layer's mixer.
template <class T>
void finish_layer(const LayerArgs<T>& layer, RankExchange* ranks) {
    project_back(layer.o, layer.after_mixer, ranks);
    if (layer.has_experts) return mixture(layer.mixture, layer.after_mlp, ranks);
    gate_up(layer.gate_up);
    project_back(layer.down, layer.after_mlp, ranks);
}

// Runs layers one after the other, all on one batch. Attention is planned again for a layer that the current plan does
// not fit. `ranks`: the ranks among which the layers are divided, or null. After `ranks` has failed, all results are
// arbitrary.
template <class T>
void layers(const LayerArgs<T>* layer, long count, RankExchange* ranks) {
    const LayerArgs<T>* const end = layer + count;
    while (layer != end) {
        for (; layer != end && layer->has_delta_net; ++layer)
            delta_net(layer->delta_net), finish_layer(*layer, ranks);
        if (layer == end) return;
        AttentionArgs<T> args = layer->attention;
        const PlannedAttention<T> attention(args);
        for (; layer != end && (layer->has_delta_net || attention.serves(layer->attention)); ++layer) {
            layer->has_delta_net ? delta_net(layer->delta_net) : attend(*layer, attention, args);
            finish_layer(*layer, ranks);
        }
    }
}
