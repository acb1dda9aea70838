// A run of layers. A part of kernels.h.

// One layer after the other. `args`: of each one's attention, but for the place of its caches.
template <class T>
void layers(const LayerArgs<T>* layers, long count, AttentionArgs<T> args) {
    const PlannedAttention<T> attention(args);
    for (const LayerArgs<T>* layer = layers; layer != layers + count; ++layer) {
        qkv(layer->qkv);
        args.caches = layer->qkv.caches;
        attention.run();
        linear(layer->o);
        gate_up(layer->gate_up);
        linear(layer->down);
    }
}
