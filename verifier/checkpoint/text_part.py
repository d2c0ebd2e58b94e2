"""The text part of a multimodal checkpoint, as a text model's configuration and tensors.

What reads images and sound is left out, and none of its weights are read. Where only text goes in,
rotary embeddings of several sections are plain ones, since the positions of all sections agree.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from verifier.checkpoint.stored_tensor import StoredTensor

_KEY = "text_config"
# Model type of the whole → of its text part; also by the name that a part has for itself.
_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "llava": "llama",
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), "qwen3"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "qwen3_5_text"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "qwen3_5_moe_text"),
}
# Model types of parts whose wholes are untied if they do not tell.
_UNTIED = "qwen3_5"
# What the whole tells of its part, too.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
# What a part tells of media, where it is not apart from the whole.
_MEDIA = ("image_", "video_", "vision_")
_SECTIONS = ("mrope_section", "mrope_interleaved")
_PREFIXES: Mapping[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_UNUSED = tuple(
    prefix + name
    for prefix in ("", "model.")
    for name in (
        "audio_tower.",
        "embed_audio.",
        "embed_vision.",
        "multi_modal_projector.",
        "vision_embedder.",
        "vision_tower.",
        "visual.",
    )
)


def text_config(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a config.json, or the text model's in it."""
    whole = str(content.get("model_type"))
    if whole not in _TYPES:
        return content
    own = content.get(_KEY)
    if not isinstance(own, dict):
        own = {key: value for key, value in content.items() if not key.startswith(_MEDIA)}
    kind = str(own.get("model_type", whole))
    part = {**own, "model_type": _TYPES.get(kind, kind)}
    # Of the whole's class, or none.
    part.pop("architectures", None)
    part |= {key: content[key] for key in _SHARED if key in content}
    # The part's own is not heeded.
    is_tied = not part["model_type"].startswith(_UNTIED)
    part["tie_word_embeddings"] = content.get("tie_word_embeddings", is_tied)
    for key in ("rope_scaling", "rope_parameters"):
        rope = part.get(key)
        if isinstance(rope, dict) and not rope.keys().isdisjoint(_SECTIONS):
            rope = {name: value for name, value in rope.items() if name not in _SECTIONS}
            rope |= {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
            part[key] = rope
    return part


def is_text_part(names: Mapping[str, Any]) -> bool:
    """Whether tensors of these names are of more than a text model."""
    return any(name.startswith((*_PREFIXES, *_UNUSED)) for name in names)


def text_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Those of the text model, by its names."""
    result = {}
    for name, tensor in tensors.items():
        if name.startswith(_UNUSED):
            continue
        prefix = next(filter(name.startswith, _PREFIXES), "")
        own = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        result[own] = dataclasses.replace(tensor, name=own)
    return result
