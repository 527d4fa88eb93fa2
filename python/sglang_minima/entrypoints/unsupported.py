"""Fields that clients of larger servers know, and that must not be ignored when they are set."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_minima.sampling_params import InvalidRequest


class EngineExtras(msgspec.Struct, kw_only=True):
    """Base of every request body: what this engine does not do. Null and empty values are fine:
    routers and clients send them unasked."""

    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None

    def refuse_extras(self) -> None:
        """Raises `InvalidRequest` when one of these fields is set."""
        for name in EngineExtras.__struct_fields__:
            if is_set(getattr(self, name)):
                raise InvalidRequest(f"{name} is not supported by this server")


def is_set(value: Any) -> bool:
    """False for null, false, and what is empty or holds nothing but such values."""
    if isinstance(value, list):
        return any(is_set(item) for item in value)
    return value is not None and value is not False and value != "" and value != {}
