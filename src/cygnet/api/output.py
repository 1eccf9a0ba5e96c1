"""From token ids to text: incremental decoding, stop strings, log probabilities that keep step with the text."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cygnet.api.tokenization import Tokenizer
from cygnet.base.messages import PositionLogprobs, RequestOutput


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the tokens of a sequence become its text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether the stop string that ends the text is part of it."""
    skip_special_tokens: bool = True
    continues_text: bool = False
    """Whether the tokens go on from the prompt's text, so that a leading space is part of it."""
    min_tokens: int = 0
    """Stop strings are not looked for in the text of the first `min_tokens` tokens."""
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token and where in the text (characters) the token begins."""

    position: PositionLogprobs
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine output adds to a choice. `finish_reason` is `stop`, `length` or, not yet finished, `None`."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token, that ended the text."""

    @property
    def visible(self) -> bool:
        """Whether a client would notice it."""
        return bool(self.text or self.logprobs or self.finish_reason)


class _Automaton:
    """Knuth-Morris-Pratt matcher of one string. `state` = length of the longest suffix of the text so far that begins
    the pattern; constant amortised time per character, whatever the pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._failure = [0] * (len(pattern) + 1)
        k = 0
        for i in range(1, len(pattern)):
            while k and pattern[i] != pattern[k]:
                k = self._failure[k]
            k += pattern[i] == pattern[k]
            self._failure[i + 1] = k

    def step(self, char: str) -> bool:
        """Take one character; true when the pattern ends here (call no more after that)."""
        k = self.state
        while k and char != self.pattern[k]:
            k = self._failure[k]
        self.state = k + (char == self.pattern[k])
        return self.state == len(self.pattern)


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, wherever the pieces are cut.

    The stop string that *ends* first wins, the longest of those that end together; so the result does not depend on how
    the text is cut. Invariant: `held` is the longest end of the text that begins some stop string; all before
    it has been released.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include = include_stop
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string found (then nothing may be pushed any more)."""
        for i, char in enumerate(text):
            hits = [a.pattern for a in self._automata if a.step(char)]
            if hits:
                stop = max(hits, key=len)
                upto = (self.held + text[: i + 1]) if self._include else (self.held + text[: i + 1])[: -len(stop)]
                self.held = ""
                return upto, stop
        pending = self.held + text
        keep = max((a.state for a in self._automata), default=0)
        self.held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        """What was withheld, at the end of a text without stop string."""
        held, self.held = self.held, ""
        return held


class OutputProcessor:
    """Text of one sequence. Feed it the engine's outputs in order until a delta has a `finish_reason`.

    The result, token count included, is the same however the engine groups tokens into outputs.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._stream = tokenizer.stream(
            skip_special_tokens=options.skip_special_tokens, continues_text=options.continues_text
        )
        self._options = options
        self._matcher = StopMatcher(options.stop, include_stop=options.include_stop)
        self._decoded = 0
        self._released = 0
        self._seen = 0
        self._waiting: deque[TokenLogprobs] = deque()

    def push(self, output: RequestOutput) -> Delta:
        """What `output` adds. `finish_reason` of the engine other than stop and length is the caller's to handle."""
        ids = output.token_ids if output.stop_token_id is None else output.token_ids[:-1]
        one_by_one = bool(self._options.stop) or self._options.logprobs
        text: list[str] = []
        for i in range(len(ids) if one_by_one else min(1, len(ids))):
            piece = self._stream.push(ids[i : i + 1] if one_by_one else ids)
            if output.logprobs is not None and self._options.logprobs:
                self._waiting.append(TokenLogprobs(output.logprobs[i], self._decoded))
            self._seen += 1 if one_by_one else len(ids)
            released, stop = self._match(piece)
            text.append(released)
            if stop is not None:
                return self._delta(text, i + 1, "stop", stop)
        if output.finish_reason is None:
            return self._delta(text, len(ids))
        released, stop = self._match(self._stream.flush())
        text.append(released)
        if stop is not None:
            return self._delta(text, len(output.token_ids), "stop", stop)
        text.append(self._matcher.flush())
        return self._delta(text, len(output.token_ids), output.finish_reason, output.stop_token_id)

    def _match(self, piece: str) -> tuple[str, str | None]:
        self._decoded += len(piece)
        if not self._options.stop or self._seen <= self._options.min_tokens:
            return piece, None
        return self._matcher.push(piece)

    def _delta(
        self, text: list[str], num_tokens: int, finish: str | None = None, stop_reason: str | int | None = None
    ) -> Delta:
        joined = "".join(text)
        self._released += len(joined)
        cut_by_string = isinstance(stop_reason, str)
        ready: list[TokenLogprobs] = []
        while self._waiting:
            if self._waiting[0].offset >= self._released and (finish is None or cut_by_string):
                break  # its text is withheld, or beyond the stop string
            ready.append(self._waiting.popleft())
        return Delta(joined, tuple(ready), num_tokens, finish, stop_reason)
