// A run of layers. A part of kernels.h.

// Runs layers one after the other. `args`: the attention of all of them; the memory of its caches is each layer's own.
template <class T>
void layers(const LayerArgs<T>* first, long count, AttentionArgs<T> args) {
    const PlannedAttention<T> attention(args);
    for (const LayerArgs<T>* layer = first; layer != first + count; ++layer) {
        qkv(layer->qkv);
        args.caches = layer->qkv.caches;
        attention.run();
        linear(layer->o);
        gate_up(layer->gate_up);
        linear(layer->down);
    }
}
