"""Chat templates: Jinja texts that turn a list of messages into a prompt. Imports neither torch nor transformers.

Templates come with a model, so they run sandboxed, and with the helpers that Hugging Face's templates count on.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cygnet.base.errors import InvalidRequestError, ModelLoadError

Message = Mapping[str, Any]

GEMMA_TURNS = r"""
{%- if messages and messages[0]['role'] in ('system', 'developer') -%}
    {%- set preface = messages[0]['content'] | trim ~ '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set preface = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if turn['role'] not in ('user', 'assistant') -%}
        {{- raise_exception("role '" ~ turn['role'] ~ "' is not one of 'user', 'assistant' and a first 'system'") -}}
    {%- elif (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception("turns must alternate between 'user' and 'assistant', beginning with 'user'") -}}
    {%- endif -%}
    {{- '<start_of_turn>' ~ ('user' if turn['role'] == 'user' else 'model') ~ '\n' -}}
    {{- (preface if loop.first else '') ~ turn['content'] | trim ~ '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\n' -}}
{%- endif -%}
"""
"""Gemma's own turns, for files that come without a template. The system message opens the first user turn."""

_PROBE = "cygnet-probe"


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets in some templates; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would reach the model as \u003c.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


_ENVIRONMENT = _environment()


class ChatTemplate:
    """A compiled template. `tokens` are the names it may use: `bos_token`, `eos_token`, ... Safe to share by threads.

    `ModelLoadError` (naming `origin`) if the text is no valid Jinja.
    """

    def __init__(self, text: str, tokens: Mapping[str, str], *, origin: str) -> None:
        self.text = text
        self.tokens = dict(tokens)
        try:
            self._template = _ENVIRONMENT.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template of {origin}, line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `template_kwargs` are further names for the template, such as `enable_thinking`.

        Where the template takes only strings as content, lists of text parts are joined by newlines.
        Raises `InvalidRequestError` if the template refuses the messages or fails on them.
        """
        names: dict[str, Any] = {"tools": tools or None, "documents": None, **self.tokens}
        for key, value in (template_kwargs or {}).items():
            if key in ("messages", "tools", "add_generation_prompt"):
                raise InvalidRequestError(
                    f"{key!r} can't be given as a template argument; it has a field of its own",
                    param="chat_template_kwargs",
                )
            names[key] = value
        shown = list(messages) if self._takes_parts else [_join_parts(message) for message in messages]
        try:
            return self._template.render(messages=shown, add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:  # whatever template code can raise on the caller's data is the caller's to mend
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(f"the chat template refuses these messages: {reason}", param="messages") from None

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether content may be a list of parts: found by trying, since templates don't say."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            out = self._template.render(
                messages=[message], tools=None, documents=None, add_generation_prompt=False, **self.tokens
            )
        except Exception:
            return False
        return _PROBE in out and "'text'" not in out and '"text"' not in out


def _join_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(f"this model takes text only, not content of type {kind!r}", param="messages")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
