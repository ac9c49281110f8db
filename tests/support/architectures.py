"""Every architecture of transformers' mappings of sequence and image classifiers, built small."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

TASK_OF = {
    "bert": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "vit": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
VOCABULARY, LENGTH, IMAGE = 200, 64, 32
SPECIAL = {
    "pad_token_id": 0, "unk_token_id": 1, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3,
    "eos_token_id": 3, "mask_token_id": 4, "decoder_start_token_id": 2,
}  # fmt: skip
# Small values for arguments of this name, whichever configuration has it.
SMALL: dict[str, Any] = {
    **SPECIAL,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "n_embed"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer"), 2),
    **dict.fromkeys(("num_layers", "num_decoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_local_experts", "num_experts"), 4),
    "n_routed_experts": 4, "num_experts_per_tok": 2,
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("d_inner", "n_inner", "hidden_dim", "moe_intermediate_size", "dff"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "ffn_dim"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "attention_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), LENGTH),
    "n_ctx": LENGTH, "seq_length": LENGTH, "vocab_size": VOCABULARY, "image_size": IMAGE,
}  # fmt: skip

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_d_state": 4, "mamba_expand": 2, "use_mamba_kernels": False}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
HEADS = {"num_attention_heads": [1, 2, 2, 4]}
WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": IMAGE, "patch_size": 8,
}  # fmt: skip
TEXT = {**VISION, **SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
TWO = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 32}
PATCH = {"patch_size": 8}
LATENT = {
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
    "kv_lora_rank": 8, "q_lora_rank": 16, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
# What the rules above do not fit.
OWN: dict[str, dict[str, Any]] = {
    "axk1": LATENT, "axk2": LATENT, "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    "big_bird": {"block_size": 4},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "jamba": {**MAMBA, "attn_layer_offset": 1, "attn_layer_period": 2},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 4, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 16},
    "markuplm": {"max_xpath_tag_unit_embeddings": 16, "max_xpath_subs_unit_embeddings": 16,
                 "xpath_unit_hidden_size": 8, "max_depth": 4, "tag_pad_id": 15, "subs_pad_id": 15},
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 4},
    "reformer": {"axial_pos_embds": False, "hash_seed": 0,
                 "attn_layers": ["local", "lsh"], "num_buckets": 4, "feed_forward_size": 64,
                 "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16},
    "roc_bert": {"shape_vocab_size": VOCABULARY, "pronunciation_vocab_size": VOCABULARY,
                 "shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**MAMBA, "num_hidden_layers": 4,
              "layers_block_type": ["linear_attention", "hybrid"] * 2,
              "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 2},
    "zamba2": {**MAMBA, "layers_block_type": ["linear_attention", "hybrid"],
               "n_mamba_heads": 4, "mamba_headdim": 16, "attention_head_dim": 16,
               "attention_hidden_size": 64, "chunk_size": 16, "adapter_rank": 4},
    "gemma3": {"text_config": {**TEXT, "num_key_value_heads": 4, "head_dim": 8},
               "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 5},
    "t5gemma": {"encoder": {**TEXT, "num_key_value_heads": 4, "head_dim": 8},
                "decoder": {**TEXT, "num_key_value_heads": 4, "head_dim": 8}},
    "bit": {**STAGES, "embedding_size": 16, "num_groups": 4},
    "convnext": STAGES, "convnextv2": STAGES,
    "cvt": {"embed_dim": [16, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "donut-swin": WINDOWS, "swin": WINDOWS, "swinv2": WINDOWS,
    "focalnet": {"embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2],
                 "focal_windows": [3, 3], "hidden_sizes": [16, 32]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "hgnet_v2": {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 32],
                 "stage_mid_channels": [8] * 4, "stage_out_channels": [16, 16, 32, 32],
                 "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [2] * 4,
                 "hidden_sizes": [16, 16, 32, 32], "embedding_size": 8, "depths": [1] * 4},
    "hiera": {"image_size": [IMAGE, IMAGE], "embed_dim": 16, "depths": [1, 1, 1],
              "num_heads": [1, 2, 4], "masked_unit_attention": [True, True, False],
              "num_query_pool": 2, "masked_unit_size": [4, 4]},
    "levit": {"hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 2, 4], "depths": [1] * 3,
              "key_dim": [8] * 3, "image_size": 64},
    "mobilenet_v1": {"depth_multiplier": 0.25}, "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevit": {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
                  "image_size": 64},
    "mobilevitv2": {"width_multiplier": 0.25, "image_size": 64, "n_attn_blocks": [1, 1, 1]},
    "perceiver": {"num_latents": 4, "d_latents": 32, "num_self_attends_per_block": 1,
                  "qk_channels": 32, "v_channels": 32, "num_self_attention_heads": 4,
                  "num_cross_attention_heads": 4},
    "poolformer": STAGES,
    "pp_lcnet": {"scale": 0.25, "class_expand": 64},
    "pvt": {**STAGES, **HEADS}, "pvt_v2": {**STAGES, **HEADS}, "segformer": {**STAGES, **HEADS},
    "regnet": {**STAGES, "embedding_size": 16, "groups_width": 8},
    "resnet": {**STAGES, "embedding_size": 16},
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32]},
    "textnet": {"hidden_sizes": [8, 8, 16, 16, 32], "stem_out_channels": 8},
    "clip": TWO, "metaclip_2": TWO, "siglip": TWO, "siglip2": TWO,
    "beit": PATCH, "data2vec-vision": PATCH, "deit": PATCH, "dinov2": PATCH, "ijepa": PATCH,
    "dinov2_with_registers": PATCH, "vit": PATCH, "vit_msn": PATCH,
}  # fmt: skip


def names(script: str) -> list[str]:
    """Every architecture of a task."""
    return sorted(name for name in TASK_OF[script] if name in CONFIG_MAPPING)


def small(name: str, **more: Any) -> Any:
    """A configuration of this architecture with few weights."""
    kind = CONFIG_MAPPING[name]
    known = inspect.signature(kind.__init__).parameters
    values = {k: v for k, v in SMALL.items() if k in known}
    if OWN.get(name, {}).keys() & {"text_config", "encoder"}:
        values = {}  # it consists of other configurations
    return kind(**{**values, **SPECIAL, **OWN.get(name, {}), **more})


def side_of(config: Any) -> int:
    """Of the images that a model of this configuration is for."""
    config = getattr(config, "vision_config", None) or config
    side = getattr(config, "image_size", IMAGE)
    return int(side) if isinstance(side, int) else int(side[0])
