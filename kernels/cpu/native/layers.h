// A run of layers. A part of kernels.h.

// Runs layers one after the other, all on one batch. Its attention is planned anew where a layer's needs another plan.
template <class T>
void layers(const LayerArgs<T>* layer, long count) {
    const LayerArgs<T>* const end = layer + count;
    while (layer != end) {
        AttentionArgs<T> args = layer->attention;
        const PlannedAttention<T> attention(args);
        for (; layer != end && attention.serves(layer->attention); ++layer) {
            qkv(layer->qkv);
            args = layer->attention;
            attention.run();
            linear_add(layer->o, layer->after_mixer);
            gate_up(layer->gate_up);
            linear_add(layer->down, layer->after_mlp);
        }
    }
}
