"""Parses the native `/generate` body, for HTTP and for the offline `Engine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from sglang_minima.entrypoints.unsupported import EngineExtras
from sglang_minima.sampling_params import PARAMETER_NAMES, InvalidRequest, SamplingParams
from sglang_minima.tokenization.inputs import Bounds, PromptInput, namespace_of

T = TypeVar("T")

MAX_TOP_LOGPROBS = 256
_SAMPLING_NAMES = frozenset(PARAMETER_NAMES) | {"max_tokens"}
MAX_RID_LENGTH = 256


class GenerateBody(EngineExtras, kw_only=True):
    """Fields of the body; scalars broadcast over a batch, lists give one value a prompt.

    Unknown keys are ignored: clients and routers add many.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: int | list[int] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None


@dataclass(frozen=True)
class GenerateCall:
    """One checked `/generate` call."""

    prompts: list[PromptInput]
    group: str | None
    """The rid that the client gave to the whole batch."""
    single: bool
    """The reply is one object, not a list."""
    stream: bool


def convert_body(raw: Any, body_type: type[T], bounds: Bounds | None = None) -> T:
    """Checks the types of a decoded JSON body, after its size where that is bounded.

    Raises:
        InvalidRequest: not an object, too large, or a field of the wrong type.
    """
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    if bounds is not None:
        bounds.check(raw)
    try:
        return msgspec.convert(raw, body_type)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None


def parse_generate(raw: Any, vocab_size: int, bounds: Bounds) -> GenerateCall:
    """Checks a decoded `/generate` body.

    Raises:
        InvalidRequest: with one sentence for the client.
    """
    body = convert_body(raw, GenerateBody, bounds)
    body.refuse_extras()
    for name in raw:
        if raw[name] is not None and name in _SAMPLING_NAMES:
            # Ignored, it would change the answer without a word.
            raise InvalidRequest(f"{name} belongs into sampling_params")
    prompts, batch = _prompts(body)
    size = len(prompts)
    rids, group = _rids(body.rid, size, batch)
    if isinstance(body.sampling_params, list):
        values = _spread("sampling_params", body.sampling_params, size, batch)
        sampling = [SamplingParams.from_dict(value, vocab_size) for value in values]
    else:
        sampling = [SamplingParams.from_dict(body.sampling_params, vocab_size)] * size
    logprobs = _spread("return_logprob", body.return_logprob, size, batch)
    starts = _spread("logprob_start_len", body.logprob_start_len, size, batch)
    tops = _spread("top_logprobs_num", body.top_logprobs_num, size, batch)
    priorities = _spread("priority", body.priority, size, batch)
    extra_keys = _spread("extra_key", body.extra_key, size, batch)
    salts = _spread("cache_salt", body.cache_salt, size, batch)
    chosen = _token_ids_logprob(body.token_ids_logprob, size, batch)
    inputs = [
        PromptInput(
            prompt=prompts[index],
            sampling=sampling[index],
            rid=rids[index],
            salt=namespace_of(extra_keys[index], salts[index]),
            priority=check_range("priority", priorities[index] or 0, -(1 << 31), 1 << 31),
            return_logprob=bool(logprobs[index]),
            logprob_start_len=check_range(
                "logprob_start_len", -1 if starts[index] is None else starts[index], -1, 1 << 40
            ),
            top_logprobs_num=check_range("top_logprobs_num", tops[index] or 0, 0, MAX_TOP_LOGPROBS),
            token_ids_logprob=chosen[index],
            return_text_in_logprobs=bool(body.return_text_in_logprobs),
        )
        for index in range(size)
    ]
    single = not batch and inputs[0].sampling.n == 1
    return GenerateCall(inputs, group, single, bool(body.stream))


def check_range(name: str, value: int, low: int, high: int) -> int:
    """`value`, when it lies in [low, high]."""
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}]")
    return value


def check_rid(rid: str) -> str:
    """`rid`, when it is a usable request id."""
    if not 0 < len(rid) <= MAX_RID_LENGTH:
        raise InvalidRequest(f"rid must have 1 to {MAX_RID_LENGTH} characters")
    return rid


def token_prompts(ids: list[int | list[int]], name: str) -> tuple[list[list[int]], bool]:
    """Splits a list of ids, or a list of such lists, into prompts; True for a batch."""
    nested = [item for item in ids if isinstance(item, list)]
    if not nested:
        return [[item for item in ids if isinstance(item, int)]], False
    if len(nested) < len(ids):
        raise InvalidRequest(f"{name} mixes token ids and lists of token ids")
    return nested, True


def _prompts(body: GenerateBody) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether they came as a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids")
    prompts: list[str | list[int]]
    if body.input_ids is not None:
        ids, batch = token_prompts(body.input_ids, "input_ids")
        prompts = [*ids]
    elif isinstance(body.text, str):
        prompts, batch = [body.text], False
    else:
        prompts, batch = [*(body.text or [])], True
        if not prompts:
            raise InvalidRequest("text is an empty list")
    if not all(prompts):
        raise InvalidRequest("the prompt is empty")
    return prompts, batch


def _rids(
    rid: str | list[str] | None, size: int, batch: bool
) -> tuple[list[str | None], str | None]:
    """The rid of each prompt, and the batch's common rid."""
    if isinstance(rid, str) and batch:
        check_rid(rid)
        return [f"{rid}_{index}" for index in range(size)], rid
    rids = _spread("rid", rid, size, batch)
    for value in rids:
        if value is not None:
            check_rid(value)
    return rids, None


def _spread(name: str, value: Any, size: int, batch: bool) -> list[Any]:
    """One value a prompt, from a scalar or from a list of the batch's length."""
    if not isinstance(value, list):
        return [value] * size
    if not batch and len(value) != 1:
        raise InvalidRequest(f"{name} is a list, but there is one prompt")
    if len(value) != size:
        raise InvalidRequest(f"{name} has {len(value)} entries for {size} prompts")
    return value


def _token_ids_logprob(value: Any, size: int, batch: bool) -> list[list[int] | None]:
    """A flat list of ids holds for all prompts; a nested one has a list (or null) a prompt."""
    if not value:
        return [None] * size
    if all(isinstance(item, int) for item in value):
        lists = [value] * size
    elif any(isinstance(item, int) for item in value):
        raise InvalidRequest("token_ids_logprob mixes token ids and lists of token ids")
    else:
        lists = _spread("token_ids_logprob", value, size, batch)
    # Each id costs an entry at every position of the prompt.
    if max(len(ids or []) for ids in lists) > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"token_ids_logprob has more than {MAX_TOP_LOGPROBS} ids")
    return lists
