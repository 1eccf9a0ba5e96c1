"""What every engine under test answers, one JSON object per line; run by the scripts beside this file, not by hand.

Standard library only: each engine lives in an environment of its own.

    {"op": "prefill", "prompt": [ids]}                       seconds until the first token, nothing cached
    {"op": "decode", "prompts": [[ids]...], "steps": n}      seconds per step once every prompt is in
    {"op": "first_token", "prompts": [[ids]...], "steps": n} seconds until all prompts, sent at once, have n tokens
    {"op": "warm", "prompts": [[ids]...]}                    make the prompts' KV cached; nothing is timed
    {"op": "held", "prompt": [ids]}                          {"bytes": KV that a running sequence of it holds}
    {"op": "facts"}                                          versions, memory, what KV weighs

Every answer is {"seconds": ...} or a dict of facts, or {"error": text}.
"""

import json
import os
import sys
import traceback
from typing import Any, Protocol

Prompt = list[int]


class Subject(Protocol):
    """An engine with the model loaded. Sampling is greedy and does not stop at an end-of-sequence token."""

    def prefill(self, prompt: Prompt) -> float:
        """Seconds from the prompt to its first token; earlier prompts share nothing with it."""

    def decode(self, prompts: list[Prompt], steps: int) -> float:
        """Seconds per step of one token for each prompt, once all prompts are in."""

    def first_token(self, prompts: list[Prompt], steps: int) -> float:
        """Seconds from sending all prompts at once until each of them has `steps` tokens."""

    def warm(self, prompts: list[Prompt]) -> None:
        """Make the prompts' KV cached, if the engine caches."""

    def facts(self) -> dict[str, Any]:
        """What to print beside the figures: version, memory, bytes of KV."""


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answer(subject: Subject, request: dict[str, Any]) -> dict[str, Any]:
    op = request.pop("op")
    result = getattr(subject, op)(**request)
    return result if isinstance(result, dict) else {"seconds": result}


def serve(load: Any) -> None:
    """Load with `load()`, say so, then answer requests until the input ends.

    Libraries print as they like: what they write to the standard output goes to the standard error.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        subject = load()
        reply({"ready": True})
    except BaseException:
        reply({"error": traceback.format_exc()})
        return
    for line in sys.stdin:
        try:
            reply(answer(subject, json.loads(line)))
        except Exception:
            reply({"error": traceback.format_exc()})
