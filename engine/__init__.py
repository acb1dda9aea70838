"""The generation engine: prefix cache, scheduler, model runner and sampler, joined by `engine.engine`."""
