"""Keys of a config.json that decide no logit, whatever their value.

A key is here because of its kind: it tells who saved the checkpoint, how it was trained, how text
was to be generated from it, what the code that runs it returns, or which kernels computed it then.
What any model's computation could depend on, as the parts of a quantised model do, is not.
tests/verifier/cpu/test_inert_keys.py compares transformers' logits with and without them.
"""

# What the libraries and the tools of training note about themselves and the files.
_ORIGIN = {
    "_auto_class",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "auto_map",
    "custom_pipelines",
    "finetuning_task",
    "is_llama_config",
    "model_type",
    "name_or_path",
    "tags",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "unsloth_zoo_version",
}
# Tokenizers and processors, whose own files decide.
_TOKENIZER = {
    "bos_token_id",
    "decoder_start_token_id",
    "feature_extractor_type",
    "mask_token_id",
    "max_sequence_length",
    "model_max_length",
    "pad_token_id",
    "padding_side",
    "processor_class",
    "sep_token_id",
    "tokenizer_class",
    "tokenizer_model_max_length",
    "tokenizer_padding_side",
    "unk_token_id",
}
# How weights are stored, and caches and kernels chosen.
_IMPLEMENTATION = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "dtype",
    "experts_implementation",
    "model_parallel",
    "pretraining_tp",
    "torch_dtype",
    "use_bfloat16",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
    "xla_device",
}
_TRAINING = {
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "classifier_dropout",
    "dropout",
    "embd_pdrop",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "initializer_range",
    "layerdrop",
    "loss_type",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
    "summary_first_dropout",
    "tf_legacy_loss",
    "use_gradient_checkpointing",
}
# What transformers' models return, and heads of other tasks.
_OUTPUTS = {
    "id2label",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "problem_type",
    "return_dict",
    "torchscript",
}
# What older transformers wrote here, and newer ones write into generation_config.json.
GENERATION_KEYS = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_config",
        "cache_implementation",
        "constraints",
        "diversity_penalty",
        "do_sample",
        "dola_layers",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_decoder_ids",
        "forced_eos_token_id",
        "generation_config",
        "generation_kwargs",
        "guidance_scale",
        "length_penalty",
        "low_memory",
        "max_length",
        "max_matching_ngram_size",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "penalty_alpha",
        "prefill_chunk_size",
        "prefix",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "sequence_bias",
        "stop_strings",
        "suppress_tokens",
        "target_lookbehind",
        "task_specific_params",
        "temperature",
        "token_healing",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
        "use_cache",
        "watermarking_config",
    }
)

INERT_KEYS = frozenset(
    # Follows from the other keys of its family.
    {"_sliding_window_pattern"}
    | _ORIGIN
    | _TOKENIZER
    | _IMPLEMENTATION
    | _TRAINING
    | _OUTPUTS
    | GENERATION_KEYS
)

# Values at which other keys are off, beside null, false, and an empty list or object.
OFF_VALUES = {"chunk_size_feed_forward": 0, "full_attn_mod": 1, "interpolate_factor": 1}
# Keys that count when they are false.
ON_BY_DEFAULT = frozenset({"is_causal"})


def is_inert(key: str, value: object) -> bool:
    """Whether a key that no family knows decides no logit at this value."""
    if key in INERT_KEYS or value is None or value in ([], {}):
        return True
    if type(value) is int:
        return OFF_VALUES.get(key) == value
    return value is False and key not in ON_BY_DEFAULT
