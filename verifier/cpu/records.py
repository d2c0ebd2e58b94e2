"""What the kernel of a forward pass is passed: records of addresses, sizes and factors.

Python fills them from arrays that it owns and keeps alive (`decoder.py`); kernels read them by
name. Addresses are int64; rows of activations are `*_row` bytes apart.
"""

import numpy as np

MATRIX = np.dtype(
    [
        # [N / 16, depth, 16]; in groups a table of parts (`products`). Of experts all in a row.
        ("weights", np.int64),
        ("num_parts", np.int64),
        ("depth", np.int64),
        ("num_blocks", np.int64),
        ("scales", np.int64),  # [N / 16 * 16], or 0
        ("bias", np.int64),  # likewise
    ]
)
# Of one layer. Addresses of norms are 0 where there is none.
LAYER = np.dtype(
    [
        ("input_norm", np.int64),
        ("query_norm", np.int64),
        ("key_norm", np.int64),
        ("value_norm", np.int64),
        ("attention_output_norm", np.int64),
        ("mlp_norm", np.int64),
        ("mlp_output_norm", np.int64),
        ("qkv", MATRIX),
        ("output", MATRIX),
        ("gate_up", MATRIX),  # of experts: of expert 0
        ("down", MATRIX),
        ("router", MATRIX),  # num_blocks 0: no experts
        ("sinks", np.int64),  # [num_heads], or 0
        ("shared_gate", np.int64),  # [hidden_size], or 0: no expert of all tokens
        ("shared_gate_up", MATRIX),
        ("shared_down", MATRIX),
        ("router_norm", np.int64),  # [hidden_size], or 0: no mixture beside an MLP
        ("experts_input_norm", np.int64),
        ("experts_output_norm", np.int64),
        ("shared_output_norm", np.int64),
        ("expert_factors", np.int64),  # [num_experts]
        ("convolution", np.int64),  # [kernel_size, channels], or 0: no gated delta net
        ("decay_rate", np.int64),  # [num_key_heads, heads_per_key / 16 * 16]
        ("decay_bias", np.int64),  # likewise
        ("delta_norm", np.int64),  # [value_dim]
        ("states", np.int64),  # [num_key_heads * heads_per_key, value_dim / 16, key_dim, 16]
        ("recent", np.int64),  # [num_key_heads, kernel_size - 1 + max_drafts, raw_size]
        ("input_gate", MATRIX),  # num_blocks 0: the layer has no inputs of its own
        ("input_down", MATRIX),
        ("update_norm", np.int64),  # of the layer's last update
        ("scale", np.float32),  # of the hidden state after that
        ("num_kv_heads", np.int64),
        ("head_dim", np.int64),
        ("query_bytes", np.int64),  # from query to query
        ("sliding_window", np.int64),
        ("rotary", np.int64),
        ("num_pairs", np.int64),  # of that rotary embedding
        ("has_kv", np.int64),  # whether it writes to the cache
        ("cache", np.int64),  # K/V of block 0
        ("block_bytes", np.int64),  # of one block there
        ("tasks", np.int64),  # int64 [n, 3]: sequence, first row, rows; the number is in front
    ]
)
# Of the whole model, and the buffers that a forward pass works in.
MODEL = np.dtype(
    [
        ("num_layers", np.int64),
        ("hidden_size", np.int64),
        ("num_heads", np.int64),
        ("norm_eps", np.float32),
        ("attention_scaling", np.float32),
        ("attention_softcap", np.float32),
        ("logits_softcap", np.float32),
        ("embedding_scale", np.float32),
        ("norms_projections", np.int64),  # whether norms of queries and keys are of all heads
        ("largest_kv", np.float32),  # that is finite in the cache's type
        ("activation", np.int64),
        ("num_experts", np.int64),
        ("num_experts_per_token", np.int64),
        ("normalises_experts", np.int64),
        ("per_layer_size", np.int64),  # of a token's input of one layer
        ("per_layer_embeddings", np.int64),  # [V, all layers' inputs]; packed: a table of parts
        ("per_layer_embeddings_are_packed", np.int64),
        ("per_layer_projection", MATRIX),  # num_blocks 0: layers have no inputs of their own
        ("per_layer_norm", np.int64),
        ("per_layer_inputs", np.int64),  # [T, all layers' inputs]
        ("per_layer_row", np.int64),
        ("embeddings", np.int64),
        ("embeddings_are_packed", np.int64),
        ("final_norm", np.int64),
        ("head", MATRIX),
        ("num_rotaries", np.int64),
        ("num_pairs", np.int64),  # of the longest rotary embedding; others end with unused ones
        ("inv_freq", np.int64),  # [2, num_rotaries, num_pairs]: of short sequences, of long ones
        ("rotary_scaling", np.int64),  # [num_rotaries]
        ("hidden", np.int64),  # [T, hidden_size], the residual stream
        ("hidden_row", np.int64),  # also of `normed` and `update`
        ("normed", np.int64),
        ("update", np.int64),
        ("qkv", np.int64),
        ("qkv_row", np.int64),
        ("queries", np.int64),  # [num_kv_heads, T * group, head_dim] of a layer
        ("attended", np.int64),
        ("attended_row", np.int64),
        ("gate_up", np.int64),
        ("gate_up_row", np.int64),
        ("gated", np.int64),
        ("gated_row", np.int64),
        ("rounded", np.int64),  # inputs of products in groups (`group_panels`), by token or place
        ("rounded_row", np.int64),
        ("cos_sin", np.int64),  # [num_rotaries, T, 2, num_pairs]: cos, sin
        ("num_groupings", np.int64),
        ("groupings", np.int64),  # int64 [num_groupings, 2]: query heads of a K/V head, its tasks
        ("scratch", np.int64),  # of each thread
        ("scratch_bytes", np.int64),
        ("routing", np.int64),  # [T, num_experts / 16 * 16]
        ("routing_row", np.int64),
        ("chosen", np.int64),  # int64 [T, num_experts_per_token, 2]: expert, place
        ("chosen_weights", np.int64),  # [T, num_experts_per_token]
        ("expert_starts", np.int64),  # int64 [num_experts + 1]
        ("expert_rows", np.int64),  # [T * num_experts_per_token, hidden_size], by place
        ("expert_updates", np.int64),  # the same: what the experts make of these
        ("shared_updates", np.int64),  # [T, hidden_size], of an MLP beside the experts
        ("shared_factors", np.int64),  # [T], of the expert of all tokens
        # Of gated delta nets, see `kernels.delta`.
        ("num_key_heads", np.int64),
        ("heads_per_key", np.int64),
        ("key_dim", np.int64),
        ("value_dim", np.int64),
        ("kernel_size", np.int64),
        ("tap_bytes", np.int64),  # from one input's convolution weights to the next one's
        ("raw_size", np.int64),
        ("tile_rows", np.int64),
        ("max_drafts", np.int64),
        ("places", np.int64),
        ("state_slot_bytes", np.int64),  # from slot to slot
        ("recent_slot_bytes", np.int64),
        ("marks", np.int64),
        ("num_threads", np.int64),
    ]
)
# Of one forward pass.
STEP = np.dtype(
    [
        ("num_tokens", np.int64),  # T
        ("num_rows", np.int64),  # R
        ("num_sequences", np.int64),  # B
        ("token_ids", np.int64),  # int64 [T]
        ("positions", np.int64),  # int64 [T]
        ("uses_long_rope", np.int64),  # int64 [T]
        ("slots", np.int64),  # int64 [T]
        ("rows", np.int64),  # int64 [R]
        ("query_offsets", np.int64),  # int64 [B + 1]
        ("lengths", np.int64),  # int64 [B]
        ("tables", np.int64),  # int32, of all sequences
        ("table_offsets", np.int64),  # int64 [B]
        ("states", np.int64),  # int64 [B, 4], see `kernels.delta`
        ("save_offsets", np.int64),  # int64 [B + 1], of `saves`
        ("saves", np.int64),  # int64 [n, 2]: after how many rows states are copied, to which slot
        ("is_finite", np.int64),  # uint8 [T]
        ("last_hidden", np.int64),  # [R, hidden_size], after the last norm; `hidden_row` apart
        ("logits", np.int64),
        ("logits_row", np.int64),
    ]
)
