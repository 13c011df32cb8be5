"""Mistral's format: ``[TOOL_CALLS]`` and a list of calls, or a name and its arguments after each mark."""

from gateway.text_machine import END, Reader
from gateway.tool_parsers.call_reader import NotACall
from gateway.tool_parsers.plain_json import PlainJsonParser

_CALLS, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_MAX_NAME_CHARS = 64


class MistralParser(PlainJsonParser):
    """Reads calls after each mark; a list of them also where the text begins, as mark tokens may be left out of it."""

    @staticmethod
    def written(name: str, arguments: str) -> str:
        """A call in this format."""
        return f'{_CALLS}[{{"name": "{name}", "arguments": {arguments}}}]'

    def _read(self) -> Reader[None]:
        if (yield from self._begins_with_list()):
            yield from self._calls()
        while (yield from self._until(_CALLS)) != END:
            char = yield from self._next_visible()
            self._unget(char)
            if char and char in "[{":
                yield from self._calls()
            else:
                yield from self._named()
        self._end()

    def _begins_with_list(self) -> Reader[bool]:
        """Whether the text begins with a bracket and a brace; leaves all of it to be read again."""
        read = [(yield from self._next())]
        while read[-1].isspace() or (read[-1] == "[" and "[" not in read[:-1]):
            read.append((yield from self._next()))
        for char in reversed(read):
            self._unget(char)
        return read[-1] == "{" and "[" in read

    def _named(self) -> Reader[None]:
        """A name and its arguments; content when it is something else."""
        name = ""
        try:
            while (char := (yield from self._next())) not in ("{", "[", END) and len(name) < _MAX_NAME_CHARS:
                name += char
            self._unget(char)
            name = name.strip()
            if name not in self._names:
                raise NotACall
            if char == "[":
                for wanted in _ARGUMENTS:
                    yield from self._expect(wanted)
            char = yield from self._next_visible()
            self._unget(char)
            if char != "{":
                raise NotACall
        except NotACall:
            self._say_raw()
            return
        self._begin(name)
        try:
            yield from self._value(emit=True)
        except NotACall:  # cut short
            return
