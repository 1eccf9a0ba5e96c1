"""`cygnet chat`: talk to a model in the terminal."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated

import typer

from cygnet.cli.options import DEFAULT_URL, ApiKey, ServerUrl, Sets

if TYPE_CHECKING:
    from rich.console import Console

    from cygnet.cli.chat_client import ChatClient, Turn

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /stats, /quit"


def chat(
    url: ServerUrl = DEFAULT_URL,
    model: Annotated[
        str, typer.Option(metavar="MODEL", show_default=False, help="start a server with this model, stop it after")
    ] = "",
    sets: Sets = None,
    system: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="system message")] = "",
    completion: Annotated[bool, typer.Option("--completion", help="continue text instead of chatting")] = False,
    max_tokens: Annotated[int, typer.Option(metavar="N", show_default=False, help="longest answer [512]")] = 512,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="sampling temperature [the server's]")] = None,
    api_key: ApiKey = "",
) -> None:
    """Talk to a model in the terminal.

    It is a running server's, or with --model one that is started for the conversation. A base model is not trained to
    chat: what you type is continued instead.
    """
    from cygnet.cli.chat_client import ChatClient
    from cygnet.cli.console import stdout

    if sets and not model:
        raise typer.BadParameter("a running server keeps its settings; --set goes with --model", param_hint="--set")
    with ExitStack() as stack:
        if model:
            from cygnet.cli.child import ChildServer

            url = stack.enter_context(ChildServer(model, sets or (), api_key)).url
        client = stack.enter_context(ChatClient(url, api_key))
        client.choose_model()
        Conversation(client, stdout(), system, completion or client.is_base, max_tokens, temperature).run()


class Conversation:
    """The loop of reading, asking and showing. In completion mode nothing is remembered between prompts."""

    def __init__(
        self,
        client: "ChatClient",
        console: "Console",
        system: str,
        completion: bool,
        max_tokens: int,
        temperature: float | None,
    ) -> None:
        self._client, self._console = client, console
        self._system = system
        self._completion = completion
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self._messages: list[dict[str, str]] = []
        self._turns: list[Turn] = []

    def run(self) -> None:
        """Until /quit or the end of input."""
        self._console.print(f"{self._client.model} at {self._client.url}", style="bold", markup=False)
        self._note(HELP)
        if self._completion:
            self._say_completion()
        for line in self._lines():
            command, _, rest = line.partition(" ")
            if command == "/quit":
                return
            if command.startswith("/"):
                self._command(command, rest.strip())
            elif line.strip():
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        import contextlib
        import sys

        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  line editing and history
        while True:
            try:
                yield input("\n> ")
            except EOFError:
                self._console.print()
                return

    def _command(self, command: str, rest: str) -> None:
        if command == "/reset":
            self._messages.clear()
            self._note("forgotten")
        elif command == "/system":
            self._system = rest
            self._messages.clear()
            self._note("system message set; the conversation starts anew" if rest else "no system message")
        elif command == "/stats":
            self._stats()
        else:
            self._note(HELP)

    def _answer(self, line: str) -> None:
        from cygnet.cli.chat_client import NoChatTemplateError, ServerError, Turn
        from cygnet.cli.console import print_error

        turn = Turn()
        try:
            if self._completion:
                self._show(self._client.complete(line, turn, **self._options), turn)
                return
            self._messages.append({"role": "user", "content": line})
            head = [{"role": "system", "content": self._system}] if self._system else []
            text = self._show(self._client.chat(head + self._messages, turn, **self._options), turn)
            self._messages.append({"role": "assistant", "content": text})
        except NoChatTemplateError:
            self._messages.clear()
            self._completion = True
            self._say_completion()
            self._answer(line)
        except ServerError as error:
            if self._messages:
                self._messages.pop()  # the question stays out of a conversation that never got to it
            print_error(str(error))

    def _show(self, pieces: Iterator[str], turn: "Turn") -> str:
        """Print pieces as they come; Ctrl-C ends the answer and keeps what there is of it."""
        parts: list[str] = []
        with closing(pieces):  # type: ignore[type-var]  # a generator
            try:
                for piece in pieces:
                    parts.append(piece)
                    self._console.print(piece, end="", markup=False, soft_wrap=True, style="cyan")
            except KeyboardInterrupt:
                turn.finish_reason = "interrupted"
        self._turns.append(turn)
        self._console.print()
        self._note(_describe(turn))
        return "".join(parts)

    def _say_completion(self) -> None:
        self._note(f"{self._client.model} is not made for chatting: it continues what you type, each prompt on its own")

    def _stats(self) -> None:
        prompt, output = sum(t.prompt_tokens for t in self._turns), sum(t.output_tokens for t in self._turns)
        cached = sum(t.cached_tokens or 0 for t in self._turns)
        speeds = [turn.tokens_per_s for turn in self._turns if turn.tokens_per_s]
        speed = f", {sum(speeds) / len(speeds):.1f} tok/s" if speeds else ""
        share = f" ({100 * cached / prompt:.0f} %)" if prompt else ""
        self._note(
            f"{len(self._turns)} answers, {output} tokens{speed}; {prompt} prompt tokens, {cached} from cache{share}"
        )

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def _describe(turn: "Turn") -> str:
    speed = f" at {turn.tokens_per_s:.1f} tok/s" if turn.tokens_per_s else ""
    cached = f", {turn.cached_tokens} cached" if turn.cached_tokens is not None else ""
    end = {"length": "; cut at --max-tokens", "interrupted": "; interrupted"}.get(turn.finish_reason or "", "")
    if turn.finish_reason == "interrupted" and not turn.output_tokens:
        return f"(first text after {turn.first_s:.2f} s{end})"
    return (
        f"({turn.output_tokens} tokens{speed}, first after {turn.first_s:.2f} s; "
        f"{turn.prompt_tokens} prompt tokens{cached}{end})"
    )
