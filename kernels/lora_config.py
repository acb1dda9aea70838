"""The fields of PEFT's `LoraConfig`, sorted by their effect on the computation. Imports nothing.

Plain LoRA adds scale * B A to a weight (`Backend.merge`). A trainer reads these fields in a live PEFT model
(`adapters`). A worker reads the same fields in the config of a saved adapter.
"""

PLAIN = {"peft_type": "LORA", "bias": "none"}
"""Fields that must have the value given here in plain LoRA."""
EMPTY = ("lora_bias", "use_dora", "layer_replication", "trainable_token_indices", "target_parameters")
"""Fields that must be empty in plain LoRA, since any entry changes the computation."""
USED = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"})
"""Fields that set the ranks, the scales and the first values of A and B. Some ways to initialize A and B also change
the base weights.
"""
KINDS = frozenset(
    {
        *("modules_to_save", "fan_in_fan_out", "ensure_weight_tying", "megatron_config", "alora_invocation_tokens"),
        *("use_qalora", "velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"),
    }
)
"""Fields that enable modules with their own classes or variants in PEFT. In a live model, the modules show whether
these fields are used. In the config of a saved adapter, each of these fields must be empty.
"""
INERT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("runtime_config", "megatron_core", "qalora_group_size"),
    }
)
"""Fields that do not change the computation with given A and B: they describe the model, select the adapted modules, or
configure an initialization, the storage, or a feature that a field of `KINDS` enables.
"""
