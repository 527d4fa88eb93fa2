"""Bodies of the OpenAI routes, and how they become prompts with sampling parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_minima.entrypoints.generate_input import check_range, check_rid
from sglang_minima.entrypoints.response_format import format_grammar, guided_grammar
from sglang_minima.entrypoints.unsupported import EngineExtras
from sglang_minima.grammar.spec import KINDS
from sglang_minima.sampling_params import InvalidRequest, SamplingParams
from sglang_minima.tokenization.inputs import PromptInput, namespace_of

MAX_COMPLETION_LOGPROBS = 20


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonBody(EngineExtras, kw_only=True):
    """Fields of both routes; unknown keys are ignored, null means default."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    def check_supported(self, names: tuple[str, ...] = ()) -> None:
        """Raises `InvalidRequest` for what cannot be honoured and must not be ignored."""
        self.refuse_extras()
        for name in names:
            if getattr(self, name) not in (None, False, "", [], {}):
                raise InvalidRequest(f"{name} is not supported yet")

    def sampling(
        self, max_tokens: int, vocab_size: int, structural_tag: str | None = None
    ) -> SamplingParams:
        """The sampling parameters of every prompt of the call; `structural_tag` is the grammar of
        the call itself, beside which a client can ask for no other."""
        values = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": self.min_tokens,
            "sampling_seed": self.seed,
        } | {name: getattr(self, name) for name in _SAME_NAME}
        if structural_tag is not None:
            if any(getattr(self, kind) for kind in KINDS):
                raise InvalidRequest(f"forced tool calls exclude {', '.join(KINDS)}")
            values["structural_tag"] = structural_tag
        guided = {kind: getattr(self, f"guided_{kind}") for kind in _GUIDED}
        grammars = (
            format_grammar(self.response_format),
            guided_grammar(guided, self.structured_outputs),
        )
        try:
            sampling = SamplingParams.from_dict(values, vocab_size)
            for grammar in grammars:
                sampling = sampling.with_grammar(grammar)
            return sampling
        except InvalidRequest as error:
            message = str(error).removeprefix("sampling_params").lstrip(".: ")
            for ours, theirs in _RENAMED:
                message = message.replace(ours, theirs)
            raise InvalidRequest(message) from None

    def prompt_input(
        self,
        prompt: str | list[int],
        rid: str,
        sampling: SamplingParams,
        top_logprobs: int | None,
        echo: bool = False,
    ) -> PromptInput:
        """One prompt of the call; `top_logprobs` is None when no log-probabilities are wanted."""
        return PromptInput(
            prompt=prompt,
            sampling=sampling,
            rid=rid,
            salt=namespace_of(self.extra_key, self.cache_salt),
            priority=check_range("priority", self.priority or 0, -(1 << 31), 1 << 31),
            return_logprob=top_logprobs is not None,
            logprob_start_len=0 if echo else -1,
            top_logprobs_num=top_logprobs or 0,
            return_text_in_logprobs=True,
        )

    def request_id(self, prefix: str, fresh: str) -> str:
        """The client's rid, or a new id; it is also the id of the reply."""
        return f"{prefix}-{fresh}" if self.rid is None else check_rid(self.rid)


_GUIDED = ("json", "regex", "choice", "grammar")
_SAME_NAME = (
    *KINDS,
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_RENAMED = (
    ("max_new_tokens", "max_tokens"),
    ("min_new_tokens", "min_tokens"),
    ("sampling_seed", "seed"),
)


class CompletionBody(CommonBody, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        self.check_supported(("suffix",))
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is only supported when it equals n")
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, MAX_COMPLETION_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if not kinds:
            raise InvalidRequest("prompt is an empty list")
        if len(kinds) > 1:
            raise InvalidRequest("prompt mixes texts, token ids and lists of token ids")
        if kinds == {int}:
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]
